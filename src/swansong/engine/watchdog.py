"""Progress watching: whether the training loop takes far longer over a step than it used to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from swansong.policy.checks import positive_number

WINDOW: Final = 100
"""Steps whose durations count."""
FACTOR: Final = 5.0
"""A stall is a step that takes this many times the slowest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallOptions:
    """When a lack of progress is a stall. Raises ConfigError for what is no positive finite number."""

    floor_s: float = 60.0
    """No shorter time without a step is a stall."""
    first_step_timeout_s: float | None = 1800.0
    """How long the first step may take, in which frameworks compile; None: as long as it likes.

    It has a limit, unlike a phase, because jobs do hang in their first collective; and one of its own,
    because a compilation says nothing of the steps that follow: its duration does not count among theirs.
    """

    def __post_init__(self) -> None:
        positive_number("floor_s", self.floor_s)
        if self.first_step_timeout_s is not None:
            positive_number("first_step_timeout_s", self.first_step_timeout_s)


class Watchdog:
    """Keeps the times of steps and says when one is overdue. Has no thread: another calls `stalled`.

    Time goes in with each call; `monotonic` gives it to `phase` only. Any thread may call anything.
    Time spent in phases and holds counts for no step.
    """

    def __init__(
        self, options: StallOptions, now: float, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._options, self._monotonic = options, monotonic
        self._lock = threading.Lock()
        self._durations: deque[float] = deque(maxlen=WINDOW)
        self._steps = 0
        self._spent_s = 0.0
        """On the present step, before `_since`."""
        self._since = now
        """When watching began, of the present step or again."""
        self._phases: tuple[str, ...] = ()
        self._held = False
        self._acknowledged = False
        self._asked_at = now

    def note_step(self, now: float) -> None:
        """A step has ended."""
        with self._lock:
            if not self._paused:
                # The first is left out; a step that ends inside a phase was not watched whole.
                if self._steps:
                    self._durations.append(self._spent_s + now - self._since)
                self._steps += 1
            self._spent_s, self._since = 0.0, now
            self._acknowledged = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Declare work that is no step, such as evaluation: in here nothing is a stall. Phases nest."""
        with self._lock:
            self._change(self._monotonic(), phases=(*self._phases, name))
        try:
            yield
        finally:
            with self._lock:
                self._change(self._monotonic(), phases=self._phases[:-1])
                self._acknowledged = False

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases under way, outermost first."""
        return self._phases

    def hold(self, now: float) -> None:
        """Stop watching: the gate is closed, a save is under way. Again: nothing."""
        with self._lock:
            self._change(now, held=True)

    def go_on(self, now: float) -> None:
        """Watch again, from now on."""
        with self._lock:
            self._change(now, held=False)

    def stall_timeout_s(self) -> float | None:
        """Return how long the present step may take; None: as long as it likes."""
        with self._lock:
            return self._timeout_s()

    def stalled(self, now: float) -> str | None:
        """Return what is wrong, in words, if the present step is overdue and that is not acknowledged.

        Call it regularly, at least every few seconds. If the calls themselves stop for half the time allowed
        then this process was stopped, not its training, and watching begins anew.
        """
        with self._lock:
            asked_at, self._asked_at = self._asked_at, now
            allowed = self._timeout_s()
            if self._paused or self._acknowledged or allowed is None:
                return None
            if now - asked_at >= allowed / 2:
                self._spent_s, self._since = self._spent_s + asked_at - self._since, now
                return None
            waited = now - self._since
            return self._words(waited, allowed) if waited > allowed else None

    def acknowledge(self) -> None:
        """The stall was reported: it is not one again until a step or a phase ends."""
        with self._lock:
            self._acknowledged = True

    @property
    def _paused(self) -> bool:
        return self._held or bool(self._phases)

    def _change(self, now: float, *, phases: tuple[str, ...] | None = None, held: bool | None = None) -> None:
        was_paused = self._paused
        self._phases = self._phases if phases is None else phases
        self._held = self._held if held is None else held
        if self._paused and not was_paused:
            self._spent_s += now - self._since
        elif was_paused and not self._paused:
            self._since = now

    def _timeout_s(self) -> float | None:
        if not self._steps:
            return self._options.first_step_timeout_s
        return max(self._options.floor_s, FACTOR * max(self._durations, default=0.0))

    def _words(self, waited: float, allowed: float) -> str:
        if not self._steps:
            return f"the first step has not ended for {waited:.0f} s; {allowed:.0f} s are allowed"
        slowest = max(self._durations, default=0.0)
        return (
            f"no step has ended for {waited:.0f} s; {allowed:.0f} s are allowed: the slowest of the last "
            f"{len(self._durations)} took {slowest:.1f} s"
        )
