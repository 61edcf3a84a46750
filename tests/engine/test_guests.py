"""The table of connections: who is watched for what, and whose time is up."""

from __future__ import annotations

import os
import selectors
import socket

from engine_support import INCARNATION, TOKEN
from swansong.engine.guests import READ, WRITE, Guest, Guests, Limits, Standing
from swansong.engine.transport import Link
from swansong.protocol import messages as m
from swansong.protocol.codec import Channel
from swansong.protocol.handshake import Identity, Role

CONTROLLER = Identity(role=Role.CONTROLLER, incarnation=INCARNATION, generation=7)
RANK = Identity(role=Role.RANK, rank=0, incarnation=INCARNATION)


def ends() -> tuple[Link, Link]:
    """A controller's end and a rank's, their handshake not begun."""
    socks = socket.socketpair()
    pairs = zip(socks, (CONTROLLER, RANK), strict=True)
    one, other = (Link(sock, Channel(TOKEN, me, nonce=os.urandom(32))) for sock, me in pairs)
    return one, other


def test_blocked_connection_is_watched_for_room_until_everything_is_sent() -> None:
    happened: list[int] = []
    with selectors.DefaultSelector() as selector:
        guests = Guests(selector, lambda _, events: happened.append(events), Limits(), 1)
        mine, theirs = ends()
        guest = guests.admit(mine, "here", now=0.0)
        while mine.peer is None or theirs.peer is None:
            for one in (mine, theirs):
                one.flush()
                one.receive()
        for _ in range(3):
            mine.send(m.Refused(reason="x" * 900_000, retry=False))
        mine.flush()
        guests.listen_for_room(guest)
        assert guest.events == READ | WRITE
        heard = 0
        while heard < 3:
            heard += len(theirs.receive())
            for key, events in selector.select(0):
                key.data(events)
                mine.flush()
                guests.listen_for_room(guest)
        assert WRITE in happened
        assert guest.events == READ
        guests.remove(guest)
        theirs.close()


def test_time_to_stay_begins_anew_with_a_standing() -> None:
    with selectors.DefaultSelector() as selector:
        guests = Guests(selector, lambda _, __: None, Limits(handshake_timeout_s=5, linger_s=2), 1)
        links = [ends()[0] for _ in range(3)]
        first, second, third = (guests.admit(link, "here", now=float(at)) for at, link in enumerate(links))
        assert guests.next_deadline() == 5.0
        guests.move(first, Standing.RANK, now=3.0)
        guests.move(third, Standing.LEAVING, now=3.0)
        assert guests.next_deadline() == 5.0
        assert guests.overdue(now=5.5) == [third]
        assert set(map(id, guests.overdue(now=6.0))) == {id(second), id(third)}
        assert [guest.number for guest in guests.present()] == [1, 2]
        for guest in guests.everybody():
            guests.remove(guest)
        assert (len(guests), guests.next_deadline()) == (0, None)


def test_number_is_not_given_twice() -> None:
    with selectors.DefaultSelector() as selector:
        guests = Guests(selector, lambda _, __: None, Limits(), 1)
        numbers: list[int] = []
        for _ in range(3):
            guest: Guest = guests.admit(ends()[0], "here", now=0.0)
            numbers.append(guest.number)
            guests.remove(guest)
            assert guests.get(guest.number) is None
        assert len(set(numbers)) == 3
