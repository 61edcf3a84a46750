"""The benchmarks run from end to end and report everything. What they measure is not asserted here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).parent.parent
SMALLEST = (
    *("--mebibytes", "1", "--rounds", "1", "--steps", "3"),
    *("--kills", "2", "--held", "1", "--ranks", "10", "--idle", "0.2"),
)
BARS = {
    "engine": ["ms", "%", "KiB", "%", "KiB"],
    "adapters": ["us", "KiB", ""],
    "memory": ["MiB", "MiB", "MiB"],
    "saving": ["", "", "", "", "", "ms", "", "", "x time"],
    "training": ["", "%", "%", ""],
    "loading": ["", "", ""],
}
"""Group -> units of the bars that it reports at the smallest size."""


def run(tmp_path: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What a run prints, and the document that it writes."""
    result = tmp_path / "times.json"
    command = [sys.executable, "-m", "benchmarks", *SMALLEST, "--directory", str(tmp_path), *options]
    done = subprocess.run(
        [*command, "--json", str(result)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(result.read_text())


@pytest.mark.mindspore
@pytest.mark.parametrize("group", BARS)
def test_a_small_run_reports_every_bar_with_a_verdict(tmp_path: Path, group: str) -> None:
    printed, document = run(tmp_path, "--only", group)

    findings = [finding for table in document["tables"].values() for finding in table]
    barred = [finding for finding in findings if finding["bar"] is not None]
    assert [finding["unit"] for finding in barred] == BARS[group]
    for finding in barred:
        bar, value = finding["bar"], finding["value"]
        if not finding["doubt"]:
            met = value >= bar["limit"] if bar["at_least"] else value <= bar["limit"]
            assert finding["verdict"] == ("met" if met else "missed")
        assert finding["verdict"] in printed
    verdicts = [finding["verdict"] for finding in barred]
    last = f"{verdicts.count('met')} bars met, {verdicts.count('missed')} missed"
    assert printed.splitlines()[-1] == last
    assert document["machine"]["cpus"] > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "times.json"], "what was written is removed"


def test_a_report_has_every_bar_and_plots_what_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))
    from benchmarks import report
    from benchmarks.bars import Bar, Finding

    def seconds(value: float) -> dict[str, Any]:
        finding = Finding(what="  swansong", value=value, unit="s", samples=(value, value), key="swansong")
        return finding.document()

    bar = Finding(what="saves / torch.save", value=1.5, bar=Bar(2.0, at_least=True)).document()
    document = {
        "date": "2026-01-01 00:00 UTC",
        "load_at_start": 0.0,
        "load_at_end": 1.0,
        "machine": {"processor": "x", "cpus": 2, "memory_gib": 1.0, "file_system": "ext4", "kernel": "6"},
        "versions": {"python": "3.11"},
        "options": {"only": "None"},
        "tables": {
            "Durable save of 1 MiB in 64 tensors": [seconds(0.01)],
            "Durable save of 100 MiB in 64 tensors": [bar, seconds(0.2)],
            "Durable save of 100 MiB in 10,000 tensors": [seconds(0.4)],
        },
    }
    found, page = tmp_path / "found.json", tmp_path / "page.md"
    found.write_text(json.dumps(document))
    page.write_text(f"# By hand\n\n{report.MARKER}\nold\n")
    monkeypatch.setattr(report, "PAGE", page)
    assert report.main([str(found)]) == 0

    text = page.read_text()
    assert text.startswith("# By hand\n")
    assert "| saves / torch.save | 1.5 | >= 2 | missed |  |" in text
    assert "old" not in text
    for name, points in (("benchmarks-size.svg", 2), ("benchmarks-tensors.svg", 2)):
        picture = ElementTree.parse(tmp_path / name)
        assert len(picture.findall(".//{http://www.w3.org/2000/svg}circle")) == points
