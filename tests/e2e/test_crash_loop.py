"""Scenario 39 of real processes: a job that fails at one step again and again is not resumed for ever."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from array_job import QUICK, Job, job, trained, until


def throw(run: Job) -> None:
    run.tell("throw", 1)
    assert run.ranks[1].code() == 1


def kill(run: Job) -> None:
    run.ranks[1].send(signal.SIGKILL)


def limited(limit: int) -> dict[str, Any]:
    return QUICK | {"crash_loop_limit": limit}


def fail(directory: Path, fault: Any, *, steps: int, failures: int, **given: Any) -> None:
    """One start of the job, until it has failed and the report is written."""
    with job(directory, 2, **given) as run:
        run.begin()
        run.steps(steps)
        fault(run)
        until(lambda: run.incidents() == failures)


def assert_refused(directory: Path, *said: str, **given: Any) -> None:
    """Every rank of one more start ends with the error."""
    reports = [path.name for path in (directory / ".swansong" / "incidents").iterdir()]
    with job(directory, 2, **given) as refused:
        assert refused.codes() == [1, 1]
        for rank in refused.ranks:
            for text in ("CrashLoopError: not resumed", *said, *reports):
                assert text in rank.errors()
        assert refused.controllers() == []


def test_scenario_39_the_same_exception_at_one_step_three_times_in_a_row_stops_every_rank(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "c"
    fail(directory, throw, steps=2, failures=1)
    fail(directory, throw, steps=0, failures=2)
    fail(directory, throw, steps=0, failures=3)
    assert_refused(directory, "3 times in a row after step 2", "ValueError: this batch is no good")

    with job(directory, 2, options=limited(0)) as mended:
        assert mended.begin() == [[2, trained(2), {"seen": 2}]] * 2
        mended.steps(1)
        throw(mended)
        until(lambda: mended.incidents() == 4)
    with job(directory, 2) as further:
        assert further.begin() == [[3, trained(3), {"seen": 3}]] * 2, "step 2 was left behind"
        further.tell("end")
        assert further.codes() == [0, 0]


def test_scenario_39_so_does_a_process_that_is_lost_at_one_step_again(tmp_path: Path) -> None:
    fail(tmp_path / "c", kill, steps=2, failures=1)
    fail(tmp_path / "c", kill, steps=0, failures=2, options=limited(2))
    said = ("2 times in a row after step 2", "a rank's process was lost")
    assert_refused(tmp_path / "c", *said, options=limited(2))


def test_scenario_39_progress_between_the_failures_is_no_crash_loop(tmp_path: Path) -> None:
    for failures in (1, 2):
        fail(tmp_path / "c", throw, steps=1, failures=failures)
    with job(tmp_path / "c", 2, options=limited(2)) as run:
        assert run.begin() == [[2, trained(2), {"seen": 2}]] * 2
        run.tell("end")
        assert run.codes() == [0, 0]
