"""Measure durable saving against the disk's limit and against what people use today.

    python -m benchmarks [--quick] [--mebibytes N] [--rounds N] [--json FILE]

Every candidate writes the same tensors and is durable (fsync of file and directory) when its clock stops.
Candidates take turns; the median of all rounds counts. The raw limit is the best of {1, 2, 4} threads x
{4, 16} MiB pieces of O_DIRECT writes of the same number of bytes.
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

import numpy as np
from benchmarks.candidates import Candidate, candidates, raw_limit
from rich.console import Console
from rich.table import Table


def main() -> int:
    """Run, print the table, write the raw times."""
    arguments = parse()
    size = arguments.mebibytes << 20
    tensors = make_tensors(size)
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=arguments.directory) as folder:
        place = Path(folder)
        limits = raw_limit(size)
        entries = candidates(tensors)
        times = alternate([*limits, *entries], place, arguments.rounds)
    best = min((c.name for c in limits), key=lambda name: statistics.median(times[name]))
    show(size, best, [*entries], times)
    if arguments.json:
        document = {
            "bytes": size,
            "rounds": arguments.rounds,
            "machine": {
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "raw_limit": best,
            "seconds": times,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--quick", action="store_true", help="64 MiB, 3 rounds: under two minutes")
    parser.add_argument("--mebibytes", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per candidate (default: 5)")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where to write (default: the temporary directory)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results/latest.json"), help="raw times go here"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mebibytes, arguments.rounds = 64, 3
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
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {rounds}: {entry.name:50}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return times


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
