"""What flight recorders hold is written on every host where it can be; no save fails for want of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from protocol.protocol_support import OPTIONS, Job, member, raised
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import Phase

REPLICAS = (("model",),) * 4


def on_hosts(hosts: Sequence[str], options: ProtocolOptions = OPTIONS) -> Job:
    """A job of four replicas on these hosts, frozen after rank 0 threw; all but rank 3 have reported."""
    job = Job(REPLICAS, options)
    for rank, host in enumerate(hosts):
        one = msgspec.structs.replace(member(rank), host=host)
        register = m.Register(member=one, world_size=len(hosts))
        job.take(m.Received(job.connections[rank], register))
    job.fault(raised(0))
    for rank in range(3):
        job.report(rank, 1)
    return job


def saving(hosts: Sequence[str], options: ProtocolOptions = OPTIONS) -> Job:
    """The same, once rank 3 has reported, too."""
    job = on_hosts(hosts, options)
    job.report(3, 1)
    assert job.controller.phase is Phase.SAVING
    return job


def committed(job: Job) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    (commit,) = job.just(m.Commit)
    return commit.parts


def test_rank_of_each_host_without_saver_writes_the_records_there() -> None:
    job = saving(["a", "a", "b", "c"])
    assert {rank: save.keys for rank, save in job.orders().items()} == {0: ("model",), 2: (), 3: ()}
    job.done(0, 1)
    job.done(2, 2)
    assert not job.just(m.Commit)
    job.done(3, 3)
    assert committed(job) == ((1, 0, ("model",)), (2, 2, ()), (3, 3, ()))


def test_saver_writes_the_records_of_its_host_with_its_part() -> None:
    job = saving(["a", "a", "a", "a"])
    assert list(job.orders()) == [0]


def test_records_that_cannot_be_written_are_done_without() -> None:
    job = saving(["a", "a", "b", "b"])
    job.failed(2, 2)
    assert not job.orders()
    job.done(0, 1)
    assert committed(job) == ((1, 0, ("model",)),)
    job.take(m.Committed("i-1", "ckpt/step-1"))
    (report,) = job.just(m.Report)
    assert report.outcome is Outcome.SAVED
    assert any("rank 2" in note for note in report.notes)


def test_records_of_a_writer_that_died_are_written_by_another_there() -> None:
    job = saving(["a", "a", "b", "b"])
    job.take(m.Died(2))
    assert {rank: save.keys for rank, save in job.orders().items()} == {3: ()}
    job.done(0, 1)
    job.done(3, 3)
    assert committed(job) == ((1, 0, ("model",)), (3, 3, ()))


def test_host_of_a_saver_that_died_has_its_records_written_by_another() -> None:
    job = saving(["a", "b", "b", "a"])
    assert {rank: save.keys for rank, save in job.orders().items()} == {0: ("model",), 1: ()}
    job.take(m.Died(0))
    assert {rank: save.keys for rank, save in job.orders().items()} == {1: ("model",), 3: ()}


def test_records_are_waited_for_no_longer_than_an_idle_saver() -> None:
    job = saving(["a", "a", "b", "b"])
    job.done(0, 1)
    job.later(OPTIONS.idle_timeout_s - 0.1)
    assert not job.just(m.Commit)
    job.later(0.1)
    assert committed(job) == ((1, 0, ("model",)),)
    assert m.Void(incident="i-1", attempt=2) in job.told(2)


def test_records_do_not_use_up_a_launchers_budget() -> None:
    options = ProtocolOptions.within(20.0)
    job = saving(["a", "a", "b", "b"], options)
    job.later(4.0)
    job.say(2, m.Progress(incident="i-1", attempt=2, nbytes=5))
    job.say(0, m.Progress(incident="i-1", attempt=1, nbytes=5))
    job.done(0, 1)
    while not job.just(m.Commit):
        assert job.controller.phase is Phase.SAVING
        job.later(0.5)
    assert job.now < options.budget_s - options.exit_grace_s - options.commit_reserve_s + 0.5


def test_host_whose_records_are_written_is_not_asked_again() -> None:
    job = saving(["a", "b", "b", "b"])
    job.done(1, 2)
    job.failed(0, 1)
    assert {rank: save.keys for rank, save in job.orders().items()} == {0: (), 1: ("model",)}
    job.failed(1, 3)
    assert {rank: save.keys for rank, save in job.orders().items()} == {2: ("model",)}


@pytest.mark.parametrize("reconnects", [True, False], ids=["back", "not back"])
def test_who_has_not_reported_is_not_asked_for_records(reconnects: bool) -> None:
    job = on_hosts(["a", "a", "a", "b"])
    job.leave(3)
    if reconnects:
        job.later(0.5)
        one = msgspec.structs.replace(member(3), host="b")
        job.connections[3] = 99
        job.take(m.Received(99, m.Register(member=one, world_size=4)))
    job.later(OPTIONS.freeze_timeout_s)
    assert job.controller.phase is Phase.SAVING
    assert not any(save.keys == () for save in job.orders().values())


def test_report_tells_how_long_each_part_took() -> None:
    job = Job.trained()
    job.now = 10.0
    job.leave(1)
    job.later(OPTIONS.reconnect_s)
    job.now += 1.0
    job.report(0, 1)
    job.report(2, 1)
    job.now += 3.0
    (saver,) = job.orders() or [0]
    job.done(saver, 1)
    job.now += 0.5
    job.take(m.Committed("i-1", "ckpt/step-1"))
    (report,) = job.just(m.Report)
    assert report.faults[0].kind is FaultKind.LOST
    assert report.seconds == {"detect": 2.0, "freeze": 3.0, "choose": 0.0, "save": 3.0, "commit": 0.5}


def test_report_counts_the_wait_for_a_rank_that_is_needed_as_choosing() -> None:
    job = Job.trained((("X",), ("Y",)))
    job.fault(raised(0))
    job.report(0, 1)
    job.later(OPTIONS.freeze_timeout_s + 2.0)
    job.report(1, 1)
    job.done(0, 1)
    job.done(1, 1)
    job.take(m.Committed("i-1", "ckpt/step-1"))
    (report,) = job.just(m.Report)
    assert report.seconds["freeze"] == OPTIONS.freeze_timeout_s
    assert report.seconds["choose"] == 2.0
