"""The situations that must be covered by name, in the simulation. Numbers are those of their list."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.sim_plan import FOR_EVER, Fault, Kind, Plan
from simulation.sim_stories import STORIES, told
from simulation.sim_world import Recording, World
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions

GOLDEN = Path(__file__).parent.parent / "golden"

POOLED = (("model",),) * 4
GROUPS = (("X",), ("Y",), ("X",), ("Y",))
"""X on ranks 0 and 2, Y on ranks 1 and 3."""


def played(*faults: Fault, layout: tuple[tuple[str, ...], ...] = POOLED, **details: object) -> World:
    """Run a plan of 4 ranks and 5 steps unless told otherwise; every invariant must hold."""
    settings: dict[str, object] = {"seed": 1, "hosts": (0,) * len(layout), "steps": 5, **details}
    plan = Plan(layout=layout, faults=faults, **settings)  # type: ignore[arg-type]
    world = World(plan, recording=Recording.STORY)
    result = world.run()
    assert not result.violation, "\n".join([*result.transcript, result.violation])
    return world


def saved(world: World) -> list[int]:
    """Steps of what was committed, in order."""
    return [checkpoint.step for checkpoint in world.store.checkpoints]


def writers(world: World) -> dict[str, int]:
    """Component -> who wrote it, of the latest incident."""
    return world.checks.reports[-1][2].savers


def report(world: World) -> m.Report:
    """Of the only incident."""
    assert len(world.checks.reports) == 1
    return world.checks.reports[0][2]


def at(rank: int, step: int) -> str:
    """The moment at which a rank comes to a boundary."""
    return f"rank {rank} at {step}"


def undisturbed(world: World) -> bool:
    """True if every rank came to the end of its training."""
    return all(rank.departed and rank.main.step == world.plan.steps for rank in world.ranks)


# -- who fails, and how -----------------------------------------------------------------------------------


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


def test_stopped_rank_is_a_stall_that_is_saved_and_trains_on() -> None:  # 4
    world = played(Fault(Kind.STOP, (1,), at(1, 2), 0.03, lasts=100.0))
    assert saved(world) == [2]
    assert report(world).faults[0].kind is FaultKind.STALLED
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


def test_operator_has_the_job_saved_and_stopped() -> None:  # 10
    world = played(Fault(Kind.REQUEST, (), at(1, 2), 0.03))
    assert saved(world) == [2]
    assert {rank.released[-1].cause for rank in world.ranks} == {FaultKind.REQUESTED}


def test_same_stall_is_not_saved_twice() -> None:  # 11
    world = played(Fault(Kind.STALL, (1,), at(1, 2), 0.03, lasts=200.0))
    assert saved(world) == [2]
    assert len(world.checks.reports) == 1
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
    found = 0
    for seed in range(60):  # where the others do not come through the gate in time
        world = played(
            Fault(Kind.STALL, (0, 2, 3), at(1, 2), 0.1, lasts=3.0),
            Fault(Kind.KILL, (1,), at(1, 3)),
            step_s=0.2,
            latency_s=0.2,
            window_s=0.001,
            seed=seed,
        )
        if [rank.main.done["model"] for rank in world.ranks] == [2, 3, 2, 2]:
            found += 1
            assert saved(world) == [2]
    assert found


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
    if not wanted:
        assert "in the middle of an update" in world.checks.reports[0][2].reason


def test_gates_open_when_the_controller_hangs_and_it_finds_the_ranks_again() -> None:  # 20
    world = played(
        Fault(Kind.THROW, (3,), at(1, 2), 0.03),
        Fault(Kind.STOP_CONTROLLER, (), "saving", 0.5, lasts=45.0),
        save_s=60.0,
        peer_death="hang",
    )
    assert any("opens its gate" in line for line in world.transcript)
    assert saved(world) != []


def test_replicas_with_other_values_are_not_pooled() -> None:  # 21
    world = played(Fault(Kind.DIVERGE, (0,), "start"), Fault(Kind.KILL, (3,), at(3, 2), 0.03))
    (checkpoint,) = world.store.checkpoints
    assert checkpoint.content == (("model", 2, "2"),)
    assert writers(world)["model"] != 0


def test_pipeline_stages_of_equal_shape_are_never_pooled() -> None:  # 21
    world = played(Fault(Kind.THROW, (1,), at(1, 2), 0.03), layout=(("stage 0",), ("stage 1",)))
    assert saved(world) == [2]
    assert writers(world) == {"stage 0": 0, "stage 1": 1}


# -- what else breaks meanwhile ---------------------------------------------------------------------------


def test_saver_killed_while_saving_is_replaced() -> None:  # 23
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), Fault(Kind.KILL, (0,), "saving", 0.4))
    assert saved(world) == [2]
    assert writers(world) == {"model": 2}


def test_writer_that_hangs_is_replaced() -> None:  # 23
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), Fault(Kind.HANG_WRITER, (0,), "start"))
    assert saved(world) == [2]
    assert writers(world) == {"model": 2}


def test_part_of_a_saver_that_died_since_is_used() -> None:  # 23
    world = played(
        Fault(Kind.THROW, (3,), at(1, 2), 0.03),
        Fault(Kind.HANG_WRITER, (1,), "start"),
        Fault(Kind.KILL, (0,), "part", 1.0),
        layout=(("X",), ("Y",), ("Y",), ("Y",)),
    )
    assert saved(world) == [2]
    assert writers(world)["X"] == 0


def test_full_disk_of_one_saver_is_replaced() -> None:  # 24
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), Fault(Kind.DISK_FULL, (0,), "start"))
    assert saved(world) == [2]
    assert writers(world) == {"model": 2}


def test_full_disks_everywhere_leave_nothing_and_the_reason() -> None:  # 24
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), Fault(Kind.DISK_FULL, (0, 2, 3), "start"))
    assert saved(world) == []
    assert not world.store.places
    assert any("100 bytes needed" in note for note in report(world).notes)


def test_controller_killed_in_steady_state_is_started_again() -> None:  # 25
    world = played(
        Fault(Kind.KILL_CONTROLLER, (), at(1, 1)), Fault(Kind.KILL, (2,), at(2, 4), 0.03), step_s=1.0
    )
    assert saved(world) == [4]
    assert len(world.controllers) == 2


def test_successor_does_not_commit_half_a_model() -> None:  # 25
    world = played(Fault(Kind.KILL_BOTH, (1, 3), at(1, 2), 0.03), layout=GROUPS)
    assert saved(world) == []
    assert "'Y'" in report(world).reason


@pytest.mark.parametrize("when", ["freezing", "saving", "part", "committing", "committed"])
def test_controller_killed_at_any_point_saves_once(when: str) -> None:  # 26
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), Fault(Kind.KILL_CONTROLLER, (), when, 0.001))
    assert saved(world) == [2]
    assert len(world.controllers) == 2
    assert all(rank.released[-1].outcome is Outcome.SAVED for rank in world.ranks if rank.number != 1)


def test_slow_save_that_progresses_is_not_given_up() -> None:  # 27
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), save_s=400.0)
    assert saved(world) == [2]
    assert world.store.checkpoints[0].at > 300.0


def test_slow_save_ends_with_the_budget() -> None:  # 27
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), save_s=400.0, options=ProtocolOptions.within(25.0))
    assert saved(world) == []
    assert report(world).reason.startswith("no time left")


def test_nothing_is_visible_between_the_last_part_and_the_commit() -> None:  # 29
    world = played(
        Fault(Kind.KILL, (1,), at(1, 2), 0.03),
        Fault(Kind.KILL_HOST, (0,), "committing", 0.001),
        hosts=(0, 1, 1, 1),
    )
    assert saved(world) == []


def test_second_commit_of_the_same_content_counts_as_done() -> None:  # 28
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), Fault(Kind.KILL_CONTROLLER, (), "committed"))
    assert saved(world) == [2]
    assert world.checks.reports[-1][2].outcome is Outcome.SAVED


def test_rank_that_never_registered_leaves_nothing_and_a_reason() -> None:  # 30
    world = played(Fault(Kind.ABSENT, (3,), "start"), Fault(Kind.THROW, (1,), at(1, 2), 0.03))
    assert saved(world) == []
    assert "rank 3 had not registered" in report(world).reason


def test_fault_before_the_first_boundary_leaves_nothing_and_a_reason() -> None:  # 30
    world = played(Fault(Kind.THROW, (1,), "training", 0.01), step_s=5.0)
    assert saved(world) == []
    assert "before the first step boundary" in report(world).reason


def test_cut_connection_is_a_false_alarm_and_training_goes_on() -> None:  # 31
    world = played(Fault(Kind.CUT, (1,), at(1, 2), 0.03, lasts=0.2))
    assert saved(world) == []
    assert world.checks.incidents == 1
    assert undisturbed(world)


def test_rank_away_for_longer_counts_as_lost() -> None:  # 31
    world = played(Fault(Kind.CUT, (1,), at(1, 2), 0.03, lasts=20.0), step_s=1.0)
    assert saved(world) != []
    assert world.checks.reports[0][2].faults[0].kind is FaultKind.LOST


def test_another_incarnation_has_the_port_freed() -> None:  # 32, 35
    world = played(Fault(Kind.SUPERSEDE, (), at(1, 2)))
    assert world.controllers[0].closed == "another start of the job took over"


def test_unknown_connection_has_no_effect() -> None:  # 33
    world = played(Fault(Kind.STRAY, (), at(1, 2)))
    assert not world.checks.incidents
    assert undisturbed(world)


# -- transcripts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORIES)
def test_story_is_the_one_that_is_kept(name: str) -> None:
    """`python tools/simulate.py --stories` writes them anew; read what has changed."""
    assert told(STORIES[name]) == (GOLDEN / f"transcript_{name}.txt").read_text()
