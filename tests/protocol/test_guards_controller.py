"""What each guard of the controller machine is there for: without it, one of these cases goes wrong."""

from __future__ import annotations

import pytest

from protocol.protocol_support import OPTIONS, Job, members, raised, stalled
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, Outcome
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import Phase

GROUPS = (("X",), ("Y",), ("X",), ("Y",))
THREE = members((("model",),) * 3)


def frozen(
    layout: tuple[tuple[str, ...], ...] = (("model",),) * 3, options: ProtocolOptions = OPTIONS
) -> Job:
    """A job whose last rank has thrown."""
    job = Job.trained(layout, options)
    job.fault(raised(len(layout) - 1))
    return job


def saving(
    layout: tuple[tuple[str, ...], ...] = (("model",),) * 3, options: ProtocolOptions = OPTIONS
) -> Job:
    """A job whose savers write step 1, all of whose ranks have reported."""
    job = frozen(layout, options)
    for rank in range(len(layout)):
        job.report(rank, 1)
    assert job.controller.phase is Phase.SAVING
    return job


def released(job: Job | None = None) -> Job:
    """A job that ends after its incident."""
    job = saving() if job is None else job
    job.done(0, 1)
    job.take(m.Committed("i-1", "path"))
    return job


def resumed() -> Job:
    """A job that goes on after a stall that was saved."""
    job = Job.trained()
    job.fault(stalled(0))
    for rank in range(3):
        job.report(rank, 1)
    released(job)
    assert job.controller.phase is Phase.TRAINING
    return job


def left_behind() -> Job:
    """A job whose rank 0 has finished, waited and been told farewell."""
    job = Job.trained()
    job.say(0, m.Goodbye())
    job.later(OPTIONS.goodbye_timeout_s)
    assert job.controller.members.peers[0].gone
    return job


# -- registering ------------------------------------------------------------------------------------------


def test_job_that_nobody_registers_with_is_given_up() -> None:
    job = Job()
    job.later(OPTIONS.register_timeout_s)
    assert job.controller.phase is Phase.CLOSED


def test_goodbye_does_not_put_off_the_end_of_registering() -> None:
    job = Job()
    job.register(1)
    job.later(OPTIONS.register_timeout_s - 1.0)
    job.say(1, m.Goodbye())
    job.later(1.0)
    assert job.controller.phase is Phase.CLOSED


def test_controller_that_is_closed_says_nothing() -> None:
    job = Job()
    job.take(m.Superseded())
    assert job.controller.phase is Phase.CLOSED
    assert job.register(0) == []


@pytest.mark.parametrize("before", [None, 10], ids=["first", "again on the same connection"])
def test_registration_ends_no_connection_but_an_older_one(before: int | None) -> None:
    job = Job()
    if before is not None:
        job.register(0)
    assert job.register(0) == [m.Send(10, m.Welcome(generation=1))]


def test_who_has_left_is_not_heard_of_from_a_rank_once_the_world_is_complete() -> None:
    job = Job.trained()
    job.leave(2)
    job.register(1, connection=50, world=THREE, left=(2,))
    job.later(OPTIONS.reconnect_s)
    assert job.controller.members.peers[2].lost


def test_rank_that_missed_nothing_hears_nothing_of_the_incident_before() -> None:
    job = resumed()
    job.register(1, connection=50, world=THREE)
    assert job.told(1) == [m.Welcome(generation=1)]


def test_rank_that_missed_the_end_of_an_incident_hears_that_end() -> None:
    job = resumed()
    job.register(1, connection=50, world=THREE, frozen=True)
    (release,) = (message for message in job.told(1) if isinstance(message, m.Release))
    assert (release.outcome, release.step) == (Outcome.SAVED, 1)


def test_gate_that_is_closed_for_an_incident_nobody_knows_is_opened() -> None:
    job = Job.trained()
    job.register(1, connection=50, world=THREE, frozen=True)
    (release,) = (message for message in job.told(1) if isinstance(message, m.Release))
    assert (release.outcome, release.action) == (Outcome.FALSE_ALARM, Action.RESUME)


def test_gate_stays_closed_till_a_successor_knows_whether_somebody_is_lost() -> None:
    job = Job.successor((("model",),) * 3, (0, 1), frozen=True)
    assert job.controller.phase is Phase.GATHERING
    assert not any(isinstance(message, m.Release) for message in job.told(1))


def test_gate_stays_closed_if_a_fault_stands_when_the_world_is_complete_again() -> None:
    job = Job.successor((("model",),) * 3, (0, 1), fault=raised(0), frozen=True)
    job.register(2, world=THREE, frozen=True)
    assert job.controller.phase is Phase.FREEZING
    assert not any(isinstance(message, m.Release) for message in job.told(1))


# -- losses -----------------------------------------------------------------------------------------------


def test_rank_that_was_told_farewell_may_end() -> None:
    job = left_behind()
    assert job.take(m.Died(0)) == []
    assert job.controller.phase is Phase.TRAINING


def test_connection_of_a_process_that_was_seen_to_end_is_ended() -> None:
    job = Job.trained()
    job.take(m.Died(1))
    assert job.just(m.Drop) == [m.Drop(11)]


def test_rank_is_lost_once() -> None:
    job = Job.trained()
    job.take(m.Died(1))
    job.now += 5.0
    job.take(m.Died(1))
    assert job.controller.members.peers[1].since == 0.0


def test_rank_without_a_connection_is_lost_without_ending_one() -> None:
    job = Job.trained()
    job.leave(1)
    job.later(OPTIONS.reconnect_s)
    assert job.controller.members.peers[1].lost
    assert not job.just(m.Drop)


def test_nobody_is_missed_after_the_release() -> None:
    job = released()
    job.leave(1)
    assert not job.controller.members.absent()
    assert job.take(m.Died(2)) == []
    assert not job.controller.members.peers[2].lost


def test_loss_of_a_rank_that_saves_nothing_disturbs_nobody() -> None:
    job = saving()
    began, job.now = job.controller.since, job.now + 1.0
    job.take(m.Died(2))
    assert job.just(m.Send) == []
    assert job.controller.since == began


# -- deadlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "options", "seconds"),
    [
        ((("X",), ("X",)), ProtocolOptions(settle_timeout_s=3.0), 8.0),
        ((("X",), ("Y",)), ProtocolOptions(needed_timeout_s=13.0), 13.0),
    ],
    ids=["not needed", "needed"],
)
def test_rank_inside_an_update_is_waited_for_to_the_second(
    layout: tuple[tuple[str, ...], ...], options: ProtocolOptions, seconds: float
) -> None:
    job = frozen(layout, options)
    job.report(1, 1)
    job.report(0, None, settled=False)
    job.later(seconds - 0.1)
    assert job.controller.phase is Phase.FREEZING
    job.later(0.1)
    assert job.controller.phase is not Phase.FREEZING


def test_commit_is_given_up_before_a_long_budget_ends() -> None:
    job = saving(options=ProtocolOptions(budget_s=500.0))
    job.done(0, 1)
    job.later(OPTIONS.commit_timeout_s)
    assert job.controller.phase is Phase.RELEASING


def test_commit_is_given_up_in_time_for_the_exits_of_a_short_budget() -> None:
    options = ProtocolOptions.within(25.0)
    job = saving(options=options)
    job.done(0, 1)
    job.later(25.0 - options.exit_grace_s - 0.1)
    assert job.controller.phase is Phase.COMMITTING
    job.later(0.1)
    assert job.controller.phase is Phase.RELEASING


# -- saving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incident", ["i-1", "another"])
def test_place_that_cannot_be_made_concerns_only_the_incident_that_saves(incident: str) -> None:
    job = frozen() if incident == "i-1" else saving()
    phase = job.controller.phase
    assert job.take(m.CommitFailed(incident, "no such directory")) == []
    assert job.controller.phase is phase


def test_progress_is_no_beginning() -> None:
    job = saving()
    began, job.now = job.controller.since, job.now + 1.0
    job.say(0, m.Progress(incident="i-1", attempt=1, nbytes=1))
    assert job.controller.since == began


def test_part_that_is_durable_cannot_fail_any_more() -> None:
    job = saving(GROUPS)
    job.done(0, 1)
    assert job.failed(0, 1) == []
