"""The controller machine by hand: rows of its table, deadlines, refusals."""

from __future__ import annotations

import msgspec
import pytest

from protocol.protocol_support import OPTIONS, Job, member, members, raised, stalled
from swansong.errors import ConfigError
from swansong.protocol import messages as m
from swansong.protocol.controller import Controller
from swansong.protocol.messages import Action, FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import Phase

GROUPS = (("X",), ("Y",), ("X",), ("Y",))


def frozen(
    layout: tuple[tuple[str, ...], ...] = (("model",),) * 3, options: ProtocolOptions = OPTIONS
) -> Job:
    """A job whose last rank has thrown."""
    job = Job.trained(layout, options)
    job.fault(raised(len(layout) - 1))
    return job


def saving(layout: tuple[tuple[str, ...], ...] = (("model",),) * 3, step: int = 1) -> Job:
    """A job in which everybody has reported, and savers write."""
    job = frozen(layout)
    for rank in range(len(layout)):
        job.report(rank, step)
    assert job.controller.phase is Phase.SAVING
    return job


def outcome(job: Job) -> m.Report:
    """Of the incident that just ended."""
    (report,) = job.just(m.Report)
    assert isinstance(report, m.Report)
    return report


# -- registering ------------------------------------------------------------------------------------------


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="world_size"):
        Controller(0, 1, "i", OPTIONS, 0.0)


def test_world_is_told_when_the_last_rank_has_registered() -> None:
    job = Job(layout=GROUPS)
    for rank in (2, 0, 3):
        job.register(rank)
        assert job.told(rank) == [m.Welcome(generation=1)]
    job.register(1)
    assert job.controller.phase is Phase.TRAINING
    for rank in range(4):
        assert m.World(members=members(GROUPS)) in job.told(rank)
    assert job.controller.deadline is None


THREE = members((("model",),) * 3)


@pytest.mark.parametrize(
    ("register", "reason", "retry"),
    [
        (m.Register(member=member(3), world_size=3), "rank 3 of 3", False),
        (m.Register(member=member(-1), world_size=3), "rank -1 of 3", False),
        (m.Register(member=member(0), world_size=4), "of 4, this job has 3", False),
        (m.Register(member=member(0, ("a", "a")), world_size=3), "a component twice", False),
        (m.Register(member=member(1, pid=7), world_size=3), "another process", True),
        (m.Register(member=member(1, ("other",)), world_size=3), "other components", False),
        (m.Register(member=member(0), world_size=3, world=THREE[:2]), "not of ranks 0 to 2", False),
        (m.Register(member=member(0), world_size=3, world=(*THREE[:2], member(9))), "not of ranks", False),
        (
            m.Register(member=member(0), world_size=3, world=(*THREE[:2], member(2, "aa"))),
            "wrong about rank 2",
            False,
        ),
        (m.Register(member=member(0, pid=3), world_size=3, world=THREE), "wrong about rank 0", False),
        (
            m.Register(member=member(0), world_size=3, world=(THREE[0], member(1, pid=7), THREE[2])),
            "wrong about rank 1",
            False,
        ),
        (m.Register(member=member(0), world_size=3, left=(3,)), "does not have", False),
    ],
)
def test_wrong_registration_is_refused_and_changes_nothing(
    register: m.Register, reason: str, retry: bool
) -> None:
    job = Job()
    job.register(1)
    refusal, drop = job.take(m.Received(5, register))
    assert isinstance(refusal, m.Send)
    assert isinstance(refusal.message, m.Refused)
    assert reason in refusal.message.reason
    assert refusal.message.retry is retry
    assert drop == m.Drop(5)
    assert job.controller.members.missing() == [0, 2]
    assert job.controller.members.world is None


def test_connection_is_bound_to_its_rank() -> None:
    job = Job()
    job.register(1)
    effects = job.take(m.Received(11, m.Register(member=member(0), world_size=3)))
    assert m.Drop(11) in effects
    assert job.controller.members.peers[0].member is None


def test_who_has_not_registered_is_not_heard() -> None:
    job = Job.trained()
    effects = job.take(m.Received(99, m.FaultReport(fault=raised(0))))
    assert effects == [m.Send(99, m.Refused(reason="register first", retry=False)), m.Drop(99)]
    assert job.controller.phase is Phase.TRAINING


def test_ranks_that_do_not_register_end_the_protection() -> None:
    job = Job()
    job.register(1)
    job.later(OPTIONS.register_timeout_s)
    (refused,) = job.told(1)
    assert isinstance(refused, m.Refused)
    assert "ranks 0, 2 did not register" in refused.reason
    assert job.controller.phase is Phase.CLOSED
    assert job.controller.deadline is None


def test_fault_before_the_world_is_complete_ends_with_the_missing_ranks() -> None:
    job = Job()
    job.register(1)
    job.fault(raised(1))
    assert "rank 0, 2" in outcome(job).reason or "ranks 0, 2" in outcome(job).reason
    assert [message.action for message in job.told(1) if isinstance(message, m.Release)] == [Action.STOP]


def test_stall_before_the_world_is_complete_is_no_fault() -> None:
    job = Job()
    job.register(1)
    assert job.fault(stalled(1)) == []
    assert job.controller.phase is Phase.GATHERING


def test_new_connection_of_a_rank_replaces_its_old_one() -> None:
    job = Job.trained()
    assert m.Drop(11) in job.register(1, connection=50, world=THREE)
    assert job.take(m.Disconnected(11)) == []
    assert job.controller.phase is Phase.TRAINING


def test_rank_that_missed_the_world_hears_it_when_it_comes_back() -> None:
    job = Job.trained()
    job.leave(1)
    job.register(1, connection=50)
    assert m.World(members=THREE) in job.told(1)


# -- freezing ---------------------------------------------------------------------------------------------


def test_fault_freezes_everybody() -> None:
    job = frozen()
    for rank in range(3):
        assert job.told(rank) == [m.Freeze(incident="i-1")]


def test_rank_that_comes_back_in_time_was_a_false_alarm() -> None:
    job = Job.trained()
    job.leave(1)
    assert job.controller.phase is Phase.FREEZING
    job.later(OPTIONS.reconnect_s - 0.1)
    job.register(1, connection=50, world=THREE)
    assert job.controller.phase is Phase.TRAINING
    for rank in range(3):
        (release,) = (message for message in job.told(rank) if isinstance(message, m.Release))
        assert (release.outcome, release.action) == (Outcome.FALSE_ALARM, Action.RESUME)


def test_rank_that_does_not_come_back_is_lost() -> None:
    job = Job.trained()
    job.leave(1)
    job.report(0, 1)
    job.report(2, 1)
    assert job.controller.phase is Phase.FREEZING
    job.later(OPTIONS.reconnect_s)
    assert job.controller.phase is Phase.SAVING
    assert job.controller.incident is not None
    assert job.controller.incident.cause is FaultKind.LOST


def test_process_that_was_seen_to_end_is_lost_at_once() -> None:
    job = Job.trained()
    job.take(m.Died(1))
    assert job.controller.members.peers[1].lost
    job.report(0, 1)
    job.report(2, 1)
    assert job.controller.phase is Phase.SAVING


def test_word_of_a_dead_rank_counts_for_nothing() -> None:
    job = frozen()
    job.report(0, 2)
    job.take(m.Died(0))
    job.report(1, 1)
    job.report(2, 1)
    assert {rank: save.step for rank, save in job.orders().items()} == {1: 1}


def test_newest_step_is_chosen_though_some_are_behind() -> None:
    job = frozen()
    job.report(0, 1)
    job.report(1, 2)
    job.report(2, 1)
    assert {rank: save.step for rank, save in job.orders().items()} == {1: 2}


def test_rank_inside_an_update_gets_time_to_leave_it() -> None:
    job = frozen()
    job.report(0, None, settled=False)
    job.report(1, 1)
    job.report(2, 1)
    job.later(OPTIONS.freeze_timeout_s + OPTIONS.settle_timeout_s - 0.1)
    assert job.controller.phase is Phase.FREEZING
    job.report(0, 2)
    assert {rank: save.step for rank, save in job.orders().items()} == {0: 2}


def test_silent_rank_that_is_not_needed_is_not_waited_for() -> None:
    job = frozen()
    job.report(0, 1)
    job.report(2, 1)
    job.later(OPTIONS.freeze_timeout_s - 0.1)
    assert job.controller.phase is Phase.FREEZING
    job.later(0.1)
    assert job.controller.phase is Phase.SAVING


@pytest.mark.parametrize("unsettled", [False, True], ids=["silent", "inside its update"])
def test_sole_holder_is_waited_for_to_its_deadline(unsettled: bool) -> None:
    job = frozen((("X",), ("Y",)))
    job.report(1, 1)
    if unsettled:
        job.report(0, None, settled=False)
    job.later(OPTIONS.needed_timeout_s - 0.1)
    assert job.controller.phase is Phase.FREEZING
    job.later(0.1)
    assert "'X'" in outcome(job).reason


def test_clock_that_cannot_be_read_yet_is_no_report() -> None:
    job = frozen((("X",), ("Y",)))
    job.report(1, 1)
    unreadable = m.StateReport(incident="i-1", held={}, settled=False, boundary=1, main="in a collective")
    job.say(0, unreadable)
    job.later(33.0)
    assert job.controller.phase is Phase.FREEZING
    job.report(0, 1)
    assert job.controller.phase is Phase.SAVING


def test_before_the_first_boundary_there_is_nothing_to_save() -> None:
    job = frozen()
    for rank in range(3):
        job.report(rank, 0, boundary=None)
    assert "before the first step boundary" in outcome(job).reason


def test_first_update_is_waited_for_if_it_may_end_yet() -> None:
    job = frozen()
    for rank in range(3):
        job.report(rank, None, boundary=None, settled=False)
    job.later(OPTIONS.needed_timeout_s - 0.1)
    assert job.controller.phase is Phase.FREEZING
    job.report(1, 1)
    assert set(job.orders()) == {1}


def test_initial_state_is_not_saved_from_a_rank_without_a_boundary() -> None:
    job = frozen((("X",), ("X", "Y"), ("Y",)))
    job.report(0, 1)
    job.report(1, 0, boundary=None)
    job.report(2, 0, boundary=None)
    assert job.controller.phase is not Phase.SAVING


def test_survivors_without_a_common_step_save_nothing() -> None:
    job = frozen((("X",), ("Y",)))
    job.report(0, 1)
    job.report(1, 2)
    assert "no step at which every component is whole" in outcome(job).reason


def test_one_rank_with_both_components_at_a_step_is_enough() -> None:
    job = frozen((("X",), ("Y",), ("X", "Y")))
    job.report(0, 1)
    job.report(1, 2)
    job.report(2, 2)
    assert {rank: save.step for rank, save in job.orders().items()} == {1: 2, 2: 2}


def test_gates_are_kept_closed_while_somebody_is_waited_for() -> None:
    job = frozen((("X",), ("Y",)))
    job.report(1, 1)
    job.later(OPTIONS.gate_lease_s / 3)
    assert m.Hold(incident="i-1") in job.told(1)


def test_report_of_another_incident_is_ignored() -> None:
    job = frozen()
    for rank in range(3):
        job.say(rank, m.StateReport(incident="other", held={}, settled=True, boundary=1, main=""))
    assert job.controller.incident is not None
    assert not job.controller.incident.reports


# -- saving -----------------------------------------------------------------------------------------------


def test_components_are_spread_and_committed_together() -> None:
    job = saving(GROUPS)
    assert {rank: save.keys for rank, save in job.orders().items()} == {0: ("X",), 1: ("Y",)}
    assert m.Prepare("i-1", 1) in job.effects
    job.done(0, 1)
    assert not job.just(m.Commit)
    job.done(1, 1)
    assert job.effects == [m.Commit("i-1", 1, ((1, 0, ("X",)), (1, 1, ("Y",))), FaultKind.RAISED)]
    job.take(m.Committed("i-1", "ckpt/step-1"))
    report = outcome(job)
    assert (report.outcome, report.step, report.path, report.savers) == (
        Outcome.SAVED,
        1,
        "ckpt/step-1",
        {"X": 0, "Y": 1},
    )
    assert not job.just(m.Discard)


def test_saver_that_fails_is_replaced_at_the_same_step() -> None:
    job = saving()
    job.failed(0, 1)
    assert job.told(0) == [m.Void(incident="i-1", attempt=1)]
    assert job.orders()[1] == m.Save(incident="i-1", attempt=2, step=1, keys=("model",))


def test_when_no_holder_can_write_the_outcome_says_why() -> None:
    job = saving()
    for rank in range(3):
        job.failed(rank, rank + 1)
    for rank in range(3):
        job.report(rank, 1)
    assert outcome(job).reason.endswith("ranks 0, 1, 2 failed to save it; rank 2: disk full")


def test_when_no_attempt_is_left_the_outcome_says_whose_failed() -> None:
    job = frozen((("model",),), ProtocolOptions(attempts=1))
    job.report(0, 1)
    job.failed(0, 1)
    assert outcome(job).reason == "rank 0: disk full"


def test_saver_without_progress_is_replaced() -> None:
    job = saving()
    job.later(OPTIONS.idle_timeout_s - 1)
    job.say(0, m.Progress(incident="i-1", attempt=1, nbytes=5))
    job.later(OPTIONS.idle_timeout_s - 1)
    assert not job.orders()
    job.say(0, m.Progress(incident="i-1", attempt=1, nbytes=5))
    job.later(1.0)
    assert list(job.orders()) == [1]


def test_what_a_replaced_saver_still_says_does_not_count() -> None:
    job = saving()
    job.failed(0, 1)
    job.done(0, 1)
    assert not job.just(m.Commit)


def test_part_that_is_durable_counts_though_its_writer_died() -> None:
    job = saving(GROUPS)
    job.done(0, 1)
    job.take(m.Died(0))
    job.done(1, 1)
    (commit,) = job.just(m.Commit)
    assert commit == m.Commit("i-1", 1, ((1, 0, ("X",)), (1, 1, ("Y",))), FaultKind.RAISED)


def test_part_that_is_durable_counts_in_the_next_choice_too() -> None:
    job = saving((("X",), ("Y",)))
    job.done(0, 1)
    job.take(m.Died(0))
    job.failed(1, 1, moved=True)
    assert job.controller.phase is Phase.FREEZING
    job.report(1, 1)
    assert {rank: save.keys for rank, save in job.orders().items()} == {1: ("Y",)}
    job.done(1, 2)
    assert job.just(m.Commit) == [m.Commit("i-1", 1, ((1, 0, ("X",)), (2, 1, ("Y",))), FaultKind.RAISED)]


def test_writer_of_a_durable_part_is_still_waited_for_with_the_rest() -> None:
    job = frozen((("X", "Y"), ("Y",)))
    job.report(0, 1)
    job.report(1, 1)
    assert {rank: save.keys for rank, save in job.orders().items()} == {0: ("X",), 1: ("Y",)}
    job.done(0, 1)
    job.failed(1, 1, moved=True)
    job.report(1, None)
    job.later(OPTIONS.freeze_timeout_s + OPTIONS.settle_timeout_s)
    assert job.controller.phase is not Phase.RELEASING


def test_part_of_another_step_does_not_count() -> None:
    job = frozen((("X",), ("Y",)))
    job.report(0, 1, values="")
    job.report(1, 1, values="")
    job.done(0, 1)
    job.failed(1, 1, moved=True)
    job.report(0, 2, values="")
    job.report(1, 2, values="")
    assert set(job.orders()) == {0, 1}


def test_part_with_other_values_does_not_count() -> None:
    job = frozen((("X",), ("X",), ("X",), ("Y",)))
    job.report(0, 1, values="odd")
    for rank in (1, 2):
        job.report(rank, None)
    job.report(3, 1)
    job.done(0, 1)
    job.take(m.Died(0))
    job.failed(3, 1, moved=True)
    for rank in (1, 2, 3):
        job.report(rank, 1)
    assert {rank: save.keys for rank, save in job.orders().items()} == {1: ("X",), 3: ("Y",)}
    job.done(3, 2)
    assert not job.just(m.Commit)


def test_no_holder_left_at_a_step_means_fresh_reports() -> None:
    job = frozen()
    job.report(0, 2)
    job.report(1, 1)
    job.report(2, 1)
    job.failed(0, 1)
    assert job.controller.phase is Phase.FREEZING
    for rank in range(3):
        assert m.Freeze(incident="i-1") in job.told(rank)
    for rank in range(3):
        job.report(rank, 1)
    assert set(job.orders()) == {1}


def test_savers_are_chosen_anew_only_so_often() -> None:
    job = saving((("X",), ("Y",)))
    for attempt in range(1, OPTIONS.attempts):
        job.failed(0, attempt, moved=True)
        job.report(0, 1)
        job.report(1, 1)
    job.failed(0, OPTIONS.attempts, moved=True)
    assert outcome(job).outcome is Outcome.NOTHING
    assert job.just(m.Discard) == [m.Discard("i-1")]


def test_lost_saver_that_comes_back_may_write_again() -> None:
    job = saving((("X",), ("Y",)))
    job.leave(0)
    job.later(OPTIONS.reconnect_s)
    assert job.controller.phase is Phase.FREEZING
    job.register(0, connection=50, world=members((("X",), ("Y",))), frozen=True)
    job.report(0, 1)
    job.report(1, 1)
    assert set(job.orders()) == {0, 1}


def test_saver_that_comes_back_in_time_hears_its_order_again() -> None:
    job = saving()
    job.leave(0)
    job.register(0, connection=50, world=THREE, frozen=True)
    assert job.told(0)[1:] == [
        m.Freeze(incident="i-1"),
        m.Save(incident="i-1", attempt=1, step=1, keys=("model",)),
    ]


def test_report_from_before_a_gate_was_opened_is_forgotten() -> None:
    job = frozen((("X",), ("Y",)))
    job.report(0, 1)
    job.leave(0)
    job.register(0, connection=50, world=members((("X",), ("Y",))), frozen=False)
    job.report(1, 1)
    assert job.controller.phase is Phase.FREEZING


def test_order_of_a_rank_whose_gate_was_open_is_given_to_another() -> None:
    job = saving()
    job.leave(0)
    job.register(0, connection=50, world=THREE, frozen=False)
    assert not job.orders().keys() & {0}
    assert job.orders()[1].attempt == 2
    job.done(0, 1)
    assert not job.just(m.Commit)


def test_place_that_cannot_be_made_ends_the_incident() -> None:
    job = saving()
    job.take(m.CommitFailed("i-1", "no such directory"))
    assert outcome(job).reason == "no such directory"


def test_parts_are_written_anew_after_a_commit_that_failed() -> None:
    job = saving()
    job.done(0, 1)
    job.take(m.CommitFailed("i-1", "input/output error"))
    assert job.controller.phase is Phase.FREEZING
    for rank in range(3):
        job.report(rank, 1)
    assert set(job.orders()) == {0}


def test_commit_that_does_not_end_is_given_up() -> None:
    job = saving()
    job.done(0, 1)
    job.later(OPTIONS.commit_timeout_s)
    assert outcome(job).outcome is Outcome.NOTHING
    assert job.take(m.Committed("i-1", "late")) == []


def test_budget_ends_saving_and_leaves_time_to_commit_and_exit() -> None:
    options = ProtocolOptions.within(25.0)
    job = frozen(options=options)
    for rank in range(3):
        job.report(rank, 1)
    while job.controller.phase is Phase.SAVING:
        job.say(0, m.Progress(incident="i-1", attempt=1, nbytes=int(100 * job.now) + 1))
        job.later(1.0)
    assert outcome(job).reason.startswith("no time left: the parts of rank 0")
    assert job.now == pytest.approx(25.0 - options.exit_grace_s - options.commit_reserve_s, abs=1.0)


# -- endings ----------------------------------------------------------------------------------------------


def finished(job: Job) -> Job:
    """Everybody's part is durable and committed."""
    job.done(0, 1)
    job.take(m.Committed("i-1", "path"))
    return job


def test_controller_closes_when_nobody_is_left() -> None:
    job = finished(saving())
    assert job.controller.phase is Phase.RELEASING
    for rank in range(3):
        job.leave(rank)
    assert job.just(m.Close)
    assert job.take(m.Tick()) == []


def test_controller_closes_after_the_grace_though_somebody_is_left() -> None:
    job = finished(saving())
    job.later(OPTIONS.exit_grace_s)
    assert job.just(m.Close)
    assert job.controller.deadline is None


def test_rank_that_comes_back_during_the_release_hears_it() -> None:
    job = saving()
    job.leave(1)
    finished(job)
    job.register(1, connection=50, world=THREE, frozen=True)
    assert isinstance(job.told(1)[-1], m.Release)
    job.later(60.0)
    assert job.controller.phase is Phase.CLOSED


def stall(step: int | None, options: ProtocolOptions = OPTIONS) -> Job:
    """A job whose stall at step 1 was saved, and which stalls again."""
    job = Job.trained(options=options)
    job.fault(stalled(0))
    for rank in range(3):
        job.report(rank, 1)
    finished(job)
    if job.controller.phase is Phase.TRAINING:
        job.fault(stalled(1, step))
    return job


@pytest.mark.parametrize(
    ("step", "phase"),
    [(1, Phase.TRAINING), (None, Phase.TRAINING), (2, Phase.FREEZING)],
    ids=["the same", "older", "a later one"],
)
def test_same_stall_is_not_saved_twice(step: int | None, phase: Phase) -> None:
    assert stall(step).controller.phase is phase


def test_stall_ends_the_job_if_it_is_to() -> None:
    job = stall(None, ProtocolOptions(stall_action="stop"))
    assert job.controller.phase is Phase.RELEASING


def test_other_fault_during_a_stall_ends_the_job() -> None:
    job = Job.trained()
    job.fault(stalled(0))
    job.fault(raised(1))
    for rank in range(3):
        job.report(rank, 1)
    finished(job)
    assert job.controller.phase is Phase.RELEASING


def test_rank_that_missed_the_end_of_a_stall_hears_it_when_it_comes_back() -> None:
    job = Job.trained()
    job.fault(stalled(0))
    for rank in range(3):
        job.report(rank, 1)
    job.leave(2)
    finished(job)
    job.register(2, connection=50, world=THREE, frozen=True)
    (release,) = (message for message in job.told(2) if isinstance(message, m.Release))
    assert release.action is Action.RESUME


def test_operator_ends_the_job() -> None:
    job = Job.trained()
    job.take(m.Persist("me"))
    for rank in range(3):
        job.report(rank, 1)
    finished(job)
    (release,) = (message for message in job.told(1) if isinstance(message, m.Release))
    assert (release.cause, release.action) == (FaultKind.REQUESTED, Action.STOP)


# -- goodbyes ---------------------------------------------------------------------------------------------


def test_ranks_that_have_finished_leave_together() -> None:
    job = Job.trained()
    for rank in (0, 1):
        assert job.say(rank, m.Goodbye()) == []
    job.say(2, m.Goodbye())
    for rank in range(3):
        assert m.Farewell() in job.told(rank)
    assert job.just(m.Close)


def test_rank_that_has_finished_waits_only_so_long_and_the_others_hear_that_it_left() -> None:
    job = Job.trained()
    job.say(0, m.Goodbye())
    job.later(OPTIONS.goodbye_timeout_s)
    assert job.told(0) == [m.Farewell()]
    assert job.told(1) == [m.Left(ranks=(0,))]
    assert job.leave(0) == []
    job.leave(1)
    job.register(1, connection=50, world=THREE)
    assert m.Left(ranks=(0,)) in job.told(1)


def test_finished_rank_that_is_away_when_it_may_leave_is_not_missed() -> None:
    job = Job.trained()
    job.say(0, m.Goodbye())
    job.say(2, m.Goodbye())
    job.later(OPTIONS.goodbye_timeout_s - 0.1)
    job.fault(stalled(1))
    for rank in range(3):
        job.report(rank, 1)
    job.leave(2)
    job.later(0.5)
    finished(job)
    assert job.controller.phase is Phase.TRAINING
    assert job.later(10.0) == []
    assert job.controller.phase is Phase.TRAINING


def test_goodbye_before_the_world_is_complete_is_waited_for_and_answered() -> None:
    job = Job()
    job.register(1)
    job.say(1, m.Goodbye())
    job.later(OPTIONS.goodbye_timeout_s)
    assert job.told(1) == [m.Farewell()]


def test_farewell_that_got_lost_is_said_again() -> None:
    job = Job.trained()
    job.say(0, m.Goodbye())
    job.later(OPTIONS.goodbye_timeout_s)
    job.register(0, connection=50, world=THREE)
    job.say(0, m.Goodbye())
    job.later(OPTIONS.goodbye_timeout_s)
    assert job.told(0) == [m.Farewell()]


def test_state_of_a_finished_rank_is_saved_while_it_waits() -> None:
    job = Job.trained()
    job.say(0, m.Goodbye())
    job.fault(raised(1))
    job.report(0, 2)
    job.report(1, None)
    job.report(2, None)
    assert set(job.orders()) == {0}


# -- a controller that was started anew -------------------------------------------------------------------


def test_successor_waits_for_the_others_and_goes_on() -> None:
    job = Job.successor(GROUPS, (0, 1, 2))
    assert job.controller.phase is Phase.GATHERING
    job.register(3)
    assert job.controller.phase is Phase.TRAINING
    assert m.World(members=members(GROUPS)) in job.told(3)


def test_rank_that_was_with_the_successor_before_the_map_hears_it() -> None:
    job = Job(GROUPS)
    job.register(3)
    job.register(0, world=members(GROUPS))
    assert m.World(members=members(GROUPS)) in job.told(3)


def test_successor_opens_gates_that_are_closed_for_nothing() -> None:
    job = Job.successor(GROUPS, (0, 1, 2), frozen=True)
    job.register(3, world=members(GROUPS))
    (release,) = (message for message in job.told(0) if isinstance(message, m.Release))
    assert (release.outcome, release.action) == (Outcome.FALSE_ALARM, Action.RESUME)
    assert not job.told(3)[1:]


def test_successor_takes_up_a_fault_that_stands() -> None:
    job = Job.successor((("model",),) * 2, (0,), fault=raised(0), frozen=True)
    job.register(1, world=members((("model",),) * 2), frozen=True)
    assert job.controller.phase is Phase.FREEZING


def test_successor_counts_as_lost_who_does_not_come_back_and_saves_no_half() -> None:
    job = Job.successor(GROUPS, (0, 2))
    job.later(OPTIONS.reregister_timeout_s - 0.1)
    assert job.controller.phase is Phase.GATHERING
    job.later(0.1)
    assert job.controller.phase is Phase.FREEZING
    job.report(0, 1)
    job.report(2, 1)
    assert "'Y'" in outcome(job).reason


def test_budget_of_a_successor_counts_the_time_it_waited() -> None:
    options = ProtocolOptions.within(25.0)
    job = Job((("model",),) * 3, options)
    job.now = 100.0
    for rank in (0, 1):
        job.register(rank, world=THREE, frozen=True)
    job.later(options.reregister_timeout_s)
    assert job.controller.incident is not None
    assert job.controller.incident.budget_ends == 100.0 + 25.0 - options.exit_grace_s


def test_successor_does_not_miss_who_had_left() -> None:
    job = Job.successor((("model",),) * 3, (0, 1), left=(2,))
    assert job.controller.phase is Phase.TRAINING


def test_another_incarnation_has_the_port_after_the_incident() -> None:
    job = frozen()
    job.take(m.Superseded())
    assert job.controller.phase is Phase.FREEZING
    for rank in range(3):
        job.report(rank, 1)
    finished(job)
    job.later(OPTIONS.exit_grace_s)
    refused = [message for message in job.told(0) if isinstance(message, m.Refused)]
    assert [message.retry for message in refused] == [True]
    assert job.just(m.Close)


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.TRAINING])
def test_another_incarnation_has_the_port_at_once(phase: Phase) -> None:
    job = Job.trained() if phase is Phase.TRAINING else Job()
    assert job.controller.phase is phase
    job.take(m.Superseded())
    assert job.just(m.Close)


def test_no_message_out_of_place_raises() -> None:
    said: tuple[m.ToController, ...] = (
        m.FaultReport(fault=raised(0)),
        m.StateReport(incident="i-1", held={}, settled=True, boundary=None, main=""),
        m.Progress(incident="i-1", attempt=9, nbytes=-1),
        m.PartDone(incident="i-1", attempt=9),
        m.PartFailed(incident="i-1", attempt=9, reason=""),
        m.Goodbye(),
    )
    for job in (Job(), Job.trained(), frozen(), saving(), finished(saving())):
        job.register(0)
        for message in said:
            job.say(0, msgspec.structs.replace(message))
            assert job.controller.deadline is None or job.controller.deadline >= job.now


@pytest.mark.parametrize("blamed", [0, 77, -1], ids=["another rank", "no rank of this job", "nobody"])
def test_a_rank_cannot_blame_another(blamed: int) -> None:
    job = Job.trained((("model",),) * 3, OPTIONS)
    job.say(1, m.FaultReport(fault=raised(blamed)))
    assert job.controller.incident is not None
    assert [fault.rank for fault in job.controller.incident.faults] == [1]
