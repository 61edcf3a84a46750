"""Ranks that hold different components: saved at one step by each, and resumed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from array_job import free_port
from swansong.store import catalog

TESTS = Path(__file__).parent.parent


def jobs(directory, *plans):
    """One job after another: (exit code, what it said) of each rank of each."""
    lines = [json.dumps({"run": run, "port": free_port(), "fails": fails}) for run, fails in plans]
    answer = subprocess.run(
        [sys.executable, str(TESTS / "torch_stages.py"), str(directory)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_stages_of_a_model_are_saved_at_one_step_and_resume_bit_equal(tmp_path):
    undisturbed, failed, resumed = jobs(tmp_path, ("whole", None), ("parted", [1, 6]), ("parted", None))
    assert [code for code, _ in undisturbed] == [0, 0], undisturbed
    assert "ValueError: no good\nswansong: the state of step 5 is in" in failed[1][1]
    assert "TrainingInterrupted" in failed[0][1]
    (found,) = catalog.scan(tmp_path / "parted")
    assert (found.manifest.step, found.manifest.inexact) == (5, [])
    for (code, (begun, *ours)), (_, (_, *theirs)) in zip(resumed, undisturbed, strict=True):
        assert (code, begun) == (0, 5)
        assert ours == theirs
