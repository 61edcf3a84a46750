"""`swansong status`: how a running job stands."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from swansong.cli import output, text
from swansong.cli.control import TokenFile, Where, address_of, token_of
from swansong.cli.ending import complain
from swansong.cli.options import AsJson, Debug
from swansong.engine.inquiry import ask
from swansong.protocol.operator import Declined, Ending, Status, StatusRequest


def command(
    where: Where,
    token_file: TokenFile = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait.")] = 10.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Show how a running job stands, and whether its state would be saved if something went wrong now.

    The exit code is 1 if it would not, or if nobody answers.

    \b
    Examples:
      swansong status node0:2000 --token-file checkpoints/.swansong-token
      swansong status node0:2000 --token-file checkpoints/.swansong-token --json | jq .protected
    """
    answer = ask(address_of(where), token_of(token_file), StatusRequest(), timeout_s=timeout_s)
    if not isinstance(answer, Status):
        complain(f"{where}: {answer.reason if isinstance(answer, Declined) else 'no status was given'}")
        return 1
    if as_json:
        output.print_json(msgspec.to_builtins(answer))
    else:
        _print(answer)
    return int(not answer.protected)


def _print(status: Status) -> None:
    counts = ", ".join(f"{number} {state}" for state, number in sorted(status.counts.items()))
    rows = [
        ("protected", "yes" if status.protected else f"no: {status.reason}"),
        ("phase", status.phase),
        ("ranks", f"{status.world_size}: {counts}"),
        ("controller", f"up for {text.duration(status.up_s)}"),
    ]
    if status.incident is not None:
        faults = "; ".join(f"{fault.kind.value} (rank {fault.rank})" for fault in status.incident.faults)
        rows.append(("incident", f"{status.incident.incident}: {faults}"))
    if status.last is not None:
        rows.append(("last incident", in_words(status.last)))
    for name, value in rows:
        output.print_line(output.cell(f"{name:<14}", "bold"), output.cell(value))


def in_words(ending: Ending) -> str:
    """How an incident ended, in one line."""
    if ending.path:
        return f"{ending.outcome.value}: step {ending.step} in {ending.path}"
    return f"{ending.outcome.value}{f': {ending.reason}' if ending.reason else ''}"
