"""A launcher that does to ranks what torchrun does, and forks them, so that no import is waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

LOOK_S = 0.02
TERM_AFTER_S = 0.1
"""From the first failure to SIGTERM for all others: torchrun's monitor interval."""
KILL_AFTER_S = 30.0
"""From there to SIGKILL."""


class Elastic:
    """Starts a job, and again when a rank has failed; a thread of its own does it."""

    def __init__(self, start: Callable[[int], list[int]], ended: Mapping[int, int], *, restarts: int) -> None:
        """`start` takes the number of the start and returns process ids, `ended` tells exit codes by them."""
        self._start, self._ended, self._restarts = start, ended, restarts
        self._over = threading.Event()
        self.code: int | None = None
        """0 or 1, once it has ended."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> int | None:
        """The code, if it has ended by then."""
        self._thread.join(timeout_s)
        return self.code

    def close(self) -> None:
        """End the ranks that are there, and start them no more."""
        self._over.set()
        self._thread.join(2 * KILL_AFTER_S)

    def _run(self) -> None:
        for number in range(self._restarts + 1):
            pids = self._start(number)
            while not self._over.is_set() and not all(self._ended.get(pid) == 0 for pid in pids):
                if any(self._ended.get(pid, 0) for pid in pids):
                    time.sleep(TERM_AFTER_S)
                    break
                time.sleep(LOOK_S)
            else:
                if not self._over.is_set():
                    self.code = 0
                    return
            self._end(pids)
            if self._over.is_set():
                break
        self.code = 1

    def _end(self, pids: list[int]) -> None:
        self._send(signal.SIGTERM, pids)
        ends = time.monotonic() + KILL_AFTER_S
        while not all(pid in self._ended for pid in pids):
            if time.monotonic() > ends:
                self._send(signal.SIGKILL, pids)
                ends += KILL_AFTER_S
            time.sleep(LOOK_S)

    def _send(self, number: signal.Signals, pids: list[int]) -> None:
        for pid in pids:
            if pid not in self._ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
