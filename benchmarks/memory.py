"""How much memory a save takes beyond the state itself: its peak, each measured in a process of its own.

See `memory_probe`. Memory that is mapped from files counts as far as it is resident, as the kernel counts it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import mindspore_savers, ours, peers
from benchmarks.bars import Bar, Finding
from benchmarks.memory_probe import ASYNCHRONOUS
from benchmarks.turns import Progress

TITLE = "Peak memory beyond a state of {:g} MiB"
_BAR_MIB = 64.0
_PATIENCE_S = 300.0


def findings(
    mebibytes: int, progress: Progress, directory: Path | None = None, *, alone: bool = False
) -> list[Finding]:
    """Measure with a state of so many MiB; `alone`: without peers."""
    others = (
        peers.TORCH,
        peers.SAFETENSORS,
        peers.DISTRIBUTED.format(2, "s"),
        peers.DISTRIBUTED_ASYNC,
        *mindspore_savers.PLAIN,
    )
    found = {}
    for way in (ours.NATIVE, ours.SEALED, ASYNCHRONOUS, *(() if alone else others)):
        progress(f"peak memory: {way}")
        found[way] = _peak(way, mebibytes, directory)
    bar = Bar(_BAR_MIB)
    rows = [
        Finding(what=f"synchronous save, peak extra memory: {way}", value=found.pop(way), unit="MiB", bar=bar)
        for way in (ours.NATIVE, ours.SEALED)
    ]
    beyond = found[ASYNCHRONOUS] - mebibytes
    rows.append(
        Finding(what="asynchronous save, beyond one copy of the state", value=beyond, unit="MiB", bar=bar)
    )
    return rows + [Finding(what=f"  {way}", value=value, unit="MiB") for way, value in found.items()]


def _peak(way: str, mebibytes: int, directory: Path | None) -> float:
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=directory) as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.memory_probe", way, folder, str(mebibytes)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{way}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1]) / 1024
