"""What the ranks of a PyTorch job wrote of themselves (see torch_rank.py), and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

Log: TypeAlias = list[list[Any]]
"""Entries of one rank, of all starts of its job."""


@dataclass
class Started:
    """One start of a job, as all ranks tell of it."""

    step: int
    """The one that it began after."""
    reached: int
    """The last that any rank completed, those that died included."""
    pids: dict[int, int] = field(default_factory=dict)
    """By rank."""
    inexact: list[str] = field(default_factory=list)


def joined(*of_starts: Sequence[Log]) -> list[Log]:
    """The logs of several starts, by rank, as one of all of them."""
    return [[entry for log in of_rank for entry in log] for of_rank in zip(*of_starts, strict=True)]


def starts(logs: Sequence[Log]) -> list[Started]:
    """All starts of a job, in their order."""
    found: dict[int, Started] = {}
    for rank, log in enumerate(logs):
        number = -1
        for kind, step, *rest in log:
            if kind == "start":
                pid, number, inexact = rest
                start = found.setdefault(number, Started(step, step))
                start.pids[rank] = pid
                start.inexact += inexact
            elif kind == "step":
                found[number].reached = max(found[number].reached, step)
    return [found[number] for number in sorted(found)]


def of_start(log: Log, number: int) -> Log:
    """What a rank wrote in one start."""
    found: Log = []
    now = -1
    for entry in log:
        now = entry[3] if entry[0] == "start" else now
        if now == number:
            found.append(entry)
    return found


def steps_lost(logs: Sequence[Log]) -> list[int]:
    """Steps that a rank had completed and that had to be made again, for each start after the first."""
    return [max(0, before.reached - after.step) for before, after in pairwise(starts(logs))]


def differing(reference: Sequence[Log], logs: Iterable[Log]) -> list[str]:
    """Where ranks stood at a boundary with other bits than undisturbed; empty if they never did."""
    return [
        f"rank {rank}: {place}: {digest} in place of {expected.get(place)}"
        for rank, (log, expected) in enumerate(zip(logs, map(digests, reference), strict=True))
        for place, digest in sorted(digests(log).items())
        if expected.get(place) != digest
    ]


def digests(log: Log) -> dict[str, str]:
    """Boundary, and the end -> digest of everything there."""
    return {f"{kind} {step}": rest[0] for kind, step, *rest in log if kind in ("at", "end")}
