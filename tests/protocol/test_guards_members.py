"""What each guard about who is here is there for: registrations, world maps, goodbyes, whose fault it is."""

from __future__ import annotations

import pytest

from protocol.protocol_support import OPTIONS, Job, member, members, raised
from swansong.protocol import messages as m
from swansong.protocol.admission import named
from swansong.protocol.messages import Fault, FaultKind
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import Phase

THREE = members((("model",),) * 3)


# -- world maps -------------------------------------------------------------------------------------------


def test_world_map_with_other_components_than_a_rank_registered_is_refused() -> None:
    job = Job()
    job.register(1)
    effects = job.register(0, world=(THREE[0], member(1, ("other",)), THREE[2]))
    (refusal,) = (e.message for e in effects if isinstance(e, m.Send) and isinstance(e.message, m.Refused))
    assert "wrong about rank 1" in refusal.reason


def test_rank_of_which_one_knows_that_it_left_is_not_awaited_when_others_do_not() -> None:
    job = Job()
    job.register(0, world=THREE, left=(2,))
    job.register(1, world=THREE)
    assert job.controller.phase is Phase.TRAINING


def test_rank_that_is_here_has_not_left_whatever_another_says() -> None:
    job = Job()
    job.register(2)
    job.register(0, left=(2,))
    assert not job.controller.members.peers[2].gone


@pytest.mark.parametrize(
    ("came_after", "counted"),
    [(4.0, 4.0), (60.0, OPTIONS.reregister_timeout_s)],
    ids=["waited for", "this process paused"],
)
def test_budget_of_a_successor_counts_what_ranks_were_waited_for(came_after: float, counted: float) -> None:
    options = ProtocolOptions(budget_s=100.0)
    job = Job((("model",),) * 3, options)
    job.now = 100.0
    job.register(0, world=THREE, frozen=True, fault=raised(0))
    job.register(1, world=THREE, frozen=True)
    job.now += came_after
    job.register(2, world=THREE, frozen=True)
    assert job.controller.incident is not None
    assert job.controller.incident.opened_at == job.now - counted


# -- goodbyes ---------------------------------------------------------------------------------------------


def test_rank_that_left_before_is_not_stayed_for() -> None:
    job = Job.successor((("model",),) * 3, (0, 1), left=(2,))
    for rank in (0, 1):
        job.say(rank, m.Goodbye())
    assert job.just(m.Close)


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "said", "noted"),
    [
        (FaultKind.REQUESTED, -1, -1),
        (FaultKind.REQUESTED, 0, 1),
        (FaultKind.RAISED, -1, 1),
    ],
    ids=["request of nobody", "request in another's name", "exception of nobody"],
)
def test_only_a_request_is_nobodys(kind: FaultKind, said: int, noted: int) -> None:
    job = Job.trained()
    job.say(1, m.FaultReport(fault=Fault(kind=kind, rank=said)))
    assert job.controller.incident is not None
    assert [fault.rank for fault in job.controller.incident.faults] == [noted]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([3, 1], "ranks 1, 3"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(10), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_many_ranks_are_not_all_named(ranks: list[int], words: str) -> None:
    assert named(ranks) == words


# -- messages ---------------------------------------------------------------------------------------------


def test_rank_without_a_connection_is_told_nothing() -> None:
    job = Job.trained()
    job.fault(raised(2))
    for rank in range(3):
        job.report(rank, 1)
    job.leave(0)
    effects = job.later(OPTIONS.reconnect_s)
    assert {e.connection for e in effects if isinstance(e, m.Send)} == {11}


def test_end_is_told_to_those_that_are_connected() -> None:
    job = Job()
    job.register(1)
    effects = job.take(m.Superseded())
    assert {e.connection for e in effects if isinstance(e, m.Send | m.Drop)} == {11}
