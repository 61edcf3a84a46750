"""Taking turns: how times are measured that are to be compared.

Candidates alternate, so that whatever else the machine does meets all of them. Each begins in an empty
directory, which is removed, unmeasured, before the next one begins. A first round warms up only.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bar, Finding

Progress = Callable[[str], None]
Times = dict[str, list[float]]
"""Candidate -> seconds in each round."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something to be timed."""

    name: str
    prepare: Callable[[Path], Callable[[], float | None]]
    """Given an empty directory, return what is timed. If that returns a number, those seconds count."""


def alternate(
    entries: Sequence[Candidate], place: Path, rounds: int, progress: Progress, *, warm_up: bool = True
) -> Times:
    """Seconds of each candidate in each round."""
    times: Times = {entry.name: [] for entry in entries}
    for number in range(-1 if warm_up else 0, rounds):
        for entry in entries:
            progress(f"{'warm-up' if number < 0 else f'round {number + 1} of {rounds}'}: {entry.name}")
            target = place / "run"
            target.mkdir()
            seconds = timed(entry.prepare(target))
            shutil.rmtree(target)
            if number >= 0:
                times[entry.name].append(seconds)
    return times


def timed(action: Callable[[], float | None]) -> float:
    """Seconds that an action takes, or says."""
    start = time.perf_counter()
    said = action()
    return time.perf_counter() - start if said is None else said


def make_durable(*paths: Path) -> None:
    """fsync files and directories."""
    for place in paths:
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def best(times: Times, names: Sequence[str]) -> str:
    """The one with the smallest median."""
    return min(names, key=lambda name: statistics.median(times[name]))


def speed_ratio(
    what: str,
    times: Times,
    ours: str,
    theirs: str,
    least: float | None = None,
    doubt: str = "",
) -> Finding:
    """How many times as fast `ours` is as `theirs`: medians; at least `least` is wanted."""
    value = statistics.median(times[theirs]) / statistics.median(times[ours])
    bar = None if least is None else Bar(least, at_least=True)
    return Finding(what=what, value=value, bar=bar, doubt=doubt)


def seconds_of(times: Times, size: int) -> list[Finding]:
    """Each candidate's times, with its speed."""
    return [
        Finding(
            what=f"  {name}, {size / statistics.median(taken) / 1e9:.2f} GB/s",
            value=statistics.median(taken),
            unit="s",
            samples=tuple(taken),
            key=name,
        )
        for name, taken in times.items()
    ]
