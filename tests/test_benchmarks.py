"""The benchmarks run from end to end and report everything. What they measure is not asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent


def run(tmp_path: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What a run prints, and the document that it writes."""
    result = tmp_path / "times.json"
    command = [sys.executable, "-m", "benchmarks", *options, "--json", str(result)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(result.read_text())


@pytest.mark.mindspore
def test_a_small_run_reports_every_way_to_save(tmp_path: Path) -> None:
    sizes = ["--mebibytes", "2", "--rounds", "1", "--directory", str(tmp_path)]
    printed, document = run(tmp_path, "--only", "saving", *sizes)

    times = document["seconds"]
    assert all(seconds[0] > 0 for seconds in times.values())
    for name in (
        "swansong, native directory",
        "swansong, .ckpt",
        "torch.save + fsync",
        "safetensors + fsync",
    ):
        assert name in times
        assert name in printed


def test_a_small_run_reports_every_bar_of_the_engine(tmp_path: Path) -> None:
    sizes = ["--kills", "2", "--held", "1", "--ranks", "10", "--idle", "0.2"]
    printed, document = run(tmp_path, "--only", "engine", *sizes)

    findings = [finding for table in document["engine"].values() for finding in table]
    barred = [finding for finding in findings if finding["bar"] is not None]
    assert [finding["unit"] for finding in barred] == ["ms", "%", "KiB", "%", "KiB"]
    for finding in barred:
        met = finding["value"] <= finding["bar"]["limit"]
        assert finding["verdict"] == ("met" if met else "missed")
        assert finding["verdict"] in printed
    kills = barred[0]["samples"]
    assert len(kills) == 2
    assert barred[0]["value"] == max(kills), "the 99th percentile of so few"
    assert min(kills) > 0


def test_a_small_run_reports_every_bar_of_the_adapters(tmp_path: Path) -> None:
    sizes = ["--mebibytes", "1", "--rounds", "1", "--steps", "3", "--directory", str(tmp_path)]
    printed, document = run(tmp_path, "--only", "adapters", *sizes)

    findings = [finding for table in document["adapters"].values() for finding in table]
    barred = [finding for finding in findings if finding["bar"] is not None]
    assert [finding["unit"] for finding in barred] == ["us", "KiB", ""]
    assert all(finding["verdict"] in printed for finding in barred)
    assert barred[1]["value"] > 0
    assert barred[2]["value"] > 0
