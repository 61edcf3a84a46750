"""A peer without the job's token gives orders: it is refused and noted, and nothing comes of it."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from engine_support import TOKEN, member, serve, status, until, world
from port_support import OPERATOR, dial, ended, rank_identity
from swansong.protocol import messages as m
from swansong.protocol.frames import FrameReader, FrameWriter, plain_frame
from swansong.protocol.handshake import Handshake, Identity, Token
from swansong.protocol.messages import FaultKind
from swansong.protocol.operator import PersistRequest

REGISTER = m.Register(member=member(0), world_size=2)
FAULT = m.FaultReport(fault=m.Fault(kind=FaultKind.REQUESTED, rank=-1, what="stop, all of you"))
ORDER = PersistRequest(who="an intruder")


class Claim(Token):
    """Names another's job, which is public, and does not have its secret."""

    @property
    def job(self) -> bytes:
        return TOKEN.job


def first_frame(sock: socket.socket) -> bytes:
    reader = FrameReader()
    while (payload := reader.next()) is None:
        reader.feed(sock.recv(65536))
    return payload


def behind_a_false_proof(sock: socket.socket, me: Identity, *messages: object) -> bytes:
    """All that an intruder can send: a proof under a token of its own, and messages under its keys."""
    claim = Claim(os.urandom(32))
    handshake = Handshake(claim, me, os.urandom(32))
    sock.sendall(plain_frame(handshake.greeting))
    theirs = first_frame(sock)
    proof = handshake.hear_greeting(theirs)
    writer = FrameWriter(claim.mac(b"swansong key" + bytes([me.role]) + theirs + handshake.greeting))
    frames = [writer.frame(msgspec.msgpack.encode(message)) for message in messages]
    return plain_frame(proof) + b"".join(frames)


@pytest.mark.parametrize(
    ("me", "messages"),
    [(rank_identity(0), (REGISTER, FAULT)), (OPERATOR, (ORDER,))],
    ids=["a fault", "an order"],
)
def test_fault_or_order_of_a_peer_without_the_token_is_refused_and_noted_and_has_no_effect(
    me: Identity, messages: tuple[object, ...]
) -> None:
    with serve(2) as served, world(served, 2) as ranks:
        sock = dial(served.address)
        sock.sendall(behind_a_false_proof(sock, me, *messages))

        assert ended(sock)
        assert until(lambda: [note for note in served.notes if f"{me} has not proved" in note])
        assert status(served).protected
        assert [rank.connection.receive(0) for rank in ranks] == [None, None]
        assert served.store.asked == []
