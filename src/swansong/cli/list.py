"""`swansong list`: what checkpoints a directory holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from swansong.cli import output, text
from swansong.cli.ending import complain
from swansong.cli.keys import read_key
from swansong.cli.options import AsJson, Debug, KeyFile
from swansong.cli.progress import ReadingBar
from swansong.store import catalog, clock, naming, verify
from swansong.store.catalog import Found
from swansong.store.crypt import Key
from swansong.store.verify import Problem


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory of checkpoints.")],
    read: Annotated[
        bool, typer.Option("--verify", help="Read every byte; else manifests and sizes decide.")
    ] = False,
    key_file: KeyFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """List the checkpoints in DIR, newest first.

    Their states: committed (the manifest is sound and the sizes match), damaged, unverified (no manifest
    vouches for it), incomplete (being written, or left by a save that died). Committed does not mean
    undamaged: --verify reads the bytes.

    \b
    Examples:
      swansong list checkpoints
      swansong list checkpoints --verify --json
    """
    key = read_key(key_file)
    if key is not None and not read:
        complain("warning: --key-file changes nothing without --verify")
    _require_directory(directory)
    entries = catalog.scan(directory)
    refused: list[Problem] = []
    if read:
        entries, refused = _read(entries, key)
    if as_json:
        output.print_json([_row(found) for found in entries])
    elif entries:
        _print(entries)
    if refused:
        more = f" (and {len(refused) - 1:,} more)" if len(refused) > 1 else ""
        complain(f"{refused[0].what}{more}")
    if not entries:
        complain(f"{directory}: no checkpoints there")
    return int(not entries or bool(refused) or any(found.state == "damaged" for found in entries))


def _require_directory(path: Path) -> None:
    if (path / naming.MANIFEST).is_file() or path.is_file():
        raise typer.BadParameter(
            f"{path}: wanted a directory of checkpoints, not one of them; try 'swansong inspect'",
            param_hint="DIR",
        )


def _read(entries: list[Found], key: Key | None) -> tuple[list[Found], list[Problem]]:
    """Read them all; return them with the states that they then have, and where the key did not fit."""
    checked: list[Found] = []
    refused: list[Problem] = []
    with ReadingBar(sum(found.nbytes for found in entries if found.committed)) as bar:
        for found in entries:
            problems = (
                [] if found.state == "incomplete" else verify.check(found, key=key, progress=bar.advance)[1]
            )
            damage = [problem for problem in problems if not problem.about_key]
            refused += [problem for problem in problems if problem.about_key]
            if damage:
                found = replace(found, state="damaged", problem=damage[0].what)
            checked.append(found)
    return checked, refused


def _row(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "name": found.name,
        "path": str(found.path),
        "series": manifest and manifest.series,
        "kind": manifest and manifest.kind,
        "seq": manifest and manifest.seq,
        "step": manifest and manifest.step,
        "epoch": manifest and manifest.epoch,
        "step_in_epoch": manifest and manifest.step_in_epoch,
        "bytes": found.nbytes,
        "created": manifest and manifest.created,
        "state": found.state,
    }


def _print(entries: list[Found]) -> None:
    ages = output.in_terminal()
    columns = [
        output.words("NAME"),
        output.fixed("KIND"),
        output.number("SEQ"),
        output.number("STEP"),
        output.number("EPOCH"),
        output.number("SIZE"),
        output.number("AGE") if ages else output.fixed("CREATED"),
        output.fixed("STATE"),
    ]
    now = clock.SystemClock().wall()
    rows = [_cells(found, now if ages else None) for found in entries]
    output.print_table(columns, rows, optional=("KIND", "SEQ", "SIZE", "AGE", "EPOCH"))
    damaged = [found for found in entries if found.state == "damaged"]
    if damaged:
        print()
    for found in damaged:
        problem = (found.problem or "").removeprefix(f"{found.path}: ")
        output.print_line(output.cell(found.name, "bold"), ": ", output.cell(problem))


def _cells(found: Found, now: float | None) -> list[Text]:
    row = _row(found)
    epoch, step = row["epoch"], row["step_in_epoch"]
    seconds = _created(found)
    return [
        output.cell(row["name"]),
        output.cell(row["kind"]),
        output.cell(row["seq"]),
        output.cell(row["step"]),
        output.cell(epoch if epoch is None or step is None else f"{epoch}/{step}"),
        output.cell(text.size(row["bytes"])),
        output.cell(text.moment(seconds) if now is None else text.duration(now - seconds)),
        output.state_cell(row["state"]),
    ]


def _created(found: Found) -> float:
    """When it was made, in seconds; what has no manifest has its file's time."""
    return found.modified if found.manifest is None else clock.from_iso(found.manifest.created)
