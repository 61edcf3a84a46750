"""`swansong persist`: have a running job saved and ended."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated

import msgspec
import typer

from swansong.cli import output
from swansong.cli.control import (
    TlsAuthority,
    TlsCertificate,
    TlsKey,
    TlsName,
    TokenFile,
    Where,
    address_of,
    client_tls,
    token_of,
)
from swansong.cli.ending import complain
from swansong.cli.options import AsJson, Debug
from swansong.cli.status import in_words
from swansong.engine.inquiry import ask
from swansong.protocol.messages import Outcome
from swansong.protocol.operator import Declined, PersistEnded, PersistRequest, short


def command(
    where: Where,
    token_file: TokenFile = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the end of the save.")
    ] = 600.0,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Have a running job save its state and end.

    Every rank ends with exit code 0, so that no launcher starts the job again. The exit code of this command
    is 1 if nothing was saved, or if nobody answers.

    \b
    Examples:
      swansong persist node0:2000 --token-file checkpoints/.swansong-token
      swansong persist node0:2000 --token-file checkpoints/.swansong-token --json | jq -r .path
    """
    request, tls = PersistRequest(who=short(_who())), client_tls(tls_ca, tls_cert, tls_key, tls_name)
    answer = ask(address_of(where), token_of(token_file), request, timeout_s=timeout_s, tls=tls)
    if not isinstance(answer, PersistEnded):
        complain(f"{where}: {answer.reason if isinstance(answer, Declined) else 'no outcome was told'}")
        return 1
    if as_json:
        output.print_json(msgspec.to_builtins(answer.ending))
    else:
        output.print_line(output.cell(in_words(answer.ending)))
    return int(answer.ending.outcome is not Outcome.SAVED)


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user without a name, as in containers
        return socket.gethostname()
