"""The examples of faults do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_kill_arrays_ends_with_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "kill_arrays.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resumed after step 25" in result.stdout
    assert "bit for bit" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_demo_loses_no_step_though_a_saver_dies_too(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "kill_demo.py"), "--kill", "saver", "--seed", "7"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Verdict: 0 steps lost; the final state is equal, bit for bit." in result.stdout
    assert "SIGKILL: rank" in result.stdout
    for part in ("detect", "freeze", "choose", "save", "commit"):
        assert f"    {part}" in result.stdout


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.timeout(400)
def test_kill_demo_of_mindspore_loses_no_step_by_a_kill_of_rank_0(tmp_path: Path) -> None:
    options = ["--framework", "mindspore", "--ranks", "2", "--seed", "1"]
    command = [sys.executable, str(EXAMPLES / "kill_demo.py"), *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Verdict: 0 steps lost; the final state is equal, bit for bit." in result.stdout
    assert "lost, rank 0: its process ended" in result.stdout
    assert "the job was started, again after step" in result.stdout


def test_kill_demo_says_what_it_cannot_do(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "kill_demo.py"), "--kill", "controller", "--signal", "STOP"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "outside of what is promised" in result.stderr
