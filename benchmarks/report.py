"""Put a run's tables and plots into the documentation.

    python -m benchmarks.report benchmarks/results/latest.json

Replaces what follows the marker in docs/benchmarks.md, and the plots beside it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import mindspore_savers, ours, peers, plots, saving
from benchmarks.bars import Bar

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MARKER = "<!-- What follows was written by `python -m benchmarks.report`. -->"
_TITLE = re.compile(r"Durable save of ([\d.e+]+) MiB in ([\d,]+) tensors?")
_CKPT = re.compile(r"Durable save of a .ckpt of ([\d.e+]+) MiB")
_LIMIT = "raw O_DIRECT, the best"
_SHOWN = (
    ours.NATIVE,
    ours.SEALED,
    peers.TORCH,
    peers.SAFETENSORS,
    peers.DISTRIBUTED.format(1, ""),
    peers.DISTRIBUTED.format(2, "s"),
    mindspore_savers.THEIRS.format("plain"),
    _LIMIT,
    mindspore_savers.THEIRS.format("AES-GCM"),
)
Rows = list[dict[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Write page and plots."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    document = json.loads(Path(arguments[0]).read_text())
    kept = PAGE.read_text().partition(MARKER)[0]
    by_size, by_count = plotted(document["tables"])
    pictures = {
        name: plots.plot(title, across, "seconds", lines)
        for name, title, across, lines in (
            ("benchmarks-size.svg", "Durable save in 64 tensors: time against size", "MiB", by_size),
            (
                *("benchmarks-tensors.svg", "Durable save of 100 MiB: time against number of tensors"),
                *("tensors", by_count),
            ),
        )
        if lines
    }
    for name, picture in pictures.items():
        (PAGE.parent / name).write_text(picture)
    PAGE.write_text("\n".join([kept + MARKER, "", *page(document, list(pictures))]) + "\n")
    return 0


def page(document: dict[str, Any], pictures: Sequence[str]) -> Iterator[str]:
    """The lines of the generated part."""
    machine, versions = document["machine"], document["versions"]
    rows = [row for table in document["tables"].values() for row in table if row["bar"] is not None]
    verdicts = [row["verdict"] for row in rows]
    only = document["options"]["only"]
    yield "## The last full run" if only == "None" else f"## The last run, of {only} only"
    yield ""
    yield (
        f"{document['date']}, {machine['processor']}, {machine['cpus']} processors, "
        f"{machine['memory_gib']:g} GiB, {machine['file_system']}, Linux {machine['kernel']}. "
        f"Load average {document['load_at_start']:.1f} when it began, {document['load_at_end']:.1f} when it "
        "ended, itself included. "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + "."
    )
    yield ""
    yield f"**{verdicts.count('met')} bars met, {verdicts.count('missed')} missed.**"
    yield ""
    yield from markdown(rows)
    for name in pictures:
        yield ""
        yield f"![{name.removesuffix('.svg')}]({name})"
    yield ""
    yield "## All that was measured"
    for title, table in document["tables"].items():
        yield ""
        yield f"### {title}"
        yield ""
        yield from markdown(table)


def markdown(rows: Rows) -> Iterator[str]:
    """A table."""
    yield "| what | measured | bar | verdict | samples |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        value, samples = row["value"], row["samples"]
        measured = "" if value is None else f"{value:.3g} {row['unit']}".strip()
        bar = "" if row["bar"] is None else str(Bar(**row["bar"]))
        spread = f"{len(samples)}, {min(samples):.3g} to {max(samples):.3g}" if len(samples) > 1 else ""
        yield f"| {row['what'].strip()} | {measured} | {bar} | {row['verdict']} | {spread} |"


def plotted(tables: dict[str, Rows]) -> tuple[dict[str, plots.Line], dict[str, plots.Line]]:
    """Lines of seconds against MiB, and against the number of tensors."""
    by_size: dict[str, list[tuple[float, float]]] = {name: [] for name in _SHOWN}
    by_count: dict[str, list[tuple[float, float]]] = {name: [] for name in _SHOWN}
    for title, rows in tables.items():
        found, ckpt = _TITLE.match(title), _CKPT.match(title)
        size, count = (float(found[1]), int(found[2].replace(",", ""))) if found else (0.0, 64)
        if ckpt:
            size = float(ckpt[1])
        for name, seconds in _medians(rows).items():
            if name in by_size and (found or ckpt) and count == 64:
                by_size[name].append((size, seconds))
            if name in by_count and found and size == saving.Plan.counted:
                by_count[name].append((count, seconds))
    return _drawable(by_size), _drawable(by_count)


def _drawable(lines: dict[str, list[tuple[float, float]]]) -> dict[str, plots.Line]:
    return {name: line for name, line in lines.items() if line}


def _medians(rows: Rows) -> dict[str, float]:
    """Seconds by candidate; the raw writes count as one, the best."""
    medians = {row["key"]: statistics.median(row["samples"]) for row in rows if row["key"]}
    raw = [seconds for name, seconds in medians.items() if name.startswith("raw O_DIRECT")]
    return medians | ({_LIMIT: min(raw)} if raw else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
