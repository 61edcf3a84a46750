"""`swansong status`: how a running job stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

from swansong.cli import output, text
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
from swansong.engine.inquiry import ask, watch
from swansong.protocol.messages import Outcome
from swansong.protocol.operator import Closed, Declined, Ending, RankStatus, Status, StatusRequest
from swansong.store.clock import SystemClock


def command(
    where: Where,
    token_file: TokenFile = None,
    watched: Annotated[bool, typer.Option("--watch", help="Go on, until the controller ends.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.1, metavar="SECONDS", help="How often, with --watch.")
    ] = 1.0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait.")] = 10.0,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Show how a running job stands, and whether its state would be saved if something went wrong now.

    The exit code is 1 if it would not, or if nobody answers. With --watch it is 0 once the controller has
    ended, unless its last incident was not saved; 1 if it is gone without a word; 130 after Ctrl-C. --json
    --watch prints one document a line.

    \b
    Examples:
      swansong status node0:2000 --token-file checkpoints/.swansong-token
      swansong status node0:2000 --token-file checkpoints/.swansong-token --json | jq .protected
      swansong status node0:2000 --token-file checkpoints/.swansong-token --watch --every 5
    """
    address, token = address_of(where), token_of(token_file)
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    if watched:
        return _watch(where, watch(address, token, every_s=every_s, timeout_s=timeout_s, tls=tls), as_json)
    answer = ask(address, token, StatusRequest(), timeout_s=timeout_s, tls=tls)
    if not isinstance(answer, Status):
        complain(f"{where}: {answer.reason if isinstance(answer, Declined | Closed) else 'no status'}")
        return 1
    if as_json:
        output.print_json(msgspec.to_builtins(answer))
    else:
        output.print_block(*_lines(answer))
    return int(not answer.protected)


def _watch(where: str, answers: Iterable[Status | Closed], as_json: bool) -> int:
    closed = None
    with output.Screen() as screen:
        for answer in answers:
            if isinstance(answer, Closed):
                closed = answer
            elif as_json:
                output.print_json_line(msgspec.to_builtins(answer))
            else:
                at = output.line(output.cell(text.moment(SystemClock().wall()), "dim"))
                screen.show(at, *_lines(answer))
    if closed is None:
        return 1
    last = f"; the last incident: {in_words(closed.last)}" if closed.last is not None else ""
    complain(f"{where}: the controller ended: {closed.reason}{last}")
    return int(closed.last is not None and closed.last.outcome is not Outcome.SAVED)


def _lines(status: Status) -> Iterator[RenderableType]:
    counts = ", ".join(f"{number} {state}" for state, number in sorted(status.counts.items()))
    rows = [
        ("protected", "yes" if status.protected else f"no: {status.reason}"),
        ("phase", f"{status.phase}, for {text.duration(status.phase_s)}"),
        ("ranks", f"{status.world_size}: {counts}"),
        ("controller", f"up for {text.duration(status.up_s)}"),
    ]
    if status.incident is not None:
        faults = "; ".join(f"{fault.kind.value} (rank {fault.rank})" for fault in status.incident.faults)
        rows.append(("incident", f"{status.incident.incident}: {faults}"))
    if status.last is not None:
        rows.append(("last incident", in_words(status.last)))
    for name, value in rows:
        yield output.line(output.cell(f"{name:<14}", "bold"), output.cell(value))
    yield output.cell("")  # an empty line
    columns = [
        output.number("rank"),
        output.fixed("state"),
        output.number("for"),
        output.fixed("step"),
        output.words("host"),
        output.number("process"),
    ]
    yield output.table(columns, [_row(rank) for rank in status.ranks], optional=("process", "host"))
    if (more := status.world_size - len(status.ranks)) > 0:
        yield output.line(f"and {text.count(more, 'rank')} more")


def _row(rank: RankStatus) -> list[Text]:
    step = None
    if rank.step is not None:
        age = f", {text.duration(rank.step_age_s)} ago" if rank.step_age_s is not None else ""
        step = f"{rank.step}{age}"
    style = "" if rank.state == "connected" else "yellow"
    return [
        output.cell(rank.rank),
        output.cell(rank.state, style),
        output.cell(text.duration(rank.state_s)),
        output.cell(step),
        output.cell(rank.host or None),
        output.cell(rank.pid),
    ]


def in_words(ending: Ending) -> str:
    """How an incident ended, in one line."""
    if ending.path:
        return f"{ending.outcome.value}: step {ending.step} in {ending.path}"
    return f"{ending.outcome.value}{f': {ending.reason}' if ending.reason else ''}"
