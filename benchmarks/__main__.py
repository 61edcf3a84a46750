"""Measure saving against the disk's limit and what people use today, and the rest against its bars.

    python -m benchmarks [--quick] [--only saving|engine|adapters] [--json FILE] ...

Saving: every candidate writes the same tensors and is durable (fsync of file and directory) when its clock
stops. Candidates take turns; the median of all rounds counts. The raw limit is the best of {1, 2, 4} threads
x {4, 16} MiB pieces of O_DIRECT writes of the same number of bytes.

Engine: see `engine_freeze` and `engine_idle`. Adapters: see `adapter_step` and `adapter_fault`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import adapter_fault, adapter_step, bars, engine_freeze, engine_idle
from benchmarks.candidates import Candidate, candidates, raw_limit
from rich.console import Console
from rich.table import Table


def main() -> int:
    """Run what was chosen, print its tables, write every raw value."""
    arguments = parse()
    document: dict[str, Any] = {
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
    }
    if arguments.only in ("engine", None):  # first: it is small, and disks are quiet
        document |= measure_engine(arguments)
    if arguments.only in ("adapters", None):
        document |= measure_adapters(arguments)
    if arguments.only in ("saving", None):
        document |= measure_saving(arguments)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def measure_engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's bars: print the tables, return what goes into the document."""
    return {
        "engine": shown(
            {
                engine_freeze.TITLE: engine_freeze.findings(arguments.kills, arguments.held, progress),
                engine_idle.TITLE: engine_idle.findings(arguments.ranks, arguments.idle, progress),
            }
        )
    }


def measure_adapters(arguments: argparse.Namespace) -> dict[str, Any]:
    """The adapters' bars: print the tables, return what goes into the document."""
    size, place = arguments.mebibytes, arguments.directory
    return {
        "adapters": shown(
            {
                adapter_step.TITLE: adapter_step.findings(arguments.steps, size, progress),
                adapter_fault.TITLE: adapter_fault.findings(size, arguments.rounds, progress, place),
            }
        )
    }


def shown(found: dict[str, list[bars.Finding]]) -> dict[str, list[dict[str, Any]]]:
    """Print tables of findings; return what goes into the document."""
    progress()
    for title, findings in found.items():
        Console().print(bars.table(title, findings))
    return {title: [finding.document() for finding in findings] for title, findings in found.items()}


def measure_saving(arguments: argparse.Namespace) -> dict[str, Any]:
    """Saving: print the table, return what goes into the document."""
    size = arguments.mebibytes << 20
    tensors = make_tensors(size)
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=arguments.directory) as folder:
        place = Path(folder)
        limits = raw_limit(size)
        entries = candidates(tensors)
        times = alternate([*limits, *entries], place, arguments.rounds)
    best = min((c.name for c in limits), key=lambda name: statistics.median(times[name]))
    show(size, best, [*entries], times)
    return {"bytes": size, "rounds": arguments.rounds, "raw_limit": best, "seconds": times}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__.splitlines()[0] if __doc__ else None
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="64 MiB, 3 rounds, 20 kills, 5 s idle: under two minutes")
    add("--only", choices=("saving", "engine", "adapters"), help="nothing else")
    add("--mebibytes", type=int, default=1024, help="size of the state (default: 1024)")
    add("--rounds", type=int, default=5, help="rounds per candidate (default: 5)")
    add("--kills", type=int, default=200, help="ranks that are killed (default: 200)")
    add("--held", type=int, default=1024, help="MiB that some of them hold (default: 1024)")
    add("--ranks", type=int, default=2000, help="registered ranks of an idle job (default: 2000)")
    add("--idle", type=float, default=20.0, help="seconds that it is watched (default: 20)")
    add("--steps", type=int, default=500, help="steps in a turn of the loop (default: 500)")
    add("--directory", type=Path, help="where saving writes (default: the temporary directory)")
    add("--json", type=Path, default=Path("benchmarks/results/latest.json"), help="raw values go here")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mebibytes, arguments.rounds = 64, 3
        arguments.kills, arguments.held, arguments.idle, arguments.steps = 20, 256, 5.0, 100
    return arguments


def make_tensors(size: int) -> dict[str, np.ndarray]:
    """`size` bytes in 64 float32 tensors, random so that nothing can compress them."""
    random = np.random.default_rng(0)
    return {f"layer{i:02d}.weight": random.random((size // 64 // 4096, 1024), np.float32) for i in range(64)}


def alternate(entries: list[Candidate], place: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, taking turns, each into an empty directory."""
    times: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for number in range(rounds):
        for entry in entries:
            target = place / "run"
            target.mkdir()
            times[entry.name].append(timed(lambda e=entry, t=target: e.save(t)))
            shutil.rmtree(target)
            progress(f"round {number + 1} of {rounds}: {entry.name}")
    progress()
    return times


def progress(text: str | None = None) -> None:
    """Tell a terminal what is being measured; nothing any more."""
    if sys.stderr.isatty():
        print("" if text is None else f"\r{text:60.60}", end="\n" if text is None else "", file=sys.stderr)


def timed(action: Callable[[], None]) -> float:
    """Seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def show(size: int, best: str, entries: list[Candidate], times: dict[str, list[float]]) -> None:
    """Print the table."""
    limit = statistics.median(times[best])
    table = Table(title=f"Durable save of {size / 2**30:g} GiB in 64 tensors, median of {len(times[best])}")
    for heading in ("what", "seconds", "GB/s", "of the raw limit"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    table.add_row(f"raw O_DIRECT ({best})", f"{limit:.3f}", f"{size / limit / 1e9:.2f}", "1.00")
    for entry in entries:
        seconds = statistics.median(times[entry.name])
        table.add_row(entry.name, f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}", f"{limit / seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
