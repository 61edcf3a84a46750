"""PyTorch jobs under torchrun, which ends what a fault leaves and starts the job again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from swansong.protocol.operator import PersistEnded, PersistRequest
from torch_job import fault, torch_job
from torch_logs import differing, starts, steps_lost

pytestmark = pytest.mark.timeout(300)  # seconds of imports for each rank and start, more on a busy machine


def test_a_job_killed_twice_is_started_again_and_loses_no_step(tmp_path: Path, undisturbed: Any) -> None:
    faults = [fault("SIGKILL", "before update", 5, 1), fault("SIGKILL", "forward", 10, 0, start=1)]
    with torch_job(tmp_path, *faults, restarts=2) as run:
        assert run.codes() == [0], run.errors()
        reports = run.reports(2)

    assert [report["ranks"][victim]["main"][:14] for report, victim in zip(reports, (1, 0), strict=True)] == [
        "did not report"
    ] * 2
    assert [start.step for start in starts(run.logs())] == [0, 5, 9]
    assert steps_lost(run.logs()) == [0, 0]
    assert differing(undisturbed(), run.logs()) == []
    assert run.steps() == [(9, "fault"), (5, "fault")]
    assert len(run.controllers()) == 3, "one for each start, on one port"


def test_the_user_sees_the_exception_first_and_no_wall_of_others(tmp_path: Path) -> None:
    with torch_job(tmp_path, fault("throw", "before update", 6, 1)) as run:
        assert run.codes() == [1]
        assert run.incident()["step"] == 6

    said = run.errors()
    first = re.search(r"^(?:\[rank\d\]: )?(\w*Error\b.*)$", said, re.MULTILINE)
    assert first is not None
    assert first[1] == "ValueError: this batch is no good"
    assert "swansong: the state of step 6 is in" in said[first.end() :]


def test_a_job_that_an_operator_has_saved_and_stopped_is_not_started_again(tmp_path: Path) -> None:
    with torch_job(tmp_path, fault("wait", "begin", 6, 1), restarts=1) as run:
        run.waits(1)
        answer = run.ask(PersistRequest(who="a test"))
        run.go()
        assert run.codes() == [0], run.errors()

    assert isinstance(answer, PersistEnded)
    assert (answer.ending.step, answer.ending.path) == (5, str(run.directory / "model-5"))
    assert run.steps() == [(5, "requested")]
    assert len(starts(run.logs())) == 1
