"""A stall that is to end the job, with real processes."""

from __future__ import annotations

import signal
from pathlib import Path

from array_job import QUICK, job, trained, values

STUCK = 75


def test_a_stopped_rank_ends_the_job_once_the_others_have_saved_if_stalls_are_to(tmp_path: Path) -> None:
    options = QUICK | {"stall_action": "stop", "stall_timeout_s": 1.0}
    with job(tmp_path / "c", 3, options=options) as run:
        run.begin()
        run.steps(2)
        run.ranks[1].send(signal.SIGSTOP)

        report = run.incident()
        assert (report["kind"], report["outcome"], report["step"]) == ("stalled", "saved", 2)
        (found,) = run.checkpoints()
        assert values(found.path) == {trained(2)}
        assert [run.ranks[rank].code() for rank in (0, 2)] == [STUCK, STUCK]
        assert run.ranks[1].process.poll() is None, "who is stopped cannot end by itself"
