"""SIGTERM, noticed even while the main thread is inside a C call; and what forked children must forget.

Python runs a signal's handler only when the main thread next executes bytecode, which inside a collective may
be never. Its C-level handler however writes the signal's number into the wake-up descriptor at once
(`signal.set_wakeup_fd`), and a thread here reads that. The Python handler stays as a second way, for the
moments when somebody else, asyncio for one, has put a descriptor of its own in place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, NoReturn, Self

from swansong.errors import SwansongError, SwansongWarning

_END: Final = 0
"""In the pipe: the thread is to end. Signals have numbers 1 to 64."""
_HANDLED: Final = 255
"""In the pipe: the Python handler ran for SIGTERM."""


def in_forked_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that is forked from now on, as long as its object lives here."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    os.register_at_fork(after_in_child=call)


def reraise_sigterm() -> NoReturn:
    """End this process as SIGTERM would have, so that whoever waits for it sees that. From any thread.

    Nothing is unwound. On the main thread standard output and error are flushed; on another they are not,
    since the main thread may be stuck with their locks.
    """
    if threading.current_thread() is threading.main_thread():
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
    _die_by(signal.SIGTERM)


def _die_by(number: signal.Signals) -> NoReturn:
    # `signal.signal` works on the main thread only, which may be stuck; the C function works on any.
    c_signal = ctypes.CDLL(None).signal
    c_signal.argtypes, c_signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    c_signal(number, None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    # Reached only by the first process of a pid namespace, which default actions do not end.
    os._exit(128 + number)


class SignalWatch:
    """Calls `on_terminate` once, on a thread of its own, when SIGTERM first comes. A context manager.

    SIGTERM no longer ends the process: whoever is called sees to that, with `reraise_sigterm`. The handler
    and the wake-up descriptor that were there before go on working, and are put back at the end. Second
    SIGINTs since the last `reassert` end the process at once; the first is Python's KeyboardInterrupt, as
    ever. No other signal means anything here.

    Entered off the main thread, where Python allows no handlers, or where SIGTERM is ignored or has a handler
    that is not Python's, nothing is installed and a SwansongWarning says so.
    """

    def __init__(self, on_terminate: Callable[[], None]) -> None:
        self.installed = False
        self.terminated = False
        """True once SIGTERM has come."""
        self._on_terminate = on_terminate
        self._previous: Any = signal.SIG_DFL
        self._chained: tuple[int, tuple[int, int]] | None = None
        """Another's wake-up descriptor and what it was, since its number may come to mean something else."""
        self._interrupts = 0
        self._in_handler = False
        self._error: Exception | None = None
        self._masks: dict[int, set[int]] = {}
        """Thread -> signals that it blocked before its fork that is under way."""
        self._read_end = self._write_end = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        refusal = _refusal()
        if refusal:
            warnings.warn(
                f"SIGTERM will not save the training state: {refusal}", SwansongWarning, stacklevel=2
            )
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._serve, name="swansong-signals", daemon=True)
        self._thread.start()
        self.installed = True
        self._register_at_fork()
        self.reassert()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reassert(self) -> None:
        """Take handler and descriptor again, should another have taken them: at every step boundary.

        asyncio, for one, leaves no descriptor at all behind. What is found in place is chained. Does nothing
        off the main thread. Raises SwansongError if `on_terminate` has failed.
        """
        if self._error is not None:
            raise SwansongError(f"SIGTERM could not be served: {self._error}") from self._error
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        self._interrupts = 0
        if refusal := _refusal():
            warnings.warn(
                f"SIGTERM no longer saves the training state: {refusal}", SwansongWarning, stacklevel=2
            )
            return
        handler = signal.getsignal(signal.SIGTERM)
        if handler != self._handle:
            self._previous = handler
            signal.signal(signal.SIGTERM, self._handle)
        found = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if found not in (-1, self._write_end):
            self._chained = found, _identity(found)

    def close(self) -> None:
        """Put back what was there before, unless another has taken over meanwhile. Again: nothing.

        Called off the main thread, it cannot; then SIGTERM has its previous effect all the same.
        """
        if not self.installed:
            return
        self.installed = False
        if threading.current_thread() is threading.main_thread():
            found = signal.set_wakeup_fd(-1)
            if found == self._write_end:
                found = self._chained_descriptor()
            if found != -1:
                signal.set_wakeup_fd(found)
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._previous)
            self._end_thread()

    # -- the two ways by which a signal comes ---------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._in_handler:
            return  # the handler chained to leads back here
        self._in_handler = True
        try:
            if self.installed:
                # Only the thread may call `on_terminate`: the main thread may hold any lock just now.
                with suppress(BlockingIOError):
                    os.write(self._write_end, bytes([_HANDLED]))
            if callable(self._previous):
                self._previous(number, frame)
            elif not self.installed and self._previous == signal.SIG_DFL:
                reraise_sigterm()
        finally:
            self._in_handler = False

    def _serve(self) -> None:
        while True:
            for number in os.read(self._read_end, 4096):
                if number == _END:
                    return
                if not self.installed:
                    self._serve_closed(number)
                elif number in (signal.SIGTERM, _HANDLED):
                    self._terminate()
                elif number == signal.SIGINT:
                    self._interrupt()
                if number != _HANDLED:
                    self._forward(number)

    def _serve_closed(self, number: int) -> None:
        """`close` could not put things back, or is about to: a signal does what it did before."""
        if number == signal.SIGTERM and self._previous == signal.SIG_DFL:
            reraise_sigterm()

    def _terminate(self) -> None:
        if self.terminated:
            return
        self.terminated = True
        try:
            self._on_terminate()
        except Exception as error:  # noqa: BLE001 - a thread's boundary: `reassert` raises it
            self._error = error

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            _die_by(signal.SIGINT)

    def _forward(self, number: int) -> None:
        descriptor = self._chained_descriptor()
        if descriptor != -1:
            with suppress(OSError):  # full or broken: the C handler ignores that, too
                os.write(descriptor, bytes([number]))

    def _chained_descriptor(self) -> int:
        if self._chained is not None:
            descriptor, identity = self._chained
            with suppress(OSError):
                if _identity(descriptor) == identity:
                    return descriptor
        return -1

    def _end_thread(self) -> None:
        os.set_blocking(self._write_end, True)
        os.write(self._write_end, bytes([_END]))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)
        self._read_end = self._write_end = -1

    # -- forks ----------------------------------------------------------------------------------------

    def _register_at_fork(self) -> None:
        """A child shares the pipe: until it has let go, a SIGTERM for the child would be taken for ours.

        A pool's `terminate()` sends such signals, perhaps at once. So SIGTERM is blocked during the fork, and
        a child's waits until the child has its own handlers back.
        """
        watch = weakref.ref(self)

        def before() -> None:
            if (alive := watch()) is not None and alive.installed:
                blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                alive._masks[threading.get_ident()] = {int(number) for number in blocked}

        def after_in_parent() -> None:
            if (alive := watch()) is not None:
                alive._unblock()

        def after_in_child() -> None:
            if (alive := watch()) is not None:
                alive._forget()
                alive._unblock()

        os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)

    def _unblock(self) -> None:
        blocked = self._masks.pop(threading.get_ident(), None)
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _forget(self) -> None:
        """In a child: as if nothing had ever been installed, and no descriptor shared with the parent."""
        if not self.installed:
            return
        self.installed = False
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)
        self._thread = None
        self._close_pipe()


def _refusal() -> str:
    """Why nothing can be installed; empty if it can."""
    if threading.current_thread() is not threading.main_thread():
        return "handlers can be installed on the main thread only"
    handler = signal.getsignal(signal.SIGTERM)
    if handler is None:
        return "it has a handler that was not installed from Python"
    if handler == signal.SIG_IGN:
        return "it is ignored in this process"
    return ""


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
