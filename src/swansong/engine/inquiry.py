"""An operator's question to a controller, and its answer."""

from __future__ import annotations

import errno
import ssl
import time
from collections.abc import Callable

from swansong.engine.address import Address
from swansong.engine.transport import connect
from swansong.errors import UnreachableError
from swansong.protocol.handshake import Identity, Role, Token
from swansong.protocol.operator import Declined, OperatorRequest, PersistBegun, PersistEnded, Status

Answer = Status | PersistEnded | Declined


def ask(
    address: Address,
    token: Token,
    request: OperatorRequest,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    begun: Callable[[PersistBegun], object] | None = None,
) -> Answer:
    """Ask, and wait for the last answer: Status; or, for a PersistRequest, PersistEnded or Declined.

    `begun` hears of the incident that a PersistRequest opened. Raises UnreachableError if nobody answers in
    `timeout_s`, and what `connect` raises.
    """
    deadline = time.monotonic() + timeout_s
    with connect(address, token, Identity(role=Role.OPERATOR), timeout_s=timeout_s, tls=tls) as connection:
        connection.send(request)
        what = f"{address}: no answer in {timeout_s:g} s"
        while (remaining := deadline - time.monotonic()) > 0:
            match connection.receive(remaining):
                case Status() | PersistEnded() | Declined() as answer:
                    return answer
                case PersistBegun() as answer:
                    what = f"{address}: incident {answer.incident} began, and did not end in {timeout_s:g} s"
                    if begun is not None:
                        begun(answer)
        raise UnreachableError(errno.ETIMEDOUT, what)
