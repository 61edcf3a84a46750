"""Ranks that hold different components: saved at one step by each, and resumed there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from array_job import free_port
from swansong.store import catalog

TESTS = Path(__file__).parent.parent


def jobs(directory, *plans, size=2):
    """One job after another: (exit code, what it said) of each rank of each."""
    given = [{"run": run, "port": free_port(), "size": size, "fails": fails} for run, fails in plans]
    lines = map(json.dumps, given)
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
    undisturbed, failed, resumed = jobs(
        tmp_path, ("whole", None), ("parted", [1, 6, "loop"]), ("parted", None)
    )
    assert [code for code, _ in undisturbed] == [0, 0], undisturbed
    assert "ValueError: no good\nswansong: the state of step 5 is in" in failed[1][1]
    assert "TrainingInterrupted" in failed[0][1]
    assert resumed_from(tmp_path / "parted", resumed, undisturbed) == 5


def test_a_rank_that_is_killed_within_the_vote_parts_nobody_from_the_others(tmp_path):
    places = {"before its voice": {3}, "after its voice": {3, 4}, "after the outcome": {4}}
    plans = [plan for place in places for plan in ((place, [1, 4, place]), (place, None))]
    undisturbed, *ended = jobs(tmp_path, ("whole", None), *plans, size=4)
    assert [code for code, _ in undisturbed] == [0] * 4, undisturbed
    for (place, steps), killed, resumed in zip(places.items(), ended[::2], ended[1::2], strict=True):
        assert killed[1] == [-signal.SIGKILL, None]
        assert resumed_from(tmp_path / place, resumed, undisturbed) in steps


def resumed_from(directory, resumed, undisturbed):
    """From the only checkpoint, exactly; its step."""
    (found,) = catalog.scan(directory)
    step = found.manifest.step
    assert found.manifest.inexact == []
    for (code, (begun, *ours)), (_, (_, *theirs)) in zip(resumed, undisturbed, strict=True):
        assert (code, begun) == (0, step)
        assert ours == theirs
    return step
