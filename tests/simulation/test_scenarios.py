"""Situations by name, in the simulation: who fails and how, and who holds what. See docs/scenarios.md."""

from __future__ import annotations

import pytest

from simulation.sim_plan import FOR_EVER, Fault, Kind
from simulation.sim_played import (
    GROUPS,
    POOLED,
    at,
    done,
    found,
    last,
    played,
    report,
    saved,
    undisturbed,
    writers,
)
from swansong.protocol.messages import FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions

# -- who fails, and how -----------------------------------------------------------------------------------


def test_thrower_leaves_the_newest_step_and_everybody_hears_of_it() -> None:  # 1
    world = played(Fault(Kind.THROW, (1,), at(1, 2), 0.03))
    assert saved(world) == [2]
    (fault, *_) = report(world).faults
    assert (fault.kind, fault.rank, fault.what) == (FaultKind.RAISED, 1, "ValueError: out of luck")
    assert [rank.released[-1].outcome for rank in world.ranks] == [Outcome.SAVED] * 4


def test_killed_rank_leaves_the_newest_step_of_the_survivors() -> None:  # 2
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03))
    assert saved(world) == [2]
    assert report(world).faults[0].kind is FaultKind.LOST
    assert [rank.released[-1].outcome for rank in world.ranks if rank.number != 1] == [Outcome.SAVED] * 3


def test_torchrun_kills_after_30_s_and_the_state_is_saved_before() -> None:  # 2
    world = played(
        Fault(Kind.KILL, (1,), at(1, 2), 0.03),
        launcher=True,
        options=ProtocolOptions.within(25.0),
        peer_death="hang",
    )
    assert saved(world) == [2]
    assert world.store.checkpoints[0].at < 30.0
    assert all(rank.killed_at is None for rank in world.ranks if rank.number != 1)


def test_controller_survives_rank_0() -> None:  # 3
    world = played(Fault(Kind.KILL, (0,), at(0, 2), 0.03))
    assert saved(world) == [2]
    assert len(world.controllers) == 1


def test_stopped_rank_is_a_stall_that_the_others_save_and_training_goes_on() -> None:  # 4
    world = played(Fault(Kind.STOP, (1,), at(1, 2), 0.03, lasts=100.0))
    assert saved(world) == [2]
    assert report(world).faults[0].kind is FaultKind.STALLED
    assert 1 not in report(world).reports
    assert writers(world)["model"] != 1
    assert undisturbed(world)


def test_stopped_rank_ends_the_job_if_stalls_are_to() -> None:  # 4
    options = ProtocolOptions(stall_action="stop")
    world = played(Fault(Kind.STOP, (1,), at(1, 2), 0.03, lasts=FOR_EVER), options=options)
    assert saved(world) == [2]
    assert all(rank.released for rank in world.ranks if rank.number != 1)


def test_two_ranks_killed_at_once() -> None:  # 5
    world = played(Fault(Kind.KILL, (1, 2), at(1, 2), 0.03))
    assert saved(world) == [2]


def test_one_rank_alone_throws() -> None:  # 7
    world = played(Fault(Kind.THROW, (0,), at(0, 2), 0.03), layout=(("model",),))
    assert saved(world) == [2]


def test_every_rank_throws_at_the_same_step() -> None:  # 6
    world = played(Fault(Kind.THROW_ALL, (0, 1, 2, 3), at(1, 2), 0.04))
    assert saved(world) == [2]


@pytest.mark.parametrize("ranks", [(1,), (0, 1, 2, 3)], ids=["one", "all"])
def test_sigterm_is_saved_inside_the_grace(ranks: tuple[int, ...]) -> None:  # 8
    world = played(Fault(Kind.SIGTERM_ALL, ranks, at(1, 2), 0.03), options=ProtocolOptions.within(25.0))
    assert saved(world) == [2]
    assert report(world).faults[0].kind is FaultKind.SIGNALLED


@pytest.mark.parametrize(
    ("disturbed", "evaluate_s", "doing"),
    [(0, 0.0, "in a collective"), (1, 100.0, "evaluating"), (1, 0.0, "computing")],
    ids=["in a collective", "in evaluation", "waiting for data"],
)
def test_sigterm_is_saved_and_ends_a_main_thread_that_is_stuck(
    disturbed: int, evaluate_s: float, doing: str
) -> None:  # 9
    world = played(
        Fault(Kind.STALL, (disturbed,), at(disturbed, 2), lasts=50.0),
        Fault(Kind.SIGTERM, (1,), at(1, 2), 10.0),
        options=ProtocolOptions.within(25.0),
        steps=3,
        evaluate_s=evaluate_s,
    )
    assert report(world).reports[1].main == doing
    assert saved(world) == [2]
    assert report(world).faults[0].kind is FaultKind.SIGNALLED
    ended = [(rank.died_at or 0.0) - world.store.checkpoints[0].at for rank in world.ranks]
    assert max(ended) < world.plan.options.exit_grace_s + 1.0


def test_operator_has_the_job_saved_and_stopped() -> None:  # 10
    world = played(Fault(Kind.REQUEST, (), at(1, 2), 0.03))
    assert saved(world) == [2]
    assert {rank.released[-1].cause for rank in world.ranks} == {FaultKind.REQUESTED}
    assert {rank.released[-1].outcome for rank in world.ranks} == {Outcome.SAVED}


@pytest.mark.parametrize("ranks", [(1,), (0, 1, 2, 3)], ids=["one", "all"])
def test_stall_is_saved_once_however_long_it_lasts_and_training_goes_on(ranks: tuple[int, ...]) -> None:  # 11
    world = played(Fault(Kind.STALL, ranks, at(1, 2), 0.03, lasts=200.0))
    assert saved(world) == [2]
    assert report(world).faults[0].kind is FaultKind.STALLED
    assert undisturbed(world)


def test_declared_phase_is_no_stall() -> None:  # 11
    world = played(evaluate_s=200.0)
    assert not world.checks.incidents
    assert undisturbed(world)


def test_vanished_host_is_lost_after_the_host_timeout() -> None:  # 12
    world = played(Fault(Kind.KILL_HOST, (1,), at(2, 2), 0.03), hosts=(0, 0, 1, 1), peer_death="hang")
    assert saved(world) == [2]
    assert world.store.checkpoints[0].at > world.plan.host_timeout_s
    assert {fault.rank for fault in report(world).faults} == {2, 3}


# -- who holds what ---------------------------------------------------------------------------------------


def test_each_component_is_saved_by_a_holder_that_is_left() -> None:  # 13
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), layout=GROUPS)
    assert saved(world) == [2]
    assert writers(world)["Y"] == 3
    assert writers(world)["X"] in (0, 2)


def test_component_without_a_holder_is_named_with_its_ranks() -> None:  # 14
    world = played(Fault(Kind.KILL, (1, 3), at(1, 2), 0.03), layout=GROUPS)
    assert saved(world) == []
    assert "'Y'" in report(world).reason
    assert "ranks 1, 3" in report(world).reason


def test_sole_holder_takes_its_component_with_it() -> None:  # 15
    world = played(Fault(Kind.KILL, (2,), at(2, 2), 0.03), layout=(("X",), ("X",), ("Z",)))
    assert saved(world) == []
    assert "'Z'" in report(world).reason


@pytest.mark.parametrize(
    ("layout", "killed"),
    [
        ((("model",),) * 3, 0),
        ((("model",),) * 5, 4),
        ((("X",), ("Y",), ("X",), ("Y",), ("X",)), 1),
        ((("X", "Y", "Z"), ("X",), ("Y",), ("Z",)), 0),
        ((("X", "Y", "Z"), ("X",), ("Y",), ("Z",)), 2),
    ],
    ids=["three", "five", "unequal groups", "holder of all", "one of three"],
)
def test_any_number_of_ranks_and_components(layout: tuple[tuple[str, ...], ...], killed: int) -> None:  # 16
    world = played(Fault(Kind.KILL, (killed,), at(killed, 2), 0.03), layout=layout)
    assert saved(world) == [2]


def test_dead_rank_alone_ahead_falls_back_one_step() -> None:  # 17
    """Rank 0 dies as the gradients of step 3 are reduced; rank 1 alone gets them, says so, and dies."""
    faults = Fault(Kind.KILL, (0,), "collective", nth=3), Fault(Kind.KILL, (1,), "freezing", 0.5)
    alone_ahead = [{"model": 2}, {"model": 3}, {"model": 2}, {"model": 2}]
    for world in found(lambda world: done(world) == alone_ahead, *faults, uneven=True):
        assert any("<- rank 1: StateReport(model whole at 3" in line for line in world.transcript)
        assert saved(world) == [2]


def test_rank_killed_after_its_backward_is_made_up_for_at_the_step_that_it_gave_to() -> None:  # 18
    world = played(Fault(Kind.KILL, (1,), "collective", nth=3))
    assert world.ranks[1].main.done == {"model": 2}
    assert saved(world) == [3]


def test_survivors_a_step_apart_with_nothing_in_common_save_nothing_and_the_reason_says_so() -> None:  # 19
    """Rank 0 dies as the vote on step 3 is complete, and only one of the groups hears of it."""
    apart = [{"X": 2}, {"Y": 2}, {"X": 3}, {"Y": 2}]
    fault = Fault(Kind.KILL, (0,), "vote", nth=3)
    for world in found(lambda world: done(world) == apart, fault, layout=GROUPS, uneven=True):
        assert saved(world) == []
        assert report(world).reason == (
            "no step at which every component is whole: "
            "step 3 lacks 'Y' (ranks 1, 3 whole at step 2); "
            "step 2 lacks 'X' (rank 0 lost or silent, rank 2 whole at step 3)"
        )


@pytest.mark.parametrize("step", [2, 3])
def test_survivors_a_step_apart_are_made_up_for_by_one_that_holds_both(step: int) -> None:  # 19
    layout = (("X", "Y"), ("X",), ("Y",), ("Y",))
    with_both = [{"X": step, "Y": step}, {"X": 3}, {"Y": 2}, {"Y": 2}]
    fault = Fault(Kind.KILL, (3,), "vote", nth=3)
    for world in found(lambda world: done(world) == with_both, fault, layout=layout, uneven=True):
        assert saved(world) == [step]
        assert writers(world)["X" if step == 2 else "Y"] == 0


def test_rank_that_has_both_components_at_a_step_is_enough() -> None:  # 19
    world = played(Fault(Kind.KILL, (1, 2), at(1, 2), 0.03), layout=(("X", "Y"), ("X",), ("Y",)))
    assert saved(world) == [2]
    assert writers(world) == {"X": 0, "Y": 0}


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [(POOLED, [3]), ((("A",), ("B",), ("C",), ("D",)), [])],
    ids=["replica", "sole holder"],
)
def test_rank_stuck_in_its_update_is_left_out(
    layout: tuple[tuple[str, ...], ...], wanted: list[int]
) -> None:  # 20
    world = played(Fault(Kind.WINDOW, (1,), at(1, 2)), layout=layout, collective_s=300.0)
    assert saved(world) == wanted
    if wanted:
        assert writers(world)["model"] != 1
    else:
        assert "in the middle of an update" in world.checks.reports[0][2].reason


def test_part_of_a_saver_whose_gate_opened_is_void_and_another_writes() -> None:  # 20
    """The controller hangs: gates open after the lease, and it finds the ranks again."""
    world = played(
        Fault(Kind.THROW, (3,), at(1, 2), 0.03),
        Fault(Kind.STOP_CONTROLLER, (), "saving", 0.5, lasts=45.0),
        save_s=60.0,
        peer_death="hang",
    )
    assert any("opens its gate" in line for line in world.transcript)
    assert last(world).notes == ("rank 0, attempt 1: its gate was open",)
    assert saved(world) == [2]
    assert writers(world)["model"] != 0


def test_replicas_with_other_values_are_not_pooled() -> None:  # 21
    world = played(Fault(Kind.DIVERGE, (0,), "start"), Fault(Kind.KILL, (3,), at(3, 2), 0.03))
    (checkpoint,) = world.store.checkpoints
    assert checkpoint.content == (("model", 2, "2"),)
    assert writers(world)["model"] != 0


def test_pipeline_stages_of_equal_shape_are_never_pooled() -> None:  # 21
    world = played(Fault(Kind.THROW, (1,), at(1, 2), 0.03), layout=(("stage 0",), ("stage 1",)))
    assert saved(world) == [2]
    assert writers(world) == {"stage 0": 0, "stage 1": 1}
