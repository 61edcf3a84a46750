"""Talking to a job's controller: where it is, the token that lets one in, and TLS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from swansong.engine.address import Address, parse_address
from swansong.engine.tls import ClientTls, TlsFiles
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
TlsAuthority: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="FILE", help="Certificates that may sign the other end's, PEM."),
]
TlsCertificate: TypeAlias = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="This end's certificate, PEM.")
]
TlsKey: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="Its private key, if that is not in the same file."),
]
TlsName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tls-name", metavar="NAME", help="Whom the controller's certificate is for, if not for HOST."
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


def client_tls(
    authority: Path | None, certificate: Path | None, key: Path | None, name: str | None
) -> ClientTls | None:
    """What to connect with, by the options of this module; None if none was given.

    Raises typer.BadParameter for files that cannot be used.
    """
    tls = _tls(authority, certificate, key, name)
    with _refusing():
        return tls.client() if tls is not None else None


def server_tls(authority: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """What to listen with, likewise."""
    tls = _tls(authority, certificate, key, None)
    with _refusing():
        if tls is not None:
            tls.server()
    return tls


def _tls(
    authority: Path | None, certificate: Path | None, key: Path | None, name: str | None
) -> TlsFiles | None:
    if authority is None and certificate is None and key is None and name is None:
        return None
    return TlsFiles(authority=authority, certificate=certificate, key=key, server_name=name)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--tls-...") from None
