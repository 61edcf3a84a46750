"""A selector's wait ends when somebody else has something to say."""

from __future__ import annotations

import os
import select

from swansong.engine.waker import Waker


def readable(waker: Waker) -> bool:
    return bool(select.select([waker], [], [], 0)[0])


def test_wait_ends_once_however_often_it_was_woken() -> None:
    waker = Waker()
    waker.clear()
    assert not readable(waker)
    waker.wake()
    waker.wake()
    assert readable(waker)
    waker.clear()
    assert not readable(waker)
    waker.close()


def test_late_wake_does_not_reach_whoever_has_the_descriptor_by_then() -> None:
    reading, writing = os.pipe()
    waker = Waker()
    number = waker.fileno()
    waker.close()
    os.dup2(writing, number)
    waker.wake()
    waker.close()
    os.close(writing)
    os.close(number)
    assert os.read(reading, 8) == b""
    os.close(reading)
