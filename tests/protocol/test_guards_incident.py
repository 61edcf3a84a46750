"""What each guard of an incident is there for: reports, the choice, and what is told of it."""

from __future__ import annotations

import pytest

from protocol.protocol_support import OPTIONS, Job, members, raised
from swansong.protocol import messages as m
from swansong.protocol.incident import Incident
from swansong.protocol.messages import FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import Phase

ALONE = (("X",), ("Y",))
"""Two sole holders."""


def frozen(layout: tuple[tuple[str, ...], ...] = ALONE, options: ProtocolOptions = OPTIONS) -> Job:
    """A job whose last rank has thrown."""
    job = Job.trained(layout, options)
    job.fault(raised(len(layout) - 1))
    return job


def saving(layout: tuple[tuple[str, ...], ...] = ALONE, options: ProtocolOptions = OPTIONS) -> Job:
    """A job whose savers write step 1, all of whose ranks have reported."""
    job = frozen(layout, options)
    reported(job)
    assert job.controller.phase is Phase.SAVING
    return job


def reported(job: Job) -> None:
    """Everybody is whole at step 1."""
    for rank in range(len(job.layout)):
        job.report(rank, 1)


def outcome(job: Job) -> m.Report:
    """Of the incident that just ended."""
    (report,) = job.just(m.Report)
    assert isinstance(report, m.Report)
    return report


def silent(job: Job, rank: int, *, settled: bool) -> None:
    """A rank reports that it can say nothing of its components."""
    report = m.StateReport(
        incident=job.incident, held={}, settled=settled, boundary=1, main="in a collective"
    )
    job.say(rank, report)


# -- faults -----------------------------------------------------------------------------------------------


def test_fault_that_is_told_again_is_one_fault() -> None:
    job = frozen()
    job.now = 3.0
    job.fault(raised(1))
    job.fault(raised(0))
    reported(job)
    for rank in (0, 1):
        job.done(rank, 1)
    job.take(m.Committed("i-1", "path"))
    assert [fault.rank for fault in outcome(job).faults] == [1, 0]
    assert outcome(job).seconds["detect"] == 0.0


@pytest.mark.parametrize(
    ("answered", "again", "step"),
    [(True, False, 1), (False, False, None), (True, True, 1)],
    ids=["it had answered", "it had not", "it had, and was asked again"],
)
def test_whether_a_lost_rank_was_heard_in_the_incident_is_told(
    answered: bool, again: bool, step: int | None
) -> None:
    job = frozen((("model",),) * 3)
    if answered:
        job.report(0, 1)
    incident = job.controller.incident
    assert incident is not None
    if again:
        incident.freeze(job.now)
    job.take(m.Died(0))
    assert [(fault.rank, fault.step) for fault in incident.faults] == [(2, 1), (0, step)]


def test_who_reported_no_boundary_has_none_when_it_is_lost() -> None:
    incident = Incident("i", 0.0, OPTIONS)
    incident.reports[0] = m.StateReport(incident="i", held={}, settled=True, boundary=None, main="")
    incident.freeze(1.0)
    incident.add(m.Fault(kind=FaultKind.LOST, rank=0), 1.0)
    assert [fault.step for fault in incident.faults] == [None]


def test_the_step_of_an_exception_is_the_one_that_its_rank_says() -> None:
    job = frozen((("model",),) * 3)
    job.report(0, 3)
    job.fault(raised(0, 2))
    incident = job.controller.incident
    assert incident is not None
    assert incident.faults[-1].step == 2


def test_incident_without_a_fault_yet_began_with_a_loss() -> None:
    assert Incident("i", 0.0, OPTIONS).cause is FaultKind.LOST


def test_notes_are_bounded() -> None:
    incident = Incident("i", 0.0, OPTIONS)
    for number in range(150):
        incident.note(str(number))
    assert len(incident.notes) == 100


# -- time -------------------------------------------------------------------------------------------------


def test_silent_rank_is_not_waited_for_to_the_end_of_the_budget() -> None:
    options = ProtocolOptions.within(25.0)
    job = frozen((("X",), ("X",)), options)
    job.report(1, 1)
    job.later(options.freeze_timeout_s)
    assert job.controller.phase is Phase.SAVING


def test_needed_rank_is_not_waited_for_beyond_the_budget() -> None:
    options = ProtocolOptions.within(25.0)
    ends = options.budget_s - options.exit_grace_s - options.commit_reserve_s if options.budget_s else 0.0
    job = saving(options=options)
    while job.now < ends - 6.0:
        job.later(1.0)
        for rank in (0, 1):
            job.say(rank, m.Progress(incident="i-1", attempt=1, nbytes=int(job.now)))
    job.failed(0, 1, moved=True)
    job.report(1, 1)
    job.later(ends - 0.1 - job.now)
    assert job.controller.phase is Phase.FREEZING
    job.later(0.1)
    assert job.controller.phase is Phase.RELEASING


# -- reports ----------------------------------------------------------------------------------------------


def test_rank_that_could_not_read_its_clock_counts_as_not_heard() -> None:
    job = frozen()
    job.report(1, 1)
    silent(job, 0, settled=False)
    job.later(OPTIONS.needed_timeout_s)
    assert "rank 0 not heard from yet" in outcome(job).reason


def test_rank_that_has_nothing_and_says_so_is_not_waited_for() -> None:
    job = frozen()
    job.report(1, 1)
    silent(job, 0, settled=True)
    assert "rank 0 reported without it" in outcome(job).reason


def test_nobody_heard_is_not_taken_for_a_fault_before_the_first_boundary() -> None:
    job = frozen()
    job.later(OPTIONS.needed_timeout_s)
    assert "not heard from yet" in outcome(job).reason


def test_component_behind_the_boundary_of_its_rank_is_whole_where_it_says() -> None:
    job = frozen()
    for rank in (0, 1):
        job.report(rank, 1, boundary=2)
    assert {save.step for save in job.orders().values()} == {1}


def test_rank_without_a_boundary_gives_what_is_not_older_than_the_first() -> None:
    job = frozen()
    job.report(0, 1)
    job.report(1, 1, boundary=None)
    assert set(job.orders()) == {0, 1}


# -- the choice -------------------------------------------------------------------------------------------


def test_rank_that_cannot_make_a_cut_possible_is_not_waited_for() -> None:
    job = frozen((("X",), ("Y",), ("Y",)))
    job.report(0, None)
    job.report(1, 1)
    job.report(2, None, settled=False)
    job.later(OPTIONS.freeze_timeout_s + OPTIONS.settle_timeout_s)
    assert "'X'" in outcome(job).reason


def test_rank_whose_vote_stands_against_all_that_can_save_is_waited_for() -> None:
    job = saving((("X",),) * 4)
    for rank, moved in enumerate([False, False, True, True]):
        job.failed(rank, rank + 1, moved=moved)
    assert job.controller.phase is Phase.FREEZING
    for rank, values in enumerate("aabb"):
        job.report(rank, 1, values=values, settled=rank != 1)
    job.later(OPTIONS.freeze_timeout_s + OPTIONS.settle_timeout_s)
    assert job.controller.phase is Phase.FREEZING
    job.report(1, 2)
    assert set(job.orders()) == {2}


# -- saving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 2], ids=["inside an update", "at another step"])
def test_rank_that_is_no_longer_whole_at_the_step_takes_nobodys_place(step: int | None) -> None:
    job = saving((("X",),) * 3)
    job.report(1, step)
    job.failed(0, 1)
    assert set(job.orders()) == {2}


def test_rank_that_came_back_with_an_open_gate_takes_nobodys_place() -> None:
    job = saving((("X",),) * 3)
    job.leave(1)
    job.register(1, connection=50, world=members((("X",),) * 3))
    job.failed(0, 1)
    assert set(job.orders()) == {2}


def test_order_of_an_earlier_round_does_not_count() -> None:
    job = saving()
    job.failed(0, 1, moved=True)
    reported(job)
    assert {save.attempt for save in job.orders().values()} == {2}
    job.done(1, 1)
    job.done(0, 2)
    assert not job.just(m.Commit)


# -- what is told -----------------------------------------------------------------------------------------


def test_reason_names_the_saver_that_could_not_write() -> None:
    job = saving(options=ProtocolOptions(attempts=1))
    job.failed(0, 1)
    assert outcome(job).reason == "rank 0: disk full"


def test_reason_of_no_cut_names_the_saver_that_could_not_write() -> None:
    job = saving()
    job.failed(0, 1)
    job.report(0, 1)
    job.report(1, 1)
    reason = outcome(job).reason
    assert reason.startswith("component 'X'")
    assert reason.endswith("; rank 0: disk full")


def test_saver_that_was_replaced_is_no_reason_once_all_is_saved() -> None:
    job = saving((("X",), ("X",)))
    job.failed(0, 1)
    job.done(1, 2)
    job.take(m.Committed("i-1", "path"))
    assert (outcome(job).outcome, outcome(job).reason) == (Outcome.SAVED, "")


def test_nobody_has_saved_what_was_not_committed() -> None:
    job = saving((("X",),))
    job.done(0, 1)
    job.later(OPTIONS.commit_timeout_s)
    assert outcome(job).savers == {}
