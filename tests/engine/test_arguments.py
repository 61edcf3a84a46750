"""Arguments and addresses: what serves, and what is refused at once."""

from __future__ import annotations

import socket

import pytest

from engine_support import (
    INCARNATION,
    QUICK,
    TOKEN,
    Rank,
    Store,
    serve,
    status,
    world,
)
from swansong.engine.address import resolve
from swansong.engine.controller import ControllerServer
from swansong.engine.guests import Limits
from swansong.errors import AddressInUseError, ConfigError


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"port": 70000}, ConfigError, "70000"),
        ({"port": -1}, ConfigError, "-1"),
        ({"host": "192.0.2.77"}, ConfigError, "this machine has no such address"),
        ({"host": "no.such.host.invalid"}, ConfigError, "cannot be resolved"),
        ({"host": ""}, ConfigError, "wanted a host name"),
        ({"world_size": 0}, ConfigError, "world_size"),
        ({"incarnation": b"short"}, ConfigError, "incarnation"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_controller_that_cannot_be_says_why_at_once(
    wrong: dict[str, object], error: type[Exception], words: str
) -> None:
    given = {"world_size": 2, **wrong}
    with pytest.raises(error, match=words), serve(int(str(given.pop("world_size"))), **given):  # type: ignore[arg-type]
        pass


def test_rank_that_cannot_be_says_why() -> None:
    with serve(1) as served, pytest.raises(ConfigError, match="-2"):
        Rank(served, -2)


def test_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUseError, match=str(port)):
            ControllerServer(
                resolve("127.0.0.1", port),
                world_size=1,
                token=TOKEN,
                incarnation=INCARNATION,
                store=Store().calls,
                options=QUICK,
            )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::"])
def test_addresses_of_every_kind_serve(host: str) -> None:
    with serve(1, host=host) as served, world(served, 1):
        assert status(served).protected


def test_limits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="linger_s"):
        Limits(linger_s=0)
