"""Where a controller listens: host and port, checked, resolved, bound."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from swansong.errors import AddressInUseError, ConfigError

MAX_PORT: Final = 65535

_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What bind or socket say of an address that no interface of this machine has."""


class Endpoint(NamedTuple):
    """One socket address."""

    family: int
    address: Any
    """As `socket.connect` of that family takes it."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, with the socket addresses that they stand for."""

    host: str
    """As it was given: an IPv4 or IPv6 address, or a name."""
    port: int
    endpoints: tuple[Endpoint, ...]
    """At least one, in the order in which to try them."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(host: str, port: int) -> Address:
    """Check and resolve. Asks the name service, which may take seconds; call it once and keep the result.

    Port 0 is for whoever listens: any free port. Raises ConfigError for a port outside 0 to 65535, an empty
    host, and a name that is not known.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= MAX_PORT:
        raise ConfigError(f"controller port: wanted 1 to {MAX_PORT}, got {port!r}")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"controller address: wanted a host name or an IP address, got {host!r}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"controller address {host!r}: cannot be resolved: {error}") from None
    endpoints = dict.fromkeys(Endpoint(family, address) for family, _, _, _, address in found)
    return Address(host, port, tuple(endpoints))


def parse_address(text: str) -> Address:
    """Resolve HOST:PORT, an IPv6 address in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or (":" in host and not host.startswith("[")):
        raise ConfigError(f"address {text!r}: wanted HOST:PORT, an IPv6 address as in [::1]:2000")
    return resolve(host.removeprefix("[").removesuffix("]"), int(port[:6]))


def listen(address: Address, *, backlog: int) -> list[socket.socket]:
    """Listen on every socket address of `address` that this machine has; non-blocking sockets.

    Raises ConfigError if the machine has none of them or the port needs privileges, AddressInUseError if
    another process listens there.
    """
    port = address.port
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        for family, where in address.endpoints:
            try:
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
                listener.bind((where[0], port, *where[2:]))
                listener.listen(backlog)
            except OSError as error:
                _explain(error, address)
                continue
            listener.setblocking(False)
            listeners.append(listener)
            port = listener.getsockname()[1]
        if not listeners:
            raise ConfigError(
                f"controller address {address}: this machine has no such address; "
                "the controller runs on the host of rank 0, whose address is wanted here"
            )
        stack.pop_all()
        return listeners


def _explain(error: OSError, address: Address) -> None:
    """Raise what an error of bind means; return if the address is only not of this machine."""
    if error.errno in _NOT_HERE:
        return
    if error.errno == errno.EADDRINUSE:
        message = f"controller address {address}: another process listens there; choose another port"
        raise AddressInUseError(error.errno, message) from None
    if error.errno == errno.EACCES:
        raise ConfigError(f"controller address {address}: ports below 1024 need privileges") from None
    raise error
