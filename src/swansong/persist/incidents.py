"""Reports of incidents: what `swansong incident` shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from swansong.protocol import messages as m

KEYS: Final = frozenset(
    {
        "id",
        "kind",
        "first_fault",
        "ranks",
        "step",
        "outcome",
        "reason",
        "path",
        "inexact",
        "seconds",
        "savers",
        "resume_command",
    }
)
"""What every report has."""
SIZE_LIMIT: Final = 1 << 26
"""Bytes of the largest report that is read: the stacks of thousands of ranks."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the parts of an incident took, in seconds, as far as the committer knows."""

    save_s: float | None = None
    commit_s: float | None = None


def document(
    report: m.Report, timing: Timing, *, inexact: Sequence[Mapping[str, object]], resume_command: str
) -> bytes:
    """The report as one JSON document, with a newline at its end.

    `first_fault` is the one that became known first; `ranks` are those that reported, each with the step at
    which its components are whole (null: at none, or at several).
    """
    first = report.faults[0] if report.faults else None
    content: dict[str, Any] = {
        "id": report.incident,
        "kind": first.kind.value if first is not None else None,
        "first_fault": _fault(first),
        "faults": [_fault(fault) for fault in report.faults],
        "ranks": [_rank(rank, state) for rank, state in sorted(report.reports.items())],
        "step": report.step,
        "outcome": report.outcome.value,
        "reason": report.reason,
        "path": report.path or None,
        "inexact": [dict(entry) for entry in inexact],
        "seconds": {
            "detect": None,
            "freeze": None,
            "choose": None,
            "save": timing.save_s,
            "commit": timing.commit_s,
        },
        "savers": dict(sorted(report.savers.items())),
        "notes": list(report.notes),
        "resume_command": resume_command,
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _fault(fault: m.Fault | None) -> dict[str, Any] | None:
    return None if fault is None else msgspec.to_builtins(fault)


def _rank(rank: int, state: m.StateReport) -> dict[str, Any]:
    steps = Counter(held.step for held in state.held.values())
    return {
        "rank": rank,
        "step": next(iter(steps)) if len(steps) == 1 else None,
        "boundary": state.boundary,
        "settled": state.settled,
        "main": state.main,
        "stack": state.stack,
    }
