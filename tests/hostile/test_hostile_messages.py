"""Frames and messages that should not be, at the controller's port: they end a connection, nothing else."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codec_support import KINDS, messages
from engine_support import (
    TOKEN,
    Rank,
    finish_incident,
    member,
    register_all,
    serve,
    until,
    world,
)
from port_support import OPERATOR, dial, ended, proved, rank_identity
from swansong.engine.guests import Limits
from swansong.engine.inquiry import ask
from swansong.protocol import messages as m
from swansong.protocol.codec import Channel, Opened, Reply
from swansong.protocol.frames import HEAD, TAG
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.operator import Declined, OperatorRequest, PersistRequest, Status, StatusRequest
from swansong.protocol.options import ProtocolOptions

FREEZE_ALL = m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0))
"""What must have no effect when it comes from who may not say it."""


def wrong_tag(channel: Channel) -> bytes:
    frame = channel.send(FREEZE_ALL)
    return frame[:-TAG] + bytes(byte ^ 1 for byte in frame[-TAG:])


def altered(channel: Channel) -> bytes:
    frame = bytearray(channel.send(FREEZE_ALL))
    frame[HEAD + 3] ^= 0x10
    return bytes(frame)


def out_of_order(channel: Channel) -> bytes:
    first, second = channel.send(m.Goodbye()), channel.send(FREEZE_ALL)
    return second + first


def not_from_the_start(channel: Channel) -> bytes:
    channel.send(m.Goodbye())
    return channel.send(FREEZE_ALL)


def too_long(channel: Channel) -> bytes:
    return (1 << 20).to_bytes(HEAD, "big") + channel.send(FREEZE_ALL)[HEAD:]


def empty(channel: Channel) -> bytes:
    return bytes(HEAD) + channel.send(FREEZE_ALL)[HEAD:]


def not_registered(channel: Channel) -> bytes:
    return channel.send(FREEZE_ALL)


@pytest.mark.parametrize(
    "frames",
    [wrong_tag, altered, out_of_order, not_from_the_start, too_long, empty, not_registered],
    ids=lambda frames: frames.__name__,
)
def test_wrong_frames_of_a_proved_rank_end_its_connection_and_have_no_effect(
    frames: Callable[[Channel], bytes],
) -> None:
    with serve(2, limits=Limits(linger_s=5)) as served, world(served, 2) as ranks:
        sock, channel = proved(served.address, rank_identity(0))
        sock.sendall(frames(channel))
        sock.shutdown(socket.SHUT_WR)
        assert ended(sock)
        answer = ask(served.address, TOKEN, StatusRequest(), timeout_s=20)
        assert isinstance(answer, Status)
        assert (answer.phase, answer.protected) == ("training", True)
        assert ranks[1].connection.receive(0) is None


def test_what_a_straggler_says_behind_its_proof_is_not_heard() -> None:
    old = Identity(role=Role.RANK, rank=0, incarnation=b"a former start..", generation=5)
    with serve(1) as served:
        sock, channel = dial(served.address), Channel(TOKEN, old, nonce=os.urandom(32))
        sock.sendall(channel.greeting)
        proof = b""
        while channel.peer is None:
            for event in channel.receive(sock.recv(65536)):
                proof += event.data if isinstance(event, Reply) else b""
        sock.sendall(proof + channel.send(m.Register(member=member(0), world_size=1)))
        assert ended(sock)
        answer = ask(served.address, TOKEN, StatusRequest(), timeout_s=20)
        assert isinstance(answer, Status)
        assert answer.counts == {"missing": 1}


def test_rank_that_reads_slowly_gets_all_of_a_large_map() -> None:
    keys = tuple(f"component {number} {'x' * 80}" for number in range(4000))
    with serve(1) as served, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((served.address.host, served.address.port))
        channel = Channel(TOKEN, rank_identity(0), nonce=os.urandom(32))
        sock.sendall(channel.greeting)
        heard: list[object] = []
        while not any(isinstance(message, m.World) for message in heard):
            for event in channel.receive(sock.recv(2000)):
                if isinstance(event, Reply):
                    sock.sendall(event.data)
                elif isinstance(event, Opened):
                    sock.sendall(channel.send(m.Register(member=member(0, keys=keys), world_size=1)))
                else:
                    heard.append(event)


def test_frames_of_one_connection_replayed_on_another_are_refused() -> None:
    with serve(1) as served, world(served, 1):
        first, channel = proved(served.address, rank_identity(0))
        heard = channel.greeting + channel.send(FREEZE_ALL)
        first.close()
        with dial(served.address) as second:
            second.sendall(heard)
            assert ended(second)
        answer = ask(served.address, TOKEN, StatusRequest(), timeout_s=20)
        assert isinstance(answer, Status)
        assert answer.protected


def test_rank_is_bound_to_its_connection() -> None:
    with serve(2) as served, world(served, 2) as ranks:
        sock, channel = proved(served.address, rank_identity(0))
        sock.sendall(channel.send(m.Register(member=ranks[1].member, world_size=2)))
        assert ended(sock)
        assert until(lambda: [note for note in served.notes if "registers as rank 1" in note])


def test_operator_that_floods_and_never_reads_is_sent_away_and_delays_nobody() -> None:
    with serve(2, options=ProtocolOptions(reconnect_s=60)) as served, world(served, 2) as ranks:
        sock, channel = proved(served.address, OPERATOR)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frames = b"".join(channel.send(StatusRequest()) for _ in range(60_000))
        sender = threading.Thread(target=lambda: _send_all(sock, frames))
        sender.start()
        ranks[1].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=1)))
        assert finish_incident(ranks, step=2).outcome is m.Outcome.SAVED
        until(lambda: [note for note in served.notes if "does not read the answers" in note])
        sender.join()
        sock.close()


def _send_all(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        sock.sendall(data)


SAID_BY_RANKS = st.one_of(
    [messages(kind) for kind, (speaker, _) in KINDS.items() if speaker.role is Role.RANK]
)
ASKED = st.one_of([messages(kind) for kind, (who, _) in KINDS.items() if who.role is Role.OPERATOR])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(SAID_BY_RANKS, max_size=5), asked=st.lists(ASKED, max_size=2))
def test_legal_frames_in_any_state_do_not_end_the_controller(
    said: list[m.ToController], asked: list[OperatorRequest]
) -> None:
    with serve(5) as served:  # its end raises whatever the controller died of
        with Rank(served, 3) as rank:
            rank.register(5)
            rank.hear(m.Welcome)
            for message in said:
                rank.say(message)
            rank.connection.finish(20)
        with suppress(OSError):  # it may have closed, as it should when all have left
            sock, channel = proved(served.address, OPERATOR)
            with sock:
                sock.sendall(b"".join(map(channel.send, asked)))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(SAID_BY_RANKS, max_size=6))
def test_legal_frames_of_a_registered_rank_in_an_incident_do_not_end_the_controller(
    said: list[m.ToController],
) -> None:
    with serve(2) as served, world(served, 2) as ranks:
        ranks[1].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=1)))
        incident = ranks[0].hear(m.Freeze).incident
        for message in said:
            if isinstance(message, m.StateReport | m.Progress | m.PartDone | m.PartFailed):
                fields = {name: getattr(message, name) for name in message.__struct_fields__}
                message = type(message)(**fields | {"incident": incident})
            if isinstance(message, m.Register):
                continue
            ranks[0].say(message)
        ranks[0].report(incident, 4)
        ranks[0].connection.finish(20)


def test_operator_may_not_speak_for_a_rank() -> None:
    with serve(1) as served, world(served, 1):
        rank_sock, rank_channel = proved(served.address, rank_identity(0))
        sock, _ = proved(served.address, OPERATOR)
        sock.sendall(rank_channel.send(FREEZE_ALL))
        assert ended(sock)
        rank_sock.close()
        answer = ask(served.address, TOKEN, StatusRequest(), timeout_s=20)
        assert isinstance(answer, Status)
        assert answer.protected


def test_only_so_many_operators_stay() -> None:
    with serve(1, limits=Limits(max_operators=2, linger_s=0.2)) as served:
        operators = [proved(served.address, OPERATOR)[0] for _ in range(3)]
        assert ended(operators[0])
        assert ask(served.address, TOKEN, PersistRequest(who="x"), timeout_s=20) == Declined(
            reason="nothing is protected now: the controller is gathering"
        )
        for sock in operators[1:]:
            sock.close()


def test_legal_registration_works_while_connections_come_and_go() -> None:
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            dial(served.address).close()

    with serve(4) as served:
        thread = threading.Thread(target=come_and_go)
        thread.start()
        try:
            ranks = [Rank(served, rank) for rank in range(4)]
            register_all(served, ranks)
        finally:
            stop.set()
            thread.join()
        for rank in ranks:
            rank.connection.close()
