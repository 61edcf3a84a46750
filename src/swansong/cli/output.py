"""What commands print: one JSON document, or text and tables for people.

In a terminal, text is coloured and tables fit its width. Elsewhere there is no colour, a row is one line
however long, and nothing is cut off. NO_COLOR and FORCE_COLOR work as usual.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
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


def print_json_line(document: object) -> None:
    """Print one JSON document of several, as one line, at once."""
    print(json.dumps(document, allow_nan=False), flush=True)


def cell(value: object, style: str = "") -> Text:
    """A piece of text that is printed as it is; None is a dash."""
    return Text("-", style="dim") if value is None else Text(printable(str(value)), style=style)


def state_cell(state: str, width: int = 0) -> Text:
    """A state in its colour."""
    return Text(state.ljust(width), style=STYLES[state])


def line(*parts: Text | str, indent: int = 0) -> RenderableType:
    """One line; a terminal too narrow for it gets it wrapped between words, all of it indented."""
    return Padding(Text.assemble(*parts, overflow="fold"), (0, 0, 0, indent), expand=False)


def print_line(*parts: Text | str, indent: int = 0) -> None:
    """Print a `line`."""
    _console().print(line(*parts, indent=indent))


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Text]],
    *,
    header: bool = True,
    optional: Sequence[str] = (),
) -> RenderableType:
    """A table without rules. A narrow terminal loses columns of `optional`, first ones first."""
    if in_terminal():
        columns, rows = _narrowed(columns, rows, optional, _console().width)
    made = Table(
        *columns, box=None, show_header=header, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )
    for row in rows:
        made.add_row(*row)
    return made


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Text]],
    *,
    header: bool = True,
    optional: Sequence[str] = (),
) -> None:
    """Print a `table`."""
    print_block(table(columns, rows, header=header, optional=optional))


def print_block(*parts: RenderableType) -> None:
    """Print lines and tables."""
    console = _console()
    if in_terminal():
        console.print(Group(*parts))
        return
    with console.capture() as captured:
        console.print(Group(*parts))
    for text in captured.get().removesuffix("\n").split("\n"):
        print(text.rstrip())


class Screen:
    """Shows one block after another while its `with` block lasts.

    In a terminal each takes the place of the one before; elsewhere they follow each other, an empty line
    between.
    """

    def __init__(self) -> None:
        console = _console()
        repaints = in_terminal() and not console.is_dumb_terminal
        self._live = (
            Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            if repaints
            else None
        )
        self._first = True

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, *parts: RenderableType) -> None:
        """Show lines and tables."""
        if self._live is not None:
            self._live.update(Group(*parts), refresh=True)
            return
        if not self._first:
            print()
        self._first = False
        print_block(*parts)
        sys.stdout.flush()


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
