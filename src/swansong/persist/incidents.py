"""Reports of incidents: what `swansong incident` shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from swansong.engine.recorder_reading import Recorded
from swansong.persist.causes import cause
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


PARTS: Final = ("detect", "freeze", "choose", "save", "commit")
"""Of `seconds`; null for those that an incident did not come to."""


def document(
    report: m.Report,
    remains: Mapping[int, Recorded],
    *,
    inexact: Sequence[Mapping[str, object]],
    resume_command: str,
    stem: str,
    run: str,
) -> bytes:
    """The report as one JSON document, with a newline at its end.

    `stem` and `run` are those of the job's checkpoints; each start of a job has a `run` of its own.
    `first_fault` is the one that began it, by `persist.causes`, and `kind` is its kind; `faults` are all, in
    the order in which they became known. `ranks` are those that reported and those of which
    `remains` tells, the flight recorders of the others; each with the step at which its components are whole
    (null: at none, or at several).
    """
    first = cause(report.faults)
    content: dict[str, Any] = {
        "id": report.incident,
        "stem": stem,
        "run": run,
        "kind": first.kind.value if first is not None else None,
        "first_fault": _fault(first),
        "faults": [_fault(fault) for fault in report.faults],
        "ranks": sorted(
            [
                *(_rank(rank, state) for rank, state in report.reports.items()),
                *(_remains(rank, recorded) for rank, recorded in remains.items()),
            ],
            key=lambda entry: entry["rank"],
        ),
        "step": report.step,
        "outcome": report.outcome.value,
        "reason": report.reason,
        "path": report.path or None,
        "inexact": [dict(entry) for entry in inexact],
        "seconds": {part: report.seconds.get(part) for part in PARTS},
        "savers": dict(sorted(report.savers.items())),
        "notes": list(report.notes),
        "resume_command": resume_command,
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _fault(fault: m.Fault | None) -> dict[str, Any] | None:
    return None if fault is None else msgspec.to_builtins(fault)


def _rank(rank: int, state: m.StateReport) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": _common(held.step for held in state.held.values()),
        "boundary": state.boundary,
        "settled": state.settled,
        "main": state.main,
        "stack": state.stack,
    }


def _remains(rank: int, recorded: Recorded) -> dict[str, Any]:
    phase = f", in phase {recorded.phase}" if recorded.phase else ""
    return {
        "rank": rank,
        "step": _common(reading.step for reading in recorded.clocks.values()),
        "boundary": recorded.boundaries[0].step if recorded.boundaries else None,
        "settled": False,
        "main": f"did not report; by its flight recorder{phase}",
        "stack": "",
    }


def _common(steps: Iterable[int | None]) -> int | None:
    """The step that all have, if they have one."""
    found = set(steps)
    return found.pop() if len(found) == 1 else None
