"""Faults at each place of a PyTorch loop; resumed each time, the job ends with the undisturbed run's bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from array_job import free_port
from torch_job import TorchJob, Zygote, fault, torch_job
from torch_logs import differing, joined, starts, steps_lost

KILL, STUCK = "SIGKILL", 75


def chain(directory: Path, zygote: Zygote, *faults: dict[str, Any], size: int = 3) -> list[TorchJob]:
    """Start a job again and again, each time into the next fault, and once without; on one port."""
    jobs: list[TorchJob] = []
    port = free_port()
    for number, planned in enumerate([*([one] for one in faults), []]):
        given = [one | {"start": number} for one in planned]
        with torch_job(directory, *given, zygote=zygote, size=size, port=port, start=number) as run:
            run.codes()
            jobs.append(run)
            assert len(starts(run.logs())) == 1, "\n".join(run.errors(rank) for rank in range(size))
            if planned:
                run.reports(number + 1)
    assert jobs[-1].codes() == [0] * size
    return jobs


CHAINS = {
    "killed on its way to the collective": [
        (fault(KILL, "forward", 2, 1), 1),
        (fault(KILL, "backward", 4, 2), 3),
        (fault(KILL, "collective", 6, 1), 5),
        (fault(KILL, "data", 9, 2), 8),
    ],
    "killed after it": [
        (fault(KILL, "before update", 2, 1), 2),
        (fault(KILL, "before update", 4, 0), 4),
        (fault(KILL, "update", 6, 1), 6),
        (fault(KILL, "after update", 7, 0), 7),
        (fault(KILL, "evaluation", 9, 1), 8),
    ],
    "throws": [
        (fault("throw", "forward", 2, 1), 1),
        (fault("throw", "update", 4, 0), 4),
        (fault("throw", "after update", 5, 1), 5),
        (fault("throw", "evaluation", 9, 2), 8),
    ],
    "several at once": [
        (fault(KILL, "begin", 3, 0, 2), 2),
        (fault("throw", "before update", 4, 0, 1, 2), 3),
        (fault("throw", "begin", 7, 0, 1, 2), 6),
    ],
}
"""Faults, and the step that is saved."""


@pytest.mark.parametrize("links", CHAINS.values(), ids=CHAINS)
def test_wherever_ranks_fail_no_step_is_lost_and_the_resumed_run_has_the_same_bits(
    tmp_path: Path, zygote: Zygote, undisturbed: Any, links: list[tuple[dict[str, Any], int]]
) -> None:
    jobs = chain(tmp_path, zygote, *(planned for planned, _ in links))
    logs = joined(*(job.logs() for job in jobs))

    assert [start.step for start in starts(logs)] == [0, *(saved for _, saved in links)]
    assert steps_lost(logs) == [0] * len(links)
    assert [start.inexact for start in starts(logs)] == [[]] * len(jobs)
    assert differing(undisturbed(), logs) == []
    assert jobs[-1].steps() == [(saved, "fault") for _, saved in reversed(links)]


def test_a_job_of_one_rank_throws(tmp_path: Path, zygote: Zygote, undisturbed: Any) -> None:
    jobs = chain(tmp_path, zygote, fault("throw", "before update", 6, 0), size=1)
    logs = joined(*(job.logs() for job in jobs))

    assert [start.step for start in starts(logs)] == [0, 5]
    assert differing(undisturbed(1), logs) == []


def test_a_step_of_which_nobody_reached_the_boundary_is_saved_and_said_to_be_inexact(
    tmp_path: Path, zygote: Zygote
) -> None:
    jobs = chain(tmp_path, zygote, fault("throw", "after update", 6, 0), size=1)
    resumed = starts(jobs[-1].logs())[0]

    assert (resumed.step, steps_lost(joined(*(job.logs() for job in jobs)))) == (6, [0])
    assert resumed.inexact == [
        "shared objects: no rank reached the boundary of step 6; they are of step 5",
        "average: it may lack its update of this step; the loop had not come to it",
    ]
    assert "resumed at step 6, not exactly: shared objects" in jobs[-1].errors(0)


def test_of_two_ranks_of_which_one_has_not_averaged_the_step_the_other_is_saved(
    tmp_path: Path, zygote: Zygote, undisturbed: Any
) -> None:
    late = {"awaits": 1}  # or the other might be held at the gate, short of the average likewise
    throws, dies = fault("throw", "after update", 6, 0), fault(KILL, "after update", 8, 0)
    jobs = chain(tmp_path, zygote, throws | late, dies | late, size=2)
    logs = joined(*(job.logs() for job in jobs))

    assert [(start.step, start.inexact) for start in starts(logs)] == [(0, []), (6, []), (8, [])]
    assert differing(undisturbed(2), logs) == []


def test_who_throws_shows_its_own_traceback_first_and_then_where_the_state_is(
    tmp_path: Path, zygote: Zygote
) -> None:
    with torch_job(tmp_path, fault("throw", "before update", 6, 1), zygote=zygote) as run:
        assert run.codes()[1] == 1
        report = run.incident()

    said = run.errors(1)
    raised = said.index('raise ValueError("this batch is no good")')
    shown = said.index("ValueError: this batch is no good", raised + 40)
    noted = said.index(f"swansong: the state of step 6 is in {run.directory / 'model-6'}", shown)
    assert said.index("swansong incident", noted)
    assert "Traceback" not in said[noted:]
    assert report["first_fault"]["what"] == "ValueError: this batch is no good"
    assert (report["kind"], report["step"], report["inexact"]) == ("raised", 6, [])


def test_the_controller_outlives_a_killed_rank_0(tmp_path: Path, zygote: Zygote) -> None:
    with torch_job(tmp_path, fault(KILL, "forward", 6, 0), zygote=zygote) as run:
        codes = run.codes()
        report = run.incident()

    assert codes[0] == -signal.SIGKILL
    assert set(codes[1:]) <= {1, STUCK}
    assert (report["ranks"][0]["main"][:14], report["step"]) == ("did not report", 5)
    assert len(run.controllers()) == 1
