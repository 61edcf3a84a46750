"""`swansong inspect`: what one checkpoint says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from swansong.cli import output, text
from swansong.cli.description import Description, describe
from swansong.cli.keys import read_key
from swansong.cli.options import AsJson, Debug, KeyFile
from swansong.store import catalog, clock

TERMINAL_ROWS: Final = 40
"""Tensors shown in a terminal without --all."""


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint: a file or a directory.")],
    everything: Annotated[
        bool, typer.Option("--all", help=f"In a terminal, show more than {TERMINAL_ROWS} tensors.")
    ] = False,
    key_file: KeyFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Show what a checkpoint says of itself, and its tensors. Reads none of their bytes.

    Without a key, an encrypted checkpoint shows its public facts only. What no manifest vouches for shows
    what its container says.

    \b
    Examples:
      swansong inspect checkpoints/lenet-3_100.ckpt
      swansong inspect checkpoints/lenet-3_100.ckpt --json | jq '.tensors[].name'
    """
    if path.is_dir() and not catalog.is_native(path):
        raise typer.BadParameter(
            f"{path}: wanted a checkpoint, not a directory of them; try 'swansong list'", param_hint="PATH"
        )
    description = describe(catalog.find(path), read_key(key_file))
    if as_json:
        output.print_json(description)
    else:
        _print(
            path.name or str(path),
            description,
            None if everything or not output.in_terminal() else TERMINAL_ROWS,
        )
    return int(description["state"] == "damaged")


def _print(name: str, description: Description, limit: int | None) -> None:
    output.print_line(output.cell(name, "bold"), "  ", output.state_cell(description["state"]))
    output.print_table(
        [output.fixed(""), output.words("")],
        [[output.cell(name, "dim"), output.cell(value)] for name, value in _facts(description)],
        header=False,
    )
    if description["tensors"] is not None:
        print()
        _print_tensors(description["tensors"], description["aliases"] or {}, limit)


def _facts(about: Description) -> Iterator[tuple[str, str]]:
    if about["problem"]:
        yield "problem", about["problem"]
    if about["format"] is not None:
        yield from _place(about)
    schemes = sorted({file["scheme"] for file in about["files"] or []} - {"none"})
    container = f"{about['container']}, {text.count(len(about['files']), 'file')}, " if about["files"] else ""
    yield "content", container + text.size(about["bytes"])
    if about["encrypted"]:
        yield "encrypted", f"yes ({', '.join(schemes)})" if schemes else "yes"
    if about["sealed"]:
        yield "", "The rest is sealed; --key-file shows it."
    for label, pairs in (("software", about["software"]), ("appended", about["append_info"])):
        if isinstance(pairs, dict) and pairs:
            yield label, ", ".join(f"{name} {value}" for name, value in pairs.items())
    for entry in about["inexact"] or []:
        yield "inexact", ", ".join(f"{name}: {value}" for name, value in entry.items())


def _place(about: Description) -> Iterator[tuple[str, str]]:
    """Where in the run, and in the series, it stands."""
    stem = "" if about["stem"] == about["series"] else f", stem {about['stem']}"
    yield "kind", f"{about['kind']}, seq {about['seq']} of series {about['series']}{stem}"
    at = [f"epoch {about['epoch']}"] if about["epoch"] is not None else []
    at += [f"step {about['step_in_epoch']} in it"] if about["step_in_epoch"] is not None else []
    yield "step", f"{about['step']:,}" + (f" ({', '.join(at)})" if at else "")
    if about["boundary_step"] not in (None, about["step"]):
        yield "boundary", f"{about['boundary_step']:,}"
    if about["world_size"] != 1:
        yield "ranks", f"{about['world_size']:,}"
    yield "created", _when(about["created"])
    yield "id", about["id"]
    yield "run", about["run"] + (f", resumed from {about['parent']}" if about["parent"] else "")


def _when(created: str) -> str:
    seconds = clock.from_iso(created)
    return f"{text.moment(seconds)} ({text.duration(clock.SystemClock().wall() - seconds)} ago)"


def _print_tensors(tensors: list[dict[str, Any]], aliases: dict[str, str], limit: int | None) -> None:
    shown = tensors[:limit]
    rows = [
        [
            output.cell(tensor["name"]),
            output.cell(tensor["dtype"]),
            output.cell(tensor["shape"]),
            output.cell(None if tensor["bytes"] is None else text.size(tensor["bytes"])),
        ]
        for tensor in shown
    ]
    columns = [output.words("TENSOR"), output.fixed("DTYPE"), output.fixed("SHAPE"), output.number("SIZE")]
    output.print_table(columns, rows)
    if len(shown) < len(tensors):
        output.print_line(output.cell(f"... and {len(tensors) - len(shown):,} more (--all)", "dim"))
    for alias, name in aliases.items():
        output.print_line(output.cell(alias), output.cell(" is tied to ", "dim"), output.cell(name))
    print()
    sized = [tensor for tensor in tensors if tensor["bytes"] is not None]
    elements = sum(math.prod(tensor["shape"]) for tensor in sized)
    nbytes = sum(tensor["bytes"] for tensor in sized)
    output.print_line(
        output.cell(
            f"{text.count(len(tensors), 'tensor')}, {text.count(elements, 'element')}, {text.size(nbytes)}",
            "bold",
        )
    )
