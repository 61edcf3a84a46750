"""What commands print: one JSON document, or text and tables for people.

In a terminal, text is coloured and tables fit its width. Elsewhere there is no colour, a row is one line
however long, and nothing is cut off. NO_COLOR and FORCE_COLOR work as usual.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from swansong.cli.text import printable

STYLES: Final = {
    "committed": "green",
    "ok": "green",
    "damaged": "bold red",
    "unverified": "yellow",
    "unproven": "bold yellow",
    "incomplete": "dim",
}
"""Colour of a checkpoint's state."""

_UNBOUNDED: Final = 1 << 20


def in_terminal() -> bool:
    """True if somebody looks at standard output directly."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(document: object) -> None:
    """Print one JSON document: ASCII, so that any name survives, lone surrogates as escapes."""
    print(json.dumps(document, indent=2, allow_nan=False))


def cell(value: object, style: str = "") -> Text:
    """A piece of text that is printed as it is; None is a dash."""
    return Text("-", style="dim") if value is None else Text(printable(str(value)), style=style)


def state_cell(state: str, width: int = 0) -> Text:
    """A state in its colour."""
    return Text(state.ljust(width), style=STYLES[state])


def print_line(*parts: Text | str, indent: int = 0) -> None:
    """Print one line; a terminal too narrow for it gets it wrapped between words, all of it indented."""
    _console().print(Padding(Text.assemble(*parts, overflow="fold"), (0, 0, 0, indent), expand=False))


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Text]],
    *,
    header: bool = True,
    optional: Sequence[str] = (),
) -> None:
    """Print a table without rules. A narrow terminal loses columns of `optional`, first ones first."""
    if in_terminal():
        columns, rows = _narrowed(columns, rows, optional, _console().width)
    table = Table(
        *columns, box=None, show_header=header, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )
    for row in rows:
        table.add_row(*row)
    console = _console()
    if in_terminal():
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().removesuffix("\n").split("\n"):
        print(line.rstrip())


def _narrowed(
    columns: Sequence[Column], rows: Sequence[Sequence[Text]], optional: Sequence[str], width: int
) -> tuple[Sequence[Column], Sequence[Sequence[Text]]]:
    for name in optional:
        widest = [
            max(len(str(c.header)), *(row[i].cell_len for row in rows), 0) for i, c in enumerate(columns)
        ]
        if sum(widest) + 2 * (len(widest) - 1) <= width:
            break
        kept = [i for i, column in enumerate(columns) if column.header != name]
        columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    return columns, rows


def words(header: str) -> Column:
    """A column of names, folded in a terminal too narrow for them."""
    return Column(header, overflow="fold", min_width=12)


def fixed(header: str) -> Column:
    """A column of short words."""
    return Column(header, no_wrap=True)


def number(header: str) -> Column:
    """A column of numbers."""
    return Column(header, justify="right", no_wrap=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process by itself; swansong.cli.ending does that


def _console() -> Console:
    return _Console(width=None if in_terminal() else _UNBOUNDED, markup=False, emoji=False, highlight=False)
