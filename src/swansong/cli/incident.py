"""`swansong incident`: what happened to a job, and where its state is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from swansong.cli import output
from swansong.cli.ending import complain
from swansong.cli.options import AsJson, Debug
from swansong.errors import MalformedError
from swansong.persist import incidents, places

_SHOWN: Final = 8
"""So many faults are listed besides the one that began it."""


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of checkpoints.")],
    incident: Annotated[
        str | None, typer.Argument(metavar="[INCIDENT]", help="Its id; the latest, if left out.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Show the report of an incident: what failed, what was decided and saved, how to go on.

    \b
    Examples:
      swansong incident checkpoints
      swansong incident checkpoints --json | jq -r .path
    """
    reports = places.incident_files(directory)
    path = reports[0] if reports else None
    if incident is not None:
        path = next((found for found in reports if found.stem == incident), None)
    if path is None:
        complain(f"{directory}: no report of {'that' if incident else 'any'} incident there")
        return 1
    document = read(path)
    if as_json:
        output.print_json(document)
    else:
        _print(document)
    return 0


def read(path: Path) -> dict[str, Any]:
    """A report. Raises MalformedError for what is none, OSError."""
    with path.open("rb") as file:
        data = file.read(incidents.SIZE_LIMIT + 1)
    try:
        document = json.loads(data) if len(data) <= incidents.SIZE_LIMIT else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not document.keys() >= incidents.KEYS:
        raise MalformedError(f"{path}: not the report of an incident", path=str(path))
    return document


def _print(document: dict[str, Any]) -> None:
    first = document["first_fault"] if isinstance(document["first_fault"], dict) else {}
    faults = document.get("faults")
    others = [
        fault for fault in (faults if isinstance(faults, list) else []) if fault != document["first_fault"]
    ]
    rows = [
        ("incident", document["id"]),
        ("outcome", document["outcome"]),
        ("step", document["step"]),
        ("path", document["path"]),
        ("reason", document["reason"] or None),
        ("first fault", _fault(first)),
        *(("then" if number == 0 else "", _fault(fault)) for number, fault in enumerate(others[:_SHOWN])),
        ("", f"and {len(others) - _SHOWN} more" if len(others) > _SHOWN else None),
        ("inexact", len(document["inexact"]) or None if isinstance(document["inexact"], list) else None),
        ("resume with", document["resume_command"]),
    ]
    for name, value in rows:
        if value is not None:
            output.print_line(output.cell(f"{name:<13}", "bold"), output.cell(value))
    ranks = document["ranks"] if isinstance(document["ranks"], list) else []
    shown = [rank for rank in ranks if isinstance(rank, dict)]
    if shown:
        print()
        columns = [output.number("RANK"), output.number("STEP"), output.words("MAIN THREAD")]
        output.print_table(
            columns,
            [[output.cell(rank.get(name)) for name in ("rank", "step", "main")] for rank in shown],
        )


def _fault(fault: Any) -> str:
    """In a line: an exception's message may have many."""
    known = fault if isinstance(fault, dict) else {}
    what = " ".join(str(known.get("what")).split())
    return f"{known.get('kind')}, rank {known.get('rank')}: {what}"
