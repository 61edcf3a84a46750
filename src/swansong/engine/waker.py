"""Ends a selector's wait from another thread or a signal handler."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Waker:
    """An eventfd(2), to be registered for reading. `wake` does nothing once it is closed."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant: a signal handler may wake while its own thread does.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._descriptor

    def wake(self) -> None:
        """Make the descriptor readable."""
        with self._lock:  # a late thread must not write to whoever has the number by then
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it unreadable, before looking at what there is to do."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
