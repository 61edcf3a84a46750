"""What the tests of the controller's port have in common: connections made by hand."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from engine_support import INCARNATION, TOKEN
from swansong.engine.address import Address
from swansong.protocol.codec import Channel, Opened, Reply
from swansong.protocol.handshake import Identity, Role

OPERATOR = Identity(role=Role.OPERATOR)


def rank_identity(rank: int) -> Identity:
    return Identity(role=Role.RANK, rank=rank, incarnation=INCARNATION)


def dial(address: Address) -> socket.socket:
    sock = socket.create_connection((address.host, address.port), timeout=20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def proved(address: Address, me: Identity) -> tuple[socket.socket, Channel]:
    """A connection whose handshake is done, and what makes its frames."""
    sock, channel = dial(address), Channel(TOKEN, me, nonce=os.urandom(32))
    sock.sendall(channel.greeting)
    while channel.peer is None:
        if not (data := sock.recv(65536)):
            raise ConnectionResetError("had to make room")
        for event in channel.receive(data):
            if isinstance(event, Reply):
                sock.sendall(event.data)
            else:
                assert isinstance(event, Opened)
    return sock, channel


def ended(sock: socket.socket) -> bool:
    """Wait until the controller has ended a connection."""
    with sock, suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True
