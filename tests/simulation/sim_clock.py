"""Virtual time: what happens next, in an order that a seed decides."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A queue of things to do, each at its moment. Equal moments go in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[list[Any]] = []
        self._count = 0

    def at(self, moment: float, do: Callable[..., object], *args: object) -> list[Any]:
        """Do something at a moment; what is returned can be given to `cancel`."""
        self._count += 1
        entry = [moment if moment > self.now else self.now, self._count, do, args]
        heapq.heappush(self._heap, entry)
        return entry

    def after(self, seconds: float, do: Callable[..., object], *args: object) -> list[Any]:
        """Do something in so many seconds."""
        return self.at(self.now + seconds, do, *args)

    @staticmethod
    def cancel(entry: list[Any] | None) -> None:
        """Do not do it after all."""
        if entry is not None:
            entry[2] = None

    def step(self) -> bool:
        """Do the next thing; False if there is none."""
        while self._heap:
            moment, _, do, args = heapq.heappop(self._heap)
            if do is None:
                continue
            self.now = moment
            self.done += 1
            do(*args)
            return True
        return False
