"""What each guard about durable parts and hosts' flight recorders is there for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.protocol_support import OPTIONS, Job, member, raised
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import Phase


def frozen(
    hosts: Sequence[str], layout: Sequence[Sequence[str]] | None = None, options: ProtocolOptions = OPTIONS
) -> Job:
    """A job on these hosts whose last rank has thrown; replicas unless a layout is given."""
    job = Job(layout or [("model",)] * len(hosts), options)
    for rank, host in enumerate(hosts):
        one = msgspec.structs.replace(member(rank, job.layout[rank]), host=host)
        job.take(m.Received(job.connections[rank], m.Register(member=one, world_size=len(hosts))))
    job.fault(raised(len(hosts) - 1))
    return job


def saving(
    hosts: Sequence[str], layout: Sequence[Sequence[str]] | None = None, options: ProtocolOptions = OPTIONS
) -> Job:
    """The same, once everybody has reported to be whole at step 1."""
    job = frozen(hosts, layout, options)
    for rank in range(len(hosts)):
        job.report(rank, 1)
    assert job.controller.phase is Phase.SAVING
    return job


def ordered(job: Job) -> dict[int, tuple[str, ...]]:
    """Rank -> components that it was just told to save."""
    return {rank: save.keys for rank, save in job.orders().items()}


# -- durable parts ----------------------------------------------------------------------------------------


def test_part_that_is_durable_counts_though_its_writer_is_inside_an_update_now() -> None:
    job = saving("aa", (("X",), ("Y",)))
    job.done(0, 1)
    job.failed(1, 1, moved=True)
    job.report(0, None)
    job.report(1, 1)
    assert ordered(job) == {1: ("Y",)}
    job.done(1, 2)
    assert job.just(m.Commit) == [m.Commit("i-1", 1, ((1, 0, ("X",)), (2, 1, ("Y",))), FaultKind.RAISED)]


# -- records ----------------------------------------------------------------------------------------------


def test_records_that_are_written_are_not_asked_for_again_when_a_saver_is_replaced() -> None:
    job = saving("aabb")
    assert ordered(job) == {0: ("model",), 2: ()}
    job.done(2, 2)
    job.failed(0, 1)
    assert ordered(job) == {1: ("model",)}


def test_records_of_another_step_are_asked_for_again() -> None:
    job = saving("aab")
    job.done(2, 2)
    for rank, attempt in ((0, 1), (1, 3), (2, 4)):
        job.failed(rank, attempt, moved=True)
    assert job.controller.phase is Phase.FREEZING
    for rank in range(3):
        job.report(rank, 2)
    assert ordered(job) == {0: ("model",), 2: ()}
    job.done(2, 7)
    job.done(0, 6)
    assert job.just(m.Commit) == [m.Commit("i-1", 2, ((6, 0, ("model",)), (7, 2, ())), FaultKind.RAISED)]


def test_records_beside_components_that_are_not_used_are_asked_for_again() -> None:
    job = frozen("abbca", (("X",), ("X",), ("X",), ("Y",), ("X",)))
    job.report(0, 1, values="odd")
    for rank in (1, 2, 4):
        job.report(rank, None)
    job.report(3, 1)
    assert ordered(job) == {0: ("X",), 1: (), 3: ("Y",)}
    job.done(0, 1)
    job.take(m.Died(0))
    job.failed(3, 1, moved=True)
    for rank in (1, 2, 3, 4):
        job.report(rank, 1)
    assert ordered(job) == {1: ("X",), 3: ("Y",), 4: ()}
    for rank, attempt in ((4, 4), (3, 3), (1, 3)):
        job.done(rank, attempt)
    parts = ((3, 1, ("X",)), (3, 3, ("Y",)), (4, 4, ()))
    assert job.just(m.Commit) == [m.Commit("i-1", 1, parts, FaultKind.RAISED)]


def test_records_are_waited_for_to_the_second() -> None:
    job = saving("aab", options=ProtocolOptions(idle_timeout_s=13.0))
    job.done(0, 1)
    job.later(12.9)
    assert job.controller.phase is Phase.SAVING
    job.later(0.1)
    assert job.controller.phase is Phase.COMMITTING


def test_records_that_come_too_late_are_not_asked_for_again() -> None:
    job = saving("aab")
    job.done(0, 1)
    job.later(OPTIONS.idle_timeout_s)
    assert job.controller.phase is Phase.COMMITTING
    job.take(m.Died(2))
    assert job.controller.phase is Phase.COMMITTING
