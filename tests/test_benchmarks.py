"""The benchmark runs from end to end and reports every candidate. What it measures is not asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.mark.mindspore
def test_a_small_run_reports_every_candidate(tmp_path: Path) -> None:
    result = tmp_path / "times.json"
    command = [sys.executable, "-m", "benchmarks", "--mebibytes", "2", "--rounds", "1"]
    options = ["--directory", str(tmp_path), "--json", str(result)]
    run = subprocess.run(
        [*command, *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )

    assert run.returncode == 0, run.stderr
    times = json.loads(result.read_text())["seconds"]
    assert all(seconds[0] > 0 for seconds in times.values())
    for name in (
        "swansong, native directory",
        "swansong, .ckpt",
        "torch.save + fsync",
        "safetensors + fsync",
    ):
        assert name in times
        assert name in run.stdout
