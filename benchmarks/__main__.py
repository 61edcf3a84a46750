"""Measure swansong against the limits of the machine, what people use today, and its bars.

A bar is a ratio of two things measured in the same run, in turns, or a limit in units. What each measurement
does stands at the head of its module: saving, blocking, interference, memory, loading, adapter_*, engine_*.

example:
  python -m benchmarks --only saving --mebibytes 256 --directory /mnt/checkpoints
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import (
    adapter_fault,
    adapter_step,
    bars,
    blocking,
    engine_freeze,
    engine_idle,
    interference,
    machine,
    memory,
    saving,
)
from benchmarks.bars import Finding
from rich.console import Console

Found = dict[str, list[Finding]]
_QUICK = {
    "mebibytes": 64,
    "rounds": 3,
    "kills": 20,
    "held": 256,
    "ranks": 500,
    "idle": 3.0,
    "steps": 60,
}
_TOO_SMALL = "not judged: small run"
_JUDGED_MIB = 1024
_JUDGED_RANKS = 2000
_WIDTH = 140


def main() -> int:
    """Run what was chosen, print its tables, write every raw value."""
    arguments = parse()
    document = machine.described(arguments.directory or Path(tempfile.gettempdir()))
    document["options"] = {name: str(value) for name, value in vars(arguments).items()}
    found: Found = {}
    for name, measure in GROUPS.items():
        if arguments.only in (None, name):
            found |= shown(measure(arguments))
    if arguments.json:
        document["load_at_end"] = os.getloadavg()[0]
        document["tables"] = {title: [one.document() for one in rows] for title, rows in found.items()}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    console().print(bars.summary(found))
    print(bars.last_line(found))
    return 0


def measure_engine(arguments: argparse.Namespace) -> Found:
    """Faults noticed, ranks registered."""
    idle = engine_idle.findings(arguments.ranks, arguments.idle, progress)
    reason = "" if arguments.ranks >= _JUDGED_RANKS else _TOO_SMALL
    return {
        engine_freeze.TITLE: engine_freeze.findings(arguments.kills, arguments.held, progress),
        engine_idle.TITLE: doubted(idle, reason),
    }


def measure_adapters(arguments: argparse.Namespace) -> Found:
    """A healthy step, and a fault's save."""
    size, place = arguments.mebibytes, arguments.directory
    return {
        adapter_step.TITLE: adapter_step.findings(arguments.steps, size, progress),
        adapter_fault.TITLE: doubted(
            adapter_fault.findings(size, arguments.rounds, progress, place), doubt(arguments)
        ),
    }


def measure_saving(arguments: argparse.Namespace) -> Found:
    """Durable saves."""
    size = arguments.mebibytes
    sizes: dict[str, Any] = {}
    if size < _JUDGED_MIB:
        sizes = {
            "sizes": tuple({min(1, size), size}),
            "once": None,
            "counts": (1, 10_000) if size >= 64 else (1, 100),
            "counted": min(100, size),
            "ckpt": (min(100, size),),
            "steps": 20,
            "slow": False,
        }
    plan = saving.Plan(rounds=arguments.rounds, doubt=doubt(arguments), **sizes)
    found = saving.findings(plan, progress, arguments.directory)
    found["Not there yet"] = [saving.MERGED]
    return found


def measure_training(arguments: argparse.Namespace) -> Found:
    """Training while something is saved."""
    common = (arguments.mebibytes, arguments.rounds, progress, arguments.directory, doubt(arguments))
    return {
        blocking.TITLE.format(arguments.mebibytes): blocking.findings(*common),
        interference.TITLE.format(arguments.mebibytes): interference.findings(*common),
    }


def measure_memory(arguments: argparse.Namespace) -> Found:
    """Peaks of memory."""
    size = arguments.mebibytes
    title = memory.TITLE.format(size)
    return {title: memory.findings(size, progress, arguments.directory, alone=size < _JUDGED_MIB)}


def measure_loading(arguments: argparse.Namespace) -> Found:
    """Loads."""
    if find_spec("benchmarks.loading") is None:
        return {}
    loading = importlib.import_module("benchmarks.loading")
    found = loading.findings(arguments.mebibytes, arguments.rounds, progress, arguments.directory)
    return {loading.TITLE: doubted(found, doubt(arguments))}


GROUPS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "engine": measure_engine,  # first: it is small, and disks are quiet
    "adapters": measure_adapters,
    "memory": measure_memory,
    "saving": measure_saving,
    "training": measure_training,
    "loading": measure_loading,
}


def doubt(arguments: argparse.Namespace) -> str:
    """Why a bar that was set for 1 GiB and five rounds is not judged; empty if it is."""
    return "" if arguments.mebibytes >= _JUDGED_MIB and arguments.rounds >= 5 else _TOO_SMALL


def doubted(findings: list[Finding], reason: str) -> list[Finding]:
    """The same, of which no bar is judged if there is a reason not to."""
    return [replace(one, doubt=reason) if one.bar is not None else one for one in findings]


def shown(found: Found) -> Found:
    """Print tables of findings, and pass them on."""
    progress()
    for title, findings in found.items():
        console().print(bars.table(title, findings))
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    about, _, example = (__doc__ or "").partition("example:")
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description=about,
        epilog=f"example:{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    quick = ", ".join(f"{name} {value}" for name, value in _QUICK.items())
    add("--quick", action="store_true", help=f"under two minutes: {quick}")
    add("--only", choices=tuple(GROUPS), help="nothing else")
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
        vars(arguments).update(_QUICK)
    return arguments


def progress(text: str | None = None) -> None:
    """Tell a terminal what is being measured; nothing any more."""
    if sys.stderr.isatty():
        print("" if text is None else f"\r{text:100.100}", end="\n" if text is None else "", file=sys.stderr)


def console() -> Console:
    """Where tables go; as wide as they are, where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


if __name__ == "__main__":
    sys.exit(main())
