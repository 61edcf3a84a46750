"""Every row of the processor's table: what brings it about, where it leads, whether the connection stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.protocol_support import OPTIONS, Rank, members, raised
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, Outcome
from swansong.protocol.states import STEP, Got, Mode

WORLD = members((("model",), ("model",)))
STOP = m.Release(incident="i", outcome=Outcome.SAVED, action=Action.STOP, step=1)
RESUME = m.Release(incident="i", outcome=Outcome.SAVED, action=Action.RESUME, step=1)


def new() -> Rank:
    """A rank that has asked for its first connection."""
    rank = Rank()
    rank.take(m.Tick())
    return rank


def joined() -> Rank:
    """A rank that is registered and does not know the world."""
    rank = new()
    rank.take(m.Connected())
    rank.hear(m.Welcome(generation=1))
    return rank


def astray() -> Rank:
    """A rank that has lost its controller while its gate was closed, and has asked for a connection."""
    rank = Rank.frozen()
    rank.take(m.ConnectionEnded())
    rank.later(0.1)
    return rank


def welcomed(rank: Rank) -> list[m.ProcessorEffect]:
    """It gets a connection and a welcome."""
    rank.take(m.Connected())
    return rank.hear(m.Welcome(generation=1))


def patient_till_the_lease_is_over(rank: Rank) -> list[m.ProcessorEffect]:
    """It has a fault, and nobody says anything."""
    rank.take(m.LocalFault(raised(0)))
    return rank.later(OPTIONS.gate_lease_s)


def without_a_controller(rank: Rank) -> list[m.ProcessorEffect]:
    """It is refused for good, or finds nobody."""
    if rank.machine.mode is Mode.CONNECTING:
        return rank.later(OPTIONS.lost_controller_s)
    return rank.hear(m.Refused(reason="no", retry=False))


training, frozen = Rank.trained, Rank.frozen
HAPPENS: dict[Got, Callable[[Rank], list[m.ProcessorEffect]]] = {
    Got.WELCOME: welcomed,
    Got.WORLD: lambda rank: rank.hear(m.World(members=WORLD)),
    Got.FREEZE: lambda rank: rank.hear(m.Freeze(incident="j")),
    Got.RESUME: lambda rank: rank.hear(RESUME),
    Got.STOP: lambda rank: rank.hear(STOP),
    Got.FAREWELL: lambda rank: rank.hear(m.Farewell()),
    Got.DISCONNECTED: lambda rank: rank.take(m.ConnectionEnded()),
    Got.LEASE_OVER: patient_till_the_lease_is_over,
    Got.GIVEN_UP: without_a_controller,
}
ENDS = True
"""The rank ends its connection."""
ROWS = [
    (new, Got.WELCOME, Mode.JOINED, not ENDS),
    (astray, Got.LEASE_OVER, Mode.CONNECTING, not ENDS),
    (astray, Got.GIVEN_UP, Mode.UNPROTECTED, ENDS),
    (joined, Got.WORLD, Mode.TRAINING, not ENDS),
    (joined, Got.STOP, Mode.ENDED, ENDS),
    (joined, Got.FAREWELL, Mode.ENDED, ENDS),
    (joined, Got.LEASE_OVER, Mode.CONNECTING, ENDS),
    (joined, Got.DISCONNECTED, Mode.CONNECTING, not ENDS),
    (joined, Got.GIVEN_UP, Mode.UNPROTECTED, ENDS),
    (training, Got.FREEZE, Mode.FROZEN, not ENDS),
    (training, Got.RESUME, Mode.TRAINING, not ENDS),
    (training, Got.STOP, Mode.ENDED, ENDS),
    (training, Got.FAREWELL, Mode.ENDED, ENDS),
    (training, Got.LEASE_OVER, Mode.CONNECTING, ENDS),
    (training, Got.DISCONNECTED, Mode.CONNECTING, not ENDS),
    (training, Got.GIVEN_UP, Mode.UNPROTECTED, ENDS),
    (frozen, Got.FREEZE, Mode.FROZEN, not ENDS),
    (frozen, Got.RESUME, Mode.TRAINING, not ENDS),
    (frozen, Got.STOP, Mode.ENDED, ENDS),
    (frozen, Got.DISCONNECTED, Mode.CONNECTING, not ENDS),
    (frozen, Got.LEASE_OVER, Mode.CONNECTING, ENDS),
    (frozen, Got.GIVEN_UP, Mode.UNPROTECTED, ENDS),
]


@pytest.mark.parametrize(
    ("make", "got", "target", "ends"), ROWS, ids=[f"{make.__name__}-{got.name}" for make, got, _, _ in ROWS]
)
def test_row_leads_where_it_should(make: Callable[[], Rank], got: Got, target: Mode, ends: bool) -> None:
    rank = make()
    effects = HAPPENS[got](rank)
    assert rank.machine.mode is target
    assert (m.Disconnect() in effects) is ends


def test_no_row_is_forgotten() -> None:
    assert {(make().machine.mode, got) for make, got, _, _ in ROWS} >= STEP.keys()
