"""Situations by name, in the simulation: what else breaks meanwhile. See docs/scenarios.md."""

from __future__ import annotations

import pytest

from simulation.sim_plan import Fault, Kind
from simulation.sim_played import GROUPS, at, last, played, report, saved, undisturbed, writers
from swansong.protocol.messages import FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions

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


@pytest.mark.parametrize("often", [1, 3], ids=["once", "three times"])
@pytest.mark.parametrize("when", ["freezing", "saving", "part", "committing", "committed"])
def test_controller_killed_at_any_point_saves_once(when: str, often: int) -> None:  # 26
    kills = [Fault(Kind.KILL_CONTROLLER, (), when, nth=nth) for nth in range(1, often + 1)]
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), *kills)
    assert saved(world) == [2]
    assert len(world.controllers) == 1 + often
    assert all(rank.released[-1].outcome is Outcome.SAVED for rank in world.ranks if rank.number != 1)


@pytest.mark.parametrize("when", ["saving", "part"])
def test_controller_killed_with_the_only_saver_leaves_nothing(when: str) -> None:  # 26
    world = played(
        Fault(Kind.THROW, (1,), at(1, 2), 0.03),
        Fault(Kind.KILL_BOTH, (3,), when, 0.1),
        layout=(("X",), ("X",), ("X",), ("Z",)),
    )
    assert saved(world) == []
    assert "'Z'" in last(world).reason
    assert "rank 3 lost or silent" in last(world).reason


@pytest.mark.parametrize("lasts", [0.0, 12.0, 60.0], ids=["at once", "soon", "late"])
@pytest.mark.parametrize("greetings", [True, False], ids=["told by a greeting", "known to ranks only"])
def test_two_controllers_at_once_save_one_state_and_no_rank_goes_back_to_the_older(
    lasts: float, greetings: bool
) -> None:  # 26
    for seed in range(20):  # that no rank obeys the older again is an invariant of every run
        world = played(
            Fault(Kind.THROW, (3,), at(1, 2), 0.03),
            Fault(Kind.DISPLACE, (0, 1), "saving", 0.2, lasts=lasts),
            greetings=greetings,
            seed=seed,
        )
        assert saved(world) == [2]


def test_slow_save_that_progresses_is_not_given_up() -> None:  # 27
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), save_s=400.0)
    assert saved(world) == [2]
    assert world.store.checkpoints[0].at > 300.0


def test_slow_save_ends_with_the_budget() -> None:  # 27
    world = played(Fault(Kind.KILL, (1,), at(1, 2), 0.03), save_s=400.0, options=ProtocolOptions.within(25.0))
    assert saved(world) == []
    assert report(world).reason.startswith("no time left")


def test_parts_that_are_done_are_used_though_another_takes_long_and_its_saver_changes() -> None:  # 27
    world = played(
        Fault(Kind.THROW, (0,), at(1, 2), 0.03),
        Fault(Kind.STOP, (1,), "saving", 5.0),
        layout=(("X",), ("Y",), ("Y",), ("Y",)),
        save_s=40.0,
        peer_death="hang",
    )
    assert saved(world) == [2]
    assert writers(world) == {"X": 0, "Y": 2}
    assert report(world).notes == ("rank 1, attempt 1: no progress for 30 s",)


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
    alone = played()
    assert [rank.main.changes for rank in world.ranks] == [rank.main.changes for rank in alone.ranks]


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
