"""Saving in a thread of its own: one job at a time, and no failure that goes unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from swansong.errors import SaveError

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs one job after another in a thread. The first failure is raised to whoever asks next.

    The thread is no daemon: a process that ends waits for the save that is running.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._done: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """True while a job runs."""
        return self._done is not None and not self._done.is_set()

    def start(self, job: Callable[[], Result]) -> None:
        """Wait for the job before, raise its error if it failed, then start this one.

        Raises SaveError if there can be no more threads.
        """
        self.wait()
        done = threading.Event()
        thread = threading.Thread(target=self._run, args=(job, done), name=self._name)
        try:
            thread.start()
        except RuntimeError as error:
            raise SaveError(f"not saved: {error}") from error
        self._done, self._thread = done, thread

    def poll(self) -> Result | None:
        """Raise the error of a job that has failed meanwhile; return the result of one that is done, once."""
        if self.busy:
            return None
        return self.wait()

    def wait(self) -> Result | None:
        """Wait for the running job, if any. Returns its result, once; raises its error, once.

        Has no deadline of its own: a job's system calls are bounded by the disk, and to give up would be to
        report neither success nor failure.
        """
        if self._done is not None and self._thread is not None:
            # Not by `join`: an exception from a signal handler in it makes a running thread look finished.
            self._done.wait()
            self._thread.join()
            self._done = self._thread = None
        error, self._error = self._error, None
        result, self._result = self._result, None
        if error is not None:
            raise error
        return result

    def _run(self, job: Callable[[], Result], done: threading.Event) -> None:
        try:
            self._result = job()
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: kept for `poll` and `wait`
            self._error = error
        finally:
            done.set()
