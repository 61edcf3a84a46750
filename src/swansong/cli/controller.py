"""`swansong controller`: a job's controller, run by hand instead of by its rank 0."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Self

import msgspec
import typer

from swansong.cli import output
from swansong.cli.control import (
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    TokenFile,
    Where,
    address_of,
    server_tls,
    token_of,
)
from swansong.cli.keys import read_key
from swansong.cli.options import AsJson, Debug, KeyFile
from swansong.engine.controller import ControllerServer
from swansong.engine.recorder import RecorderOptions
from swansong.engine.token import job_token
from swansong.errors import ConfigError
from swansong.persist import controller, job
from swansong.persist.launch import Configuration
from swansong.protocol.handshake import Token
from swansong.protocol.options import ProtocolOptions


def command(
    where: Where,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The job's directory of checkpoints.", show_default=False)
    ],
    world_size: Annotated[
        int, typer.Option("--world-size", min=1, help="Processes of the job.", show_default=False)
    ],
    incarnation: Annotated[
        str | None,
        typer.Option(metavar="HEX", help=f"This start of the job; without, {job.VARIABLE} is taken."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A field of ProtocolOptions, such as budget_s=25. Repeatable."
        ),
    ] = None,
    recorders: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where the ranks of this host keep their recorders.")
    ] = None,
    token_file: TokenFile = None,
    key_file: KeyFile = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Run a job's controller here, until the job is over.

    As a rule rank 0 starts it. Start it by hand on a host that outlives the ranks', or under a supervisor,
    before the job: a job whose controller answers starts none. It has to see DIR, and needs the key if the
    job encrypts. Without --token-file and SWANSONG_TOKEN it takes DIR/.swansong-token, or makes that.

    Times given with --option should be the job's. Ctrl-C ends it in order, and the job goes on; ranks on the
    same host start another then. --json tells the port and the incarnation, once it listens.

    \b
    Examples:
      export SWANSONG_INCARNATION=$(openssl rand -hex 16)  # the ranks', too; new at each start of the job
      swansong controller node0:2000 /shared/checkpoints --world-size 8
      swansong controller node0:2000 /shared/checkpoints --world-size 8 --option budget_s=25
    """
    address, key, tls = address_of(where), read_key(key_file), server_tls(tls_ca, tls_cert, tls_key)
    configuration = Configuration(
        directory=str(_directory(directory)),
        host=address.host,
        port=address.port,
        world_size=world_size,
        incarnation=_incarnation(incarnation),
        series=None,
        key=key.material.hex() if key is not None else None,
        options=_options(option or ()),
        resume_command="",
        starter=None,
        recorders=str((recorders or RecorderOptions().directory).absolute()),
        tls=tls.portable() if tls is not None else None,
    )
    _serve(configuration, _token(token_file, directory), as_json)
    return 0


def _serve(configuration: Configuration, token: Token, as_json: bool) -> None:
    with _Ending() as ending:

        def listens(server: ControllerServer) -> None:
            ending.stops(server)
            if as_json:
                host, incarnation = configuration.host, configuration.incarnation
                output.print_json_line({"host": host, "port": server.port, "incarnation": incarnation})

        controller.serve(configuration, token, listens)
        if not ending.came:  # or else its successor wants to know
            controller.forget(configuration)


class _Ending:
    """Has a server end in order when a signal comes; the same signal again does what it does elsewhere."""

    def __init__(self) -> None:
        self.came = False
        self._server: ControllerServer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take) or signal.SIG_DFL
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stops(self, server: ControllerServer) -> None:
        """This is the server; a signal may have come already."""
        self._server = server
        if self.came:
            server.stop("a signal came")

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.signal(number, self._before[number])
        if self._server is not None:
            self._server.stop(f"{signal.Signals(number).name} came")


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise typer.BadParameter(f"{path}: no such directory", param_hint="DIR")
    return path.absolute()


def _incarnation(given: str | None) -> str:
    """As hexadecimal digits, from an option or the environment."""
    digits = {job.VARIABLE: given} if given is not None else os.environ
    try:
        return job.incarnation_of(None, digits, world_size=2).hex()
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--incarnation") from None


def _token(path: Path | None, directory: Path) -> Token:
    """Of a file, or where rank 0 looks for it; like rank 0, this makes it if there is none."""
    if path is not None:
        return token_of(path)
    return job_token(directory, os.environ, create=True)


def _options(given: Sequence[str]) -> dict[str, Any]:
    """Fields of ProtocolOptions, checked."""
    pairs = {name: value for name, _, value in (text.partition("=") for text in given)}
    known = {field.name for field in fields(ProtocolOptions)}
    if unknown := sorted(pairs.keys() - known):
        message = f"{unknown[0]!r}: wanted NAME=VALUE, where NAME is one of {', '.join(sorted(known))}"
        raise typer.BadParameter(message, param_hint="--option")
    try:
        options = msgspec.convert(pairs, ProtocolOptions, strict=False)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error), param_hint="--option") from None
    return {name: getattr(options, name) for name in pairs}
