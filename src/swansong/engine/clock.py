"""Update clocks, which say at which step a component is whole, and the gate that holds updates back.

A component's clock counts updates three times: `queued` by the host when Python dispatches one, `begun`
before its first write and `done` after its last. The component is whole at N if and only if all three are N.

**Why another thread may read it at any time, without a lock.** The counters are 64-bit cells, aligned, which
Python code stores and loads whole while it holds the interpreter lock. Every hand-over of that lock orders
memory, so whoever has seen (or copied) a byte that an update wrote finds `begun` raised when it reads the
clock afterwards, on any machine. And `queued` is read last: the counters only grow, and done <= begun <=
queued, so if the three values are equal the component was still whole when that last one was read.
"""

from __future__ import annotations

import threading
import time
import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from swansong.engine.signals import in_forked_children
from swansong.errors import ConfigError, SwansongWarning, TrainingInterrupted
from swansong.policy.cut import Held
from swansong.protocol.messages import Release

CELLS: Final = 3
"""64-bit signed integers that a clock lives in: queued, begun, done."""
UNKNOWN: Final = -1
"""In the cells of an external clock: the host does not know."""

_QUEUED, _BEGUN, _DONE = range(CELLS)


@dataclass(frozen=True, slots=True)
class Reading:
    """A clock as it was read."""

    queued: int
    """Updates that Python has dispatched."""
    begun: int
    """Updates whose first write may have happened; UNKNOWN in the record of an external clock."""
    done: int
    """Updates whose last write has happened; UNKNOWN likewise."""

    @property
    def step(self) -> int | None:
        """The step at which the component is whole; None: at none, it is being updated or half updated."""
        return self.done if self.queued == self.begun == self.done >= 0 else None


class Clock(ABC):
    """The clock of one component. Written by the thread that trains, read by any.

    `cells` is where it lives: a writable memoryview of three int64, such as a flight recorder hands out,
    which outlives the process. By default it is private memory. A forked child has a private copy.
    """

    def __init__(self, key: str, *, cells: memoryview | None = None) -> None:
        if cells is not None and not _can_hold(cells):
            raise ConfigError(f"cells of clock {key}: wanted a writable memoryview of {CELLS} int64")
        self.key = key
        """Of the component."""
        self._cells = _private() if cells is None else cells
        if cells is not None:
            in_forked_children(self._make_private)

    def read(self) -> Reading:
        """Return where the component stands now. Raises ClockNotReadableError if that cannot be told yet."""
        begun, done = self._counts()
        return Reading(self._cells[_QUEUED], begun, done)

    @abstractmethod
    def _counts(self) -> tuple[int, int]:
        """Return `begun` and `done`, read one after the other."""

    def queue(self) -> None:
        """Count an update as dispatched. `Gate.enter` does it."""
        self._cells[_QUEUED] += 1

    def withdraw(self) -> None:
        """Take the last `queue` back: the update will not be dispatched after all."""
        self._cells[_QUEUED] -= 1

    def _make_private(self) -> None:
        self._cells = _private(self._cells)


class UpdateClock(Clock):
    """A clock that the host keeps: for updates that are over when the call that makes them returns."""

    def __init__(self, key: str, *, step: int = 0, cells: memoryview | None = None) -> None:
        super().__init__(key, cells=cells)
        self._window = _Window(self)
        self.reset(step)

    def window(self) -> _Window:
        """Return a context manager around all writes of one update; the gate was passed before.

        Left by an exception, the component stays half updated: it is whole at no step until `reset`. Raises
        RuntimeError on entry if the update was not queued.
        """
        return self._window

    def begin(self) -> None:
        """What entering `window` does: before the first write."""
        cells = self._cells
        if cells[_BEGUN] >= cells[_QUEUED]:
            raise RuntimeError(f"component {self.key}: an update begins that has not passed the gate")
        cells[_BEGUN] += 1

    def finish(self) -> None:
        """What leaving `window` does: after the last write."""
        self._cells[_DONE] += 1

    def reopen(self) -> None:
        """The update that was over goes on: there is more to write in this step. Under the gate's lock."""
        self._cells[_DONE] -= 1

    def abandon(self) -> None:
        """Take back what was queued and has not begun: an exception has ended the loop, and it never will."""
        self._cells[_QUEUED] = self._cells[_BEGUN]

    def skip(self) -> None:
        """Count a step that leaves this component as it is, as when a gradient scaler skips the update."""
        for cell in range(CELLS):
            self._cells[cell] += 1

    def reset(self, step: int) -> None:
        """Say that the component is whole at `step`, having been made or loaded. Outside of any window."""
        if step < 0:
            raise ConfigError(f"step of component {self.key}: wanted 0 or more, got {step}")
        cells = self._cells
        cells[_QUEUED] = UNKNOWN  # so that nothing read meanwhile is whole
        cells[_BEGUN] = cells[_DONE] = step
        cells[_QUEUED] = step

    def _counts(self) -> tuple[int, int]:
        return self._cells[_BEGUN], self._cells[_DONE]


class ExternalClock(Clock):
    """A clock whose `begun` and `done` are kept where the writes happen: in a graph, on a device's stream.

    Both callables return a count of updates, in the order in which the writes that they bracket happen, or
    raise ClockNotReadableError. They are called on whichever thread reads.
    """

    def __init__(
        self,
        key: str,
        *,
        read_begun: Callable[[], int],
        read_done: Callable[[], int],
        step: int = 0,
        cells: memoryview | None = None,
    ) -> None:
        super().__init__(key, cells=cells)
        self._read_begun, self._read_done = read_begun, read_done
        self._cells[_BEGUN] = self._cells[_DONE] = UNKNOWN
        self._cells[_QUEUED] = step

    def _counts(self) -> tuple[int, int]:
        return int(self._read_begun()), int(self._read_done())


def held(clock: Clock, values: Callable[[], str]) -> Held:
    """Say where a component stands, for a report; `values` makes the digest that replicas compare.

    The clock is read before and after: if it moved meanwhile the values are of no one step, and neither is
    the component. Raises ClockNotReadableError, and whatever `values` raises.
    """
    before = clock.read()
    if before.step is None:
        return Held(None)
    digest = values()
    return Held(before.step, digest) if clock.read() == before else Held(None)


class GateState(StrEnum):
    """What a gate does to whoever comes."""

    OPEN = "open"
    CLOSED = "closed"
    PARKED = "parked"
    """Closed, and the main thread waits at it."""


class Gate:
    """Between the end of the backward pass and the first write of an update.

    The main thread passes; the processor's thread closes and opens. Whether the gate is closed is read, and
    `queued` written, under one lock: no update is queued after `close` has returned, and of each that was
    queued before, the clock says so by then.

    A gate that was closed opens by itself `lease_s` seconds after the last `close` or `renew`, with a
    SwansongWarning: training does not wait for a thread that is dead. A save that still reads the state
    finds the clock moved, and is void. Children have an open gate of their own.
    """

    def __init__(self, *, lease_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lease_s, self._monotonic = lease_s, monotonic
        self._word_at = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._shut = False
        self._parked = 0
        self._release: Release | None = None
        in_forked_children(self._renew_in_child)

    def enter(self, clocks: Iterable[Clock]) -> None:
        """Queue an update of the components of `clocks`; wait first if the gate is closed.

        Raises TrainingInterrupted, now and ever after, once `interrupt` was called; nothing is queued then.
        """
        with self._lock:  # as `try_enter` does: at every step, so not by way of it
            if not self._shut:
                for clock in clocks:
                    clock.queue()
                return
        while not self.try_enter(clocks):
            self.wait()

    def try_enter(self, clocks: Iterable[Clock], contribute: Callable[[bool], None] | None = None) -> bool:
        """Queue an update unless the gate is closed; return whether it was. Does not wait.

        `contribute` is called with the answer under the gate's lock, to cast a vote as one act with it. It
        must not block. Who voted yes in vain calls `withdraw` of each clock, and who voted no calls `wait`.
        """
        with self._lock:
            admitted = not self._shut
            if admitted:
                for clock in clocks:
                    clock.queue()
            if contribute is not None:
                contribute(admitted)
        return admitted

    def wait(self) -> None:
        """Return when the gate is open. Raises TrainingInterrupted as `enter` does."""
        with self._changed:
            self._parked += 1
            try:
                while self._shut:
                    if self._release is not None:
                        raise interrupted_by(self._release)
                    left = self._word_at + self._lease_s - self._monotonic()
                    if left <= 0:
                        self._shut = False
                        break
                    self._changed.wait(left)
                else:
                    return
            finally:
                self._parked -= 1
        warnings.warn(
            f"the gate was closed for {self._lease_s:g} s without a word from the processor's thread; "
            "training goes on",
            SwansongWarning,
            stacklevel=3,
        )

    def close(self) -> None:
        """Let no update begin from now on. Again: as `renew`."""
        with self._lock:
            self._shut = True
            self._word_at = self._monotonic()

    def renew(self) -> None:
        """Keep a closed gate closed for another lease."""
        with self._lock:
            self._word_at = self._monotonic()

    def open(self) -> None:
        """Let updates begin again, unless training was interrupted."""
        with self._changed:
            self._shut = self._release is not None
            self._changed.notify_all()

    def interrupt(self, release: Release) -> None:
        """End training: whoever waits, or comes, gets TrainingInterrupted with what `release` says."""
        with self._changed:
            self._release, self._shut = release, True
            self._changed.notify_all()

    def state(self) -> GateState:
        """Return what the gate does now."""
        with self._lock:
            if not self._shut:
                return GateState.OPEN
            return GateState.PARKED if self._parked else GateState.CLOSED

    def _renew_in_child(self) -> None:
        # A child's copy of the lock may be held by a thread that the child does not have.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._shut, self._parked, self._release = False, 0, None


def interrupted_by(release: Release) -> TrainingInterrupted:
    """Return the exception that tells a training loop how an incident ended."""
    where = f"the state of step {release.step} is in {release.path}" if release.path else "nothing was saved"
    reason = f" ({release.reason})" if release.reason else ""
    return TrainingInterrupted(
        f"training ends after an incident ({release.cause.value}): {where}{reason}",
        step=release.step,
        path=release.path,
        reason=release.reason,
    )


class _Window:
    """Around the writes of one update."""

    __slots__ = ("_clock",)

    def __init__(self, clock: UpdateClock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._clock.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._clock.finish()


def _can_hold(cells: memoryview) -> bool:
    return cells.format in ("q", "l") and cells.itemsize == 8 and len(cells) == CELLS and not cells.readonly


def _private(values: Iterable[int] = (0,) * CELLS) -> memoryview:
    return memoryview(array("q", values))
