"""Faults of real processes that train plain arrays: who fails, and what is on disk afterwards."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from array_job import QUICK, Job, job, running, trained, until, values
from swansong.protocol.operator import PersistEnded, PersistRequest

STUCK = 75


def assert_saved(run: Job, step: int, kind: str = "fault") -> None:
    """One checkpoint, of that step, whole, and nothing half-made."""
    run.incident()  # the last that is written
    (found,) = run.checkpoints()
    assert found.manifest is not None
    assert (found.state, found.manifest.step, found.manifest.kind) == ("committed", step, kind)
    assert values(found.path) == {trained(step)}
    until(lambda: not list((run.directory / ".swansong" / "tmp").iterdir()))


def test_after_a_kill_the_others_save_the_newest_step_and_the_job_resumes_from_it(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4) as run:
        run.begin()
        run.steps(3)
        run.ranks[1].send(signal.SIGKILL)

        report = run.incident()
        assert (report["kind"], report["first_fault"]["rank"], report["step"]) == ("lost", 1, 3)
        assert_saved(run, 3)
        run.tell("step", 0)
        assert run.codes() == [1, -signal.SIGKILL, STUCK, STUCK]
        assert "TrainingInterrupted" in run.ranks[0].errors()

    with job(tmp_path / "c", 4) as again:
        assert again.begin() == [[3, trained(3), {"seen": 3}]] * 4
        again.steps(1)
        again.tell("end")
        assert again.codes() == [0] * 4


def test_the_controller_outlives_rank_0(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4) as run:
        run.begin()
        run.steps(2)
        run.ranks[0].send(signal.SIGKILL)

        assert run.incident()["first_fault"]["rank"] == 0
        assert_saved(run, 2)
        assert len(run.controllers()) == 1
        assert run.codes() == [-signal.SIGKILL, STUCK, STUCK, STUCK]


def test_a_stopped_rank_is_a_stall_that_is_saved_and_training_goes_on_after_it(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4, options=QUICK | {"stall_timeout_s": 1.0}) as run:
        run.begin()
        run.steps(3)
        run.ranks[1].send(signal.SIGSTOP)

        report = run.incident()
        assert (report["kind"], report["outcome"], report["step"]) == ("stalled", "saved", 3)
        silent = [rank["rank"] for rank in report["ranks"] if rank["main"].startswith("did not report")]
        assert silent == [1]
        assert_saved(run, 3)
        run.ranks[1].send(signal.SIGCONT)
        run.steps(3)
        run.tell("end")
        assert run.codes() == [0] * 4
        assert run.incidents() == 1


def test_two_of_four_are_killed_at_the_same_moment(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4) as run:
        run.begin()
        run.steps(2)
        for rank in (0, 3):
            run.ranks[rank].send(signal.SIGKILL)

        assert run.incident()["outcome"] == "saved"
        assert_saved(run, 2)
        assert run.codes() == [-signal.SIGKILL, STUCK, STUCK, -signal.SIGKILL]


@pytest.mark.parametrize(("size", "thrower"), [(1, 0), (3, 1)], ids=["alone", "one of three"])
def test_who_throws_gets_its_own_traceback_with_where_the_state_is(
    tmp_path: Path, size: int, thrower: int
) -> None:
    with job(tmp_path / "c", size) as run:
        run.begin()
        run.steps(2)
        run.tell("throw", thrower)

        assert run.ranks[thrower].code() == 1
        errors = run.ranks[thrower].errors()
        assert 'raise ValueError("this batch is no good")' in errors
        assert f"swansong: the state of step 2 is in {tmp_path / 'c' / 'model-2'}" in errors
        assert run.incident()["first_fault"]["what"] == "ValueError: this batch is no good"
        assert_saved(run, 2)


def test_who_throws_in_the_middle_of_an_update_is_made_up_for(tmp_path: Path) -> None:
    with job(tmp_path / "c", 3) as run:
        run.begin()
        run.steps(2)
        run.tell("half", 0)
        run.ranks[0].hear("inside")
        run.ranks[1].send(signal.SIGKILL)

        report = run.incident()
        assert (report["outcome"], list(report["savers"].values())) == ("saved", [2])
        assert_saved(run, 2)


def test_sigterm_is_saved_and_ends_the_process_as_it_would_have(tmp_path: Path) -> None:
    with job(tmp_path / "c", 3) as run:
        run.begin()
        run.steps(2)
        run.ranks[1].send(signal.SIGTERM)

        assert run.incident()["kind"] == "signalled"
        assert_saved(run, 2, "preemption")
        assert run.codes() == [STUCK, -signal.SIGTERM, STUCK]


def test_sigterm_to_every_rank_is_saved_once(tmp_path: Path) -> None:
    with job(tmp_path / "c", 3) as run:
        run.begin()
        run.steps(2)
        for rank in run.ranks:
            rank.send(signal.SIGTERM)

        assert run.codes() == [-signal.SIGTERM] * 3
        assert_saved(run, 2, "preemption")


def test_when_every_rank_throws_one_of_them_saves(tmp_path: Path) -> None:
    with job(tmp_path / "c", 3) as run:
        run.begin()
        run.steps(2)
        run.tell("throw")

        assert run.codes() == [1] * 3
        assert_saved(run, 2)
        assert all("swansong: the state of step 2 is in" in rank.errors() for rank in run.ranks)


def test_a_job_that_is_started_again_at_once_gets_the_port_and_the_checkpoint(tmp_path: Path) -> None:
    options = QUICK | {"exit_grace_s": 3.0}
    with job(tmp_path / "c", 2, options=options) as run:
        run.begin()
        run.steps(2)
        run.ranks[1].send(signal.SIGKILL)
        run.incident()
        with job(tmp_path / "c", 2, port=run.port) as again:
            assert again.begin() == [[2, trained(2), {"seen": 2}]] * 2
            again.steps(1)
            again.ranks[0].send(signal.SIGKILL)
            until(lambda: run.incidents() == 2)
            assert [found.name for found in again.checkpoints()] == ["model-3", "model-2"]


def test_an_operator_has_the_job_saved_and_stopped(tmp_path: Path) -> None:
    with job(tmp_path / "c", 3) as run:
        run.begin()
        run.steps(2)
        answer = run.ask(PersistRequest(who="a test"))

        assert isinstance(answer, PersistEnded)
        assert (answer.ending.step, answer.ending.path) == (2, str(tmp_path / "c" / "model-2"))
        assert_saved(run, 2, "requested")
        run.tell("step", 0, 1)
        assert run.codes() == [0, 0, 0], "no launcher is to start it again"


def test_the_loop_itself_has_the_job_saved_and_stopped(tmp_path: Path) -> None:
    with job(tmp_path / "c", 2) as run:
        run.begin()
        run.steps(2)
        run.tell("persist", 1)

        assert run.codes() == [0, 0]
        assert_saved(run, 2, "requested")


def group(rank: int) -> dict[str, Any]:
    return {"replicas": "XY"[rank % 2]}


def test_of_two_groups_one_saver_each_makes_one_checkpoint(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4, per_rank=group) as run:
        run.begin()
        run.steps(2)
        assert sorted(run.recorders()) == [f"rank-{rank}" for rank in range(4)]
        run.ranks[1].send(signal.SIGKILL)

        report = run.incident()
        assert sorted(report["savers"].values()) == [0, 3]
        (found,) = run.checkpoints()
        assert values(found.path, "X/weights") == values(found.path, "Y/weights") == {trained(2)}
        assert found.manifest is not None
        assert (set(found.manifest.rank_objects), found.manifest.inexact) == ({"0", "1", "2", "3"}, [])
        (dead,) = [entry for entry in report["ranks"] if entry["rank"] == 1]
        assert (dead["step"], dead["boundary"]) == (2, 2)
        assert run.codes() == [STUCK, -signal.SIGKILL, STUCK, STUCK]
        until(lambda: not running(run.controllers()[0]))
        assert run.recorders() == []

    with job(tmp_path / "c", 4, per_rank=group) as again:
        assert again.begin() == [[2, trained(2), {"seen": 2}]] * 4
        again.tell("end")
        assert again.codes() == [0] * 4


def test_the_only_holder_is_killed_which_a_warning_had_said(tmp_path: Path) -> None:
    with job(tmp_path / "c", 2, replicas=None) as run:
        run.begin()
        run.steps(2)
        run.ranks[1].send(signal.SIGKILL)

        report = run.incident()
        assert (report["outcome"], report["path"]) == ("nothing saved", None)
        assert "rank 1" in report["reason"]
        assert run.checkpoints() == []
        assert "rank 1 is the only holder of its arrays" in run.ranks[1].errors()
        assert run.codes() == [STUCK, -signal.SIGKILL]


def test_a_saver_that_is_killed_while_saving_is_replaced(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4, per_rank=lambda rank: {"hold_saves": rank == 0}) as run:
        run.begin()
        run.steps(2)
        run.ranks[1].send(signal.SIGKILL)
        run.ranks[0].hear("saving")
        run.ranks[0].send(signal.SIGKILL)

        report = run.incident()
        assert (report["outcome"], list(report["savers"].values())) == ("saved", [2])
        assert_saved(run, 2)


def test_a_killed_controller_is_started_again_and_a_rank_that_dies_meanwhile_is_made_up_for(
    tmp_path: Path,
) -> None:
    with job(tmp_path / "c", 4) as run:
        run.begin()
        run.steps(2)
        first = kill_controller(run)
        run.ranks[1].send(signal.SIGKILL)

        assert run.incident()["outcome"] == "saved"
        assert_saved(run, 2)
        assert first not in run.controllers()[1:]


def test_a_successor_of_the_controller_does_not_commit_half_a_model(tmp_path: Path) -> None:
    with job(tmp_path / "c", 4, per_rank=group) as run:
        run.begin()
        run.steps(2)
        kill_controller(run)
        for rank in (1, 3):
            run.ranks[rank].send(signal.SIGKILL)

        report = run.incident()
        assert report["outcome"] == "nothing saved"
        assert "ranks 1, 3" in report["reason"]
        assert run.checkpoints() == []


def kill_controller(run: Job) -> int:
    (pid,) = run.controllers()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not running(pid))
    return pid


def test_a_job_that_ends_well_leaves_its_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    options = QUICK | {"exit_grace_s": 5.0}
    with job(tmp_path / "c", 2, save_steps=2, options=options) as run:
        run.begin()
        run.steps(5)
        run.tell("end")

        assert [rank.hear("left") for rank in run.ranks] == [[1], [1]], "no thread is left"
        assert run.codes() == [0, 0]
        steps = [found.manifest.step for found in run.checkpoints() if found.manifest is not None]
        assert steps == [5, 4, 2]
        assert not running(run.controllers()[0])
        control = {path.name for path in (tmp_path / "c" / ".swansong").iterdir()}
        assert control == {"controller.log", "model.lock", "tmp"}
        assert list((tmp_path / "c" / ".swansong" / "tmp").iterdir()) == []
        assert run.recorders() == []
