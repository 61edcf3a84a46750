"""Frames and descriptors between two processes: whole or not at all, and never waiting for the dead."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from swansong.errors import ProtocolError
from swansong.store.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel, int]]:
    """Two ends, and what ends the process at the other side of the second once it is closed."""
    first, second = socket.socketpair()
    alive = os.pidfd_open(os.getpid())
    dies, death = os.pipe()
    here, there = Channel(first, alive), Channel(second, dies)
    yield here, there, death
    here.close()
    there.close()
    os.close(death)


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_frame_arrives_whole_with_its_descriptors(ends: tuple[Channel, Channel, int], size: int) -> None:
    here, there, _ = ends
    passed = os.memfd_create("passed")
    os.write(passed, b"content")
    payload = os.urandom(size)
    sending = threading.Thread(target=here.send, args=(payload, (passed,)))
    sending.start()
    frame = there.receive(size)
    sending.join()
    os.close(passed)
    assert frame is not None
    assert frame[0] == payload
    (received,) = frame[1]
    assert os.pread(received, 10, 0) == b"content"
    assert not os.get_inheritable(received)
    os.close(received)


def test_one_frame_after_another(ends: tuple[Channel, Channel, int]) -> None:
    here, there, _ = ends
    assert here.send(b"one")
    assert here.send(b"two")
    assert [there.receive(9), there.receive(9)] == [(b"one", ()), (b"two", ())]


def test_too_long_a_frame_is_refused_before_it_is_read(ends: tuple[Channel, Channel, int]) -> None:
    here, there, _ = ends
    here.send(bytes(11))
    with pytest.raises(ProtocolError, match="a message of 11 bytes; at most 10 are taken"):
        there.receive(10)


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0", (9).to_bytes(8, "big") + b"four"], ids=["none", "head", "body"]
)
@pytest.mark.parametrize("how", ["it ends the stream", "it is dead, and the stream is held open"])
def test_a_frame_of_which_the_rest_never_comes_is_none(
    ends: tuple[Channel, Channel, int], sent: bytes, how: str
) -> None:
    here, there, death = ends
    here._socket.send(sent)
    if how == "it ends the stream":
        here.end()
    else:
        os.write(death, b"x")
    assert there.receive(9) is None


def test_what_was_sent_before_death_still_arrives(ends: tuple[Channel, Channel, int]) -> None:
    here, there, death = ends
    here.send(b"will")
    os.write(death, b"x")
    assert there.ended(None)
    assert there.receive(9) == (b"will", ())
    assert there.receive(9) is None


def test_sending_to_the_dead_does_not_wait(ends: tuple[Channel, Channel, int]) -> None:
    here, there, death = ends
    os.write(death, b"x")
    assert not there.send(bytes(5_000_000))  # more than a socket takes
    here.end()
    assert not there.send(b"anything")
