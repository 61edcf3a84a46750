"""Options that several commands share, each as a type for a command's parameter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer


@dataclass
class Session:
    """What one run of the program knows besides its command's arguments. The context's `obj`."""

    debug: bool = False
    """--debug was given, before or after the command's name."""


def _remember_debug(context: typer.Context, value: bool) -> bool:
    session = context.find_object(Session)
    if value and session is not None:
        session.debug = True
    return value


Debug: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_remember_debug, is_eager=True, help="Show errors with their traceback."
    ),
]
"""Acts through its callback: commands take it and need not look at it."""

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

KeyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="File with the key: its 16, 24 or 32 bytes and nothing else, or their hexadecimal digits and a "
        "newline.",
    ),
]
"""See swansong.cli.keys."""
