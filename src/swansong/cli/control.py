"""Talking to a job's controller: where it is, and the token that lets one in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from swansong.engine.address import Address, parse_address
from swansong.engine.token import FILE_NAME, VARIABLE, job_token, read_token
from swansong.errors import ConfigError
from swansong.protocol.handshake import Token

Where: TypeAlias = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="Where the job's controller listens.", show_default=False)
]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help=f"The job's token: {FILE_NAME} in its directory of checkpoints. Without, {VARIABLE} is taken.",
    ),
]


def address_of(where: str) -> Address:
    """The address in words. Raises typer.BadParameter."""
    try:
        return parse_address(where)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="HOST:PORT") from None


def token_of(path: Path | None) -> Token:
    """The token in a file, or in the environment. Raises typer.BadParameter, which never shows it."""
    try:
        if path is not None:
            return read_token(path)
        if VARIABLE in os.environ:
            return job_token(Path(), os.environ, create=False)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--token-file") from None
    raise typer.BadParameter(f"wanted a file, or {VARIABLE} to be set", param_hint="--token-file")
