"""Waiting for the controller of an earlier start of the job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from array_job import free_port
from swansong.engine.address import resolve
from swansong.engine.controller import ControllerServer
from swansong.engine.storekeeper import StoreCalls
from swansong.persist.former import outlasted
from swansong.protocol.handshake import Token
from swansong.protocol.options import ProtocolOptions

TOKEN, OTHER = Token(bytes(range(32))), Token(bytes(32))
THIS, BEFORE = bytes(16), bytes(range(16))


@contextmanager
def serving(incarnation: bytes, token: Token = TOKEN) -> Iterator[tuple[Any, threading.Thread]]:
    """A controller that waits for its ranks, and its thread."""

    def refuse(*_: object) -> Any:
        pytest.fail("nothing is to be stored")

    calls = StoreCalls(prepare=refuse, commit=refuse, discard=refuse, report=refuse)
    address = resolve("127.0.0.1", free_port())
    with ControllerServer(
        address, world_size=2, token=token, incarnation=incarnation, store=calls, options=ProtocolOptions()
    ) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield address, thread
        finally:
            server.stop("the test is over")
            thread.join()


def test_nobody_there_is_nothing_to_wait_for() -> None:
    assert outlasted(resolve("127.0.0.1", free_port()), TOKEN, THIS, None, timeout_s=30.0)


def test_the_controller_of_an_earlier_start_ends_and_is_waited_for() -> None:
    with serving(BEFORE) as (address, thread):
        assert outlasted(address, TOKEN, THIS, None, timeout_s=30.0)
        thread.join(30.0)
        assert not thread.is_alive()


def test_the_controller_of_this_start_is_not_waited_for() -> None:
    with serving(THIS) as (address, thread):
        assert outlasted(address, TOKEN, THIS, None, timeout_s=30.0)
        assert thread.is_alive()


def test_a_stranger_is_not_waited_for() -> None:
    with serving(BEFORE, OTHER) as (address, thread):
        assert outlasted(address, TOKEN, THIS, None, timeout_s=30.0)
        assert thread.is_alive()
