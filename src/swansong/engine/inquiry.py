"""An operator's questions to a controller, and its answers."""

from __future__ import annotations

import errno
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from swansong.engine.address import Address
from swansong.engine.tls import ClientTls
from swansong.engine.transport import Connection, connect
from swansong.errors import SelfConnectionError, UnreachableError
from swansong.protocol.codec import WireMessage
from swansong.protocol.handshake import Identity, Role, Token
from swansong.protocol.operator import (
    Closed,
    Declined,
    OperatorRequest,
    PersistBegun,
    PersistEnded,
    Status,
    StatusRequest,
)

Answer: TypeAlias = Status | PersistEnded | Declined | Closed

_ME: Final = Identity(role=Role.OPERATOR)
_RETRY_S: Final = 0.2
"""Between two tries to find a controller again."""
_QUIET_S: Final = 20.0
"""A controller sends operators away that ask nothing for longer than `Limits.operator_timeout_s`, 60 s."""


def ask(
    address: Address,
    token: Token,
    request: OperatorRequest,
    *,
    timeout_s: float,
    tls: ClientTls | ssl.SSLContext | None = None,
    begun: Callable[[PersistBegun], object] | None = None,
) -> Answer:
    """Ask, and wait for the last answer: Status; for a PersistRequest, PersistEnded or Declined; or Closed.

    `begun` hears of the incident that a PersistRequest opened. Raises UnreachableError if nobody answers in
    `timeout_s`, and what `connect` raises.
    """
    deadline = time.monotonic() + timeout_s
    with connect(address, token, _ME, timeout_s=timeout_s, tls=tls) as connection:
        connection.send(request)
        what = f"{address}: no answer in {timeout_s:g} s"
        while (remaining := deadline - time.monotonic()) > 0:
            match connection.receive(remaining):
                case Status() | PersistEnded() | Declined() | Closed() as answer:
                    return answer
                case PersistBegun() as answer:
                    what = f"{address}: incident {answer.incident} began, and did not end in {timeout_s:g} s"
                    if begun is not None:
                        begun(answer)
        raise UnreachableError(errno.ETIMEDOUT, what)


def watch(
    address: Address,
    token: Token,
    *,
    every_s: float,
    timeout_s: float,
    tls: ClientTls | ssl.SSLContext | None = None,
) -> Iterator[Status | Closed]:
    """Yield how the job stands, now and every `every_s` seconds; Closed is the last, and comes at once.

    A controller that goes without a word is looked for again, for its ranks start another: the next Status
    may be of that one. Raises UnreachableError if nobody answers at first, or later for `timeout_s`, and what
    `connect` raises.
    """
    give_up_at: float | None = None
    while True:
        try:
            with connect(address, token, _ME, timeout_s=timeout_s, tls=tls) as connection:
                for answer in _answers(connection, address, every_s=every_s, timeout_s=timeout_s):
                    yield answer
                    if isinstance(answer, Closed):
                        return
                    give_up_at = time.monotonic() + every_s + timeout_s
        except (UnreachableError, SelfConnectionError):
            if give_up_at is None or time.monotonic() >= give_up_at:
                raise
            time.sleep(_RETRY_S)


def _answers(
    connection: Connection, address: Address, *, every_s: float, timeout_s: float
) -> Iterator[Status | Closed]:
    """Of one connection; Closed is the last."""
    answer: WireMessage | None = None
    while not isinstance(answer, Closed):
        connection.send(StatusRequest())
        answer = connection.receive(timeout_s)
        if not isinstance(answer, Status | Closed):
            raise UnreachableError(errno.ETIMEDOUT, f"{address}: no answer in {timeout_s:g} s")
        yield answer
        due = time.monotonic() + every_s
        while not isinstance(answer, Closed) and (remaining := due - time.monotonic()) > 0:
            answer = connection.receive(min(remaining, _QUIET_S))
            if isinstance(answer, Closed):
                yield answer
            elif answer is None and remaining > _QUIET_S:
                connection.send(StatusRequest())  # only to be heard; the answer is passed over
