"""What a controller has to say to people, a bounded number of words a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST: Final = 20
"""Notes in `WINDOW_S`; others are counted."""
WINDOW_S: Final = 10.0


class Notes:
    """Passes notes on, unless there are too many: strangers must not fill a log."""

    def __init__(self, write: Callable[[str], object] | None) -> None:
        """`write` takes one line; None: nobody listens."""
        self._write = write
        self._since = 0.0
        self._written = self._left_out = 0

    def note(self, text: str, now: float) -> None:
        """Say something; control characters, which a stranger may have sent, are escaped."""
        if self._write is None:
            return
        if now >= self._since + WINDOW_S:
            self._since, self._written = now, 0
        if self._written >= MOST:
            self._left_out += 1
            return
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        self._write(f"{line} ({left_out} notes before it left out)" if left_out else line)
