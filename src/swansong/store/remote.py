"""Saving in a process of its own: this end of it, which starts it, gives orders and hears of its end.

The process is no fork and no child of `multiprocessing`, which would run an unguarded script again. It has a
session of its own, so the terminal's interrupt does not reach it, and ends when this one does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final

from swansong.errors import SaveError
from swansong.store.capture import Staging
from swansong.store.channel import Channel
from swansong.store.files import FileLock
from swansong.store.isolated import isolated_python
from swansong.store.orders import ANSWER_LIMIT, ORDER_LIMIT, encode_order, outcome, travels
from swansong.store.shared_memory import Block, SharedMemory
from swansong.store.task import Done, Task, prune
from swansong.store.writer import WriterOptions
from swansong.store.writing import announced

END_S: Final = 5.0
"""How long an idle worker may take to end before it is killed."""
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""NumPy's libraries start a thread per core when they are imported, and the worker calculates nothing."""
_TOLD: Final = 1000


class Remote:
    """A writer process, started when it is first needed and again after it died, and memory shared with it.

    `save` runs on one thread at a time; `close` on any. In a forked child it is as new.
    """

    def __init__(self, options: WriterOptions, staging: Callable[[SharedMemory], Staging]) -> None:
        """`staging` makes what copies into shared memory."""
        self._options, self._make_staging = options, staging
        self._begin()
        _remotes.add(self)

    def _begin(self) -> None:
        self._memory = SharedMemory()
        self.staging = self._make_staging(self._memory)
        self._worker: _Worker | None = None
        self._guard = threading.Lock()
        self._closed = False

    def save(self, task: Task) -> Done:
        """Have `task` carried out, whose content was captured by `staging`.

        Raises what `task.carry_out` does, and SaveError at once if the process dies; nothing is left of it.
        """
        try:
            with self._guard:
                self._closed = False
                done = self._ask(task)
        finally:
            if self._closed:  # meanwhile, when it could not take effect
                self.close()
        if task.keep is not None and not travels(task.keep):
            return Done(saved=done.saved, unpruned=prune(task.series, task.keep, done.saved))
        return done

    def close(self) -> None:
        """End the process, once its present order is carried out. It is started again when needed."""
        self._closed = True
        if self._guard.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._guard.release()

    def forget(self) -> None:
        """In a forked child: the process, and what is shared with it, are the parent's."""
        self._memory.forget()
        if self._worker is not None:
            self._worker.forget()
        self._begin()

    def _ask(self, task: Task) -> Done:
        if self._worker is not None and self._worker.ended(0.0):
            self._end()  # it died between two saves, to nobody's harm
        block = self._block(task)
        order = encode_order(task, self._options, block)
        path = task.series.directory / task.name
        if len(order) > ORDER_LIMIT:
            raise SaveError(
                f"{path}: not saved: what describes it has {len(order):,} bytes, the writer process takes "
                f"{ORDER_LIMIT:,}; use async_save='thread'",
                path=str(path),
            )
        if self._worker is None:
            self._worker = _Worker()
        with announced(task.series.space, task.series.name) as lock:
            memory = (block.descriptor,) if block is not None else ()
            try:
                answer = self._worker.ask(order, lock, memory)
            except BaseException:
                self._end()  # an answer that is never read must not be taken for the next one's
                raise
        if answer is not None:
            return outcome(answer, task)
        fate = self._end()
        with suppress(OSError):
            task.series.sweep()  # what it left behind half-made
        raise SaveError(f"{path}: not saved: {fate}", path=str(path))

    def _block(self, task: Task) -> Block | None:
        content = task.content
        for group in (content.tensors, content.rest, content.appended):
            for tensor in group.values():
                if tensor.nbytes:
                    return self._memory.block_of(tensor.array)
        return None

    def _end(self) -> str:
        if self._worker is None:
            return ""
        fate = self._worker.end()
        self._worker = None
        return fate


class _Worker:
    """One such process."""

    def __init__(self) -> None:
        """Start it; this takes some milliseconds, and its start goes on meanwhile. Raises OSError."""
        with ExitStack() as undo:
            here, there = socket.socketpair()
            undo.callback(here.close)
            self._said = os.memfd_create("swansong-worker-stderr", os.MFD_CLOEXEC)
            undo.callback(os.close, self._said)
            own = os.pidfd_open(os.getpid())
            try:
                self._process = subprocess.Popen(
                    [*isolated_python("swansong.store.worker"), str(there.fileno()), str(own)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    cwd="/",
                    env=os.environ | _ONE_THREAD,
                    pass_fds=(there.fileno(), own),
                    start_new_session=True,
                )
            finally:
                there.close()
                os.close(own)
            undo.callback(self._process.kill)
            self._channel = Channel(here, os.pidfd_open(self._process.pid))
            undo.pop_all()

    def ask(self, order: bytes, lock: FileLock, memory: tuple[int, ...]) -> bytes | None:
        """Its answer to an order, which it gets with the lock; None: it has died."""
        # Whatever was sent, an answer may have come before the end.
        self._channel.send(order, (lock.fileno(), *memory))
        lock.release()
        frame = self._channel.receive(ANSWER_LIMIT)
        return frame[0] if frame is not None else None

    def ended(self, timeout_s: float) -> bool:
        """Wait for its end; True if it has come."""
        return self._channel.ended(timeout_s)

    def end(self) -> str:
        """End it, if it has not ended itself, and say how it ended."""
        self._channel.end()
        if not self._channel.ended(END_S):
            self._process.kill()
        code = self._process.wait()
        tail = os.pread(self._said, _TOLD, max(0, os.fstat(self._said).st_size - _TOLD))
        self._channel.close()
        os.close(self._said)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
        last = tail.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process that wrote it (pid {self._process.pid}) {how}{f': {last}' if last else ''}"

    def forget(self) -> None:
        """In a forked child."""
        self._channel.close()
        os.close(self._said)
        self._process.returncode = 0  # not the child's to wait for, nor to warn of


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# What a forked child must let go of. A property of the process, hence module-level.
_remotes: weakref.WeakSet[Remote] = weakref.WeakSet()


def _forget_in_child() -> None:
    for remote in list(_remotes):
        remote.forget()


os.register_at_fork(after_in_child=_forget_in_child)
