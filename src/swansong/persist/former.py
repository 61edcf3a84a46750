"""Waiting for the controller of an earlier start: what it is saving is what this start is to resume from."""

from __future__ import annotations

import time
from typing import Final

from swansong.engine.address import Address
from swansong.engine.tls import ClientTls
from swansong.engine.transport import connect
from swansong.errors import ProtocolError, UnreachableError
from swansong.protocol.handshake import Identity, Role, Token

DIAL_S: Final = 1.0
_AGAIN_S: Final = 0.1


def outlasted(
    address: Address, token: Token, incarnation: bytes, tls: ClientTls | None, *, timeout_s: float
) -> bool:
    """Wait until no controller of another start of this job serves at `address`; False: one still does.

    One that is asked ends its incident, and then itself. A stranger there is nothing to wait for.
    """
    me = Identity(role=Role.RANK, rank=0, incarnation=incarnation, generation=-1)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = connect(address, token, me, timeout_s=DIAL_S, tls=tls)
        except (UnreachableError, ProtocolError):
            return True
        served = connection.peer.incarnation
        connection.close()
        if served == incarnation:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_AGAIN_S)
