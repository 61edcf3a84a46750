"""The ready vote: where ranks hold different components, all begin an update or none does.

Just before an update each rank says, in one all-reduce of one integer, whether its gate let the update pass.
Only if all did is it carried out, and then on all of them, though gates may have closed meanwhile: a fault
parts the ranks only if it falls between two ranks' learning of that. Otherwise what was queued is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import distributed as dist

from swansong.engine.clock import Gate, GateState, UpdateClock
from swansong.errors import SwansongError

_DEADLINE: Final = timedelta(minutes=10)
"""For the slowest rank to come to its update."""
_SLICE: Final = timedelta(seconds=0.05)
"""After which a rank that waits for the others looks at its gate."""
_GRACE_S: Final = 0.5
"""For a vote that is pending when the gate closes: ranks that have voted learn the outcome well within."""
_NOTICED_S: Final = 1.0
"""Within which a gate closes, once a rank is gone without which no vote can be counted."""
_YES: Final = 1
_STEP: Final = 1 << 20
"""What a step weighs in a vote: more than all ranks' yes together."""


class Counting(Protocol):
    """A sum over all ranks that is under way, as torch.distributed has it."""

    def is_completed(self) -> bool:
        """True once it is there, or has failed."""

    def wait(self, timeout: timedelta) -> object:
        """Wait for it. Raises RuntimeError if it has failed, or is not there by then."""


Start = Callable[[torch.Tensor], Counting]
"""Begins to sum up a tensor over all ranks, in place."""


@dataclass(frozen=True, slots=True)
class _Ballot:
    """A vote that was cast, and is being counted."""

    step: int
    total: torch.Tensor
    counting: Counting


class Vote:
    """This rank's voice. For the thread that trains."""

    def __init__(self, size: int, start: Start) -> None:
        """`size` is the number of ranks, `start` their collective."""
        self._size, self._start = size, start
        self._pending: _Ballot | None = None

    @classmethod
    def of_all_ranks(cls) -> Vote:
        """With a group of its own. Collective."""
        group = dist.new_group(backend="gloo", timeout=_DEADLINE)

        def start(total: torch.Tensor) -> Any:
            return dist.all_reduce(total, group=group, async_op=True)

        return cls(dist.get_world_size(), start)

    def enter(self, gate: Gate, clock: UpdateClock) -> None:
        """Queue the next update of `clock`, once all ranks do; wait while any gate is closed.

        Raises TrainingInterrupted as `Gate.enter` does, and RuntimeError or SwansongError if the others
        cannot be heard, or are at another step. Nothing is queued then.
        """
        while not self._queued(gate, clock):
            gate.wait()

    def _queued(self, gate: Gate, clock: UpdateClock) -> bool:
        """Vote, or hear how the pending vote has ended; True if the update is to be carried out."""
        step = clock.read().queued + 1
        if self._pending is None:
            admitted = gate.try_enter((clock,), lambda yes: self._cast(step, yes))
        elif not (admitted := gate.try_enter((clock,))):
            return False
        try:
            carried = self._unanimous(gate)
        except BaseException as error:
            if admitted:
                clock.withdraw()
            if isinstance(error, RuntimeError) and _closes(gate):
                return False  # a rank is gone, and the incident that follows ends the job in its own words
            raise
        if admitted and not carried:
            clock.withdraw()
        return carried

    def _cast(self, step: int, yes: bool) -> None:
        total = torch.tensor([step * _STEP + (_YES if yes else 0)], dtype=torch.int64)
        self._pending = _Ballot(step, total, self._start(total))

    def _unanimous(self, gate: Gate) -> bool:
        """True if all said yes; False if not, or if it is not known yet and the gate is closed."""
        ballot, ends, closed_at = self._pending, time.monotonic() + _DEADLINE.total_seconds(), None
        while ballot is not None and not self._counted(ballot):
            now = time.monotonic()
            if now > ends:
                raise SwansongError(
                    f"step {ballot.step}: another rank did not come to its update within "
                    f"{_DEADLINE.total_seconds():g} s"
                )
            if gate.state() is GateState.OPEN:
                closed_at = None
            elif closed_at is None:
                closed_at = now
            elif now > closed_at + _GRACE_S:
                return False
        self._pending = None
        return ballot is not None and self._all_said_yes(ballot)

    def _counted(self, ballot: _Ballot) -> bool:
        """Wait a little for it; False if it is not there yet. Raises RuntimeError if it has failed."""
        with suppress(RuntimeError):
            ballot.counting.wait(_SLICE)
            return True
        if not ballot.counting.is_completed():
            return False
        self._pending = None
        ballot.counting.wait(_SLICE)  # it has failed, or has come just then
        return True

    def _all_said_yes(self, ballot: _Ballot) -> bool:
        steps, voices = divmod(int(ballot.total.item()), _STEP)
        if steps != ballot.step * self._size:
            raise SwansongError(
                f"step {ballot.step}: other ranks begin the update of another step; the loops of all ranks "
                "must update, or have a scaler leave an update out, equally often"
            )
        return voices == self._size


def _closes(gate: Gate) -> bool:
    """True if the gate is closed, or is soon."""
    ends = time.monotonic() + _NOTICED_S
    while gate.state() is GateState.OPEN:
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True
