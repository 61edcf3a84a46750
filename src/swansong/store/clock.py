"""The only place that reads a clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Both clocks, so that tests can bring their own."""

    def wall(self) -> float:
        """Seconds since the epoch, UTC; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment; never jumps."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        """See Clock."""
        return time.time()

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()


def iso(seconds: float) -> str:
    """Wall seconds as ISO 8601 in UTC with microseconds: what manifests carry."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def from_iso(text: str) -> float:
    """The reverse of `iso`. Raises ValueError."""
    return datetime.fromisoformat(text).timestamp()
