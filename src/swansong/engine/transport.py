"""Connections: a socket, TLS if there is any, and the codec's channel, which together never block.

`Link` is one end of one connection, driven by whoever selects on it. Memory per connection is bounded: one
read of `READ` bytes at a time, less than one frame of what came, one frame of what goes out, and `MAX_QUEUED`
messages that wait their turn, each kept once however many links it waits on. `connect` makes the end of a
rank or an operator.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from swansong.engine.address import Address, Endpoint
from swansong.engine.tls import ClientTls, Tls
from swansong.errors import ProtocolError, SelfConnectionError, UnreachableError
from swansong.protocol.codec import Channel, ChannelEvent, Failed, Opened, Reply, WireMessage
from swansong.protocol.handshake import NONCE, Identity, Token

READ: Final = 1 << 16
"""Bytes taken from a connection before others have their turn."""
MAX_QUEUED: Final = 1024
"""Messages that may wait for a peer that does not read."""

_LONGEST_S: Final = 3600.0
"""Of one wait in the kernel, which takes no infinite ones."""


def tune(sock: socket.socket, *, host_timeout_s: float) -> None:
    """No delays for small frames; the connection to a host that is silently gone ends after `host_timeout_s`.

    Keep-alive probes tell it of a quiet connection, TCP_USER_TIMEOUT of one with bytes on their way, which
    would else be repeated for a quarter of an hour (tcp(7)).
    """
    idle = max(1, int(host_timeout_s / 2))
    interval = 1 if host_timeout_s < 20 else 2
    probes = max(1, math.ceil((host_timeout_s - idle) / interval))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(host_timeout_s * 1000)))


class Link:
    """One end of one connection. Select on it; call `receive` when readable, `flush` when writable."""

    __slots__ = ("_broken", "_channel", "_finishing", "_queue", "_sock", "_tls", "_unsent", "error", "hold")

    def __init__(self, sock: socket.socket, channel: Channel, tls: Tls | None = None) -> None:
        """Takes the socket over. The handshake begins with the first `flush`."""
        sock.setblocking(False)
        self._sock, self._channel, self._tls = sock, channel, tls
        self._unsent = bytearray()
        self._queue: deque[WireMessage] = deque()
        self._broken = self._finishing = False
        self.error: ProtocolError | None = None
        """Why the channel failed; None: it has not."""
        self.hold: WireMessage | None = None
        """A queued message that is not to be sent yet, nor anything behind it."""
        self._put(channel.greeting)

    def __repr__(self) -> str:
        return f"Link({self._channel!r})"

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self._sock.fileno()

    @property
    def peer(self) -> Identity | None:
        """Who the other end has proved to be; None before that."""
        return self._channel.peer

    @property
    def ended(self) -> bool:
        """True once nothing can come any more: the other end closed, or the channel failed."""
        return self._channel.closed

    @property
    def blocked(self) -> bool:
        """True if something waits until the socket is writable."""
        return bool(self._unsent) and not self._broken

    @property
    def waiting(self) -> int:
        """Messages that were not begun to be sent."""
        return len(self._queue)

    @property
    def has_more(self) -> bool:
        """True if `flush` has something to do."""
        return not self._broken and bool(self._unsent or (self._queue and self._queue[0] is not self.hold))

    def receive(self) -> list[ChannelEvent]:
        """Take what has come, `READ` bytes at most, and return what it comes to; Failed is the last."""
        try:
            data = self._sock.recv(READ)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:  # reset, or the host is gone: an end like any other
            data = b""
        try:
            if data and self._tls is not None:
                data = self._tls.decrypt(data)
                self._put(b"")
                events = self._channel.receive(data)
            else:
                events = self._channel.receive(data) if data else self._channel.end()
        except ProtocolError as error:  # of TLS
            self._channel.end()
            events = [Failed(error)]
            self._unsent += self._tls.last_words() if self._tls is not None else b""
        for event in events:
            if isinstance(event, Reply):
                self._put(event.data)
            elif isinstance(event, Failed):
                self.error = event.error
        if self.ended:
            self._queue.clear()
        return [event for event in events if not isinstance(event, Reply)]

    def send(self, message: WireMessage) -> None:
        """Queue a message. ProtocolError if too many wait already."""
        if self._broken or self._finishing or self.ended:
            return  # the end of the connection says it
        if len(self._queue) >= MAX_QUEUED:
            raise ProtocolError(f"{self.peer} does not read: {MAX_QUEUED} messages wait for it")
        self._queue.append(message)

    def flush(self) -> None:
        """Send what can be sent at once. ProtocolError if a message is too large for a frame."""
        while self.has_more:
            if not self._unsent:
                self._put(self._channel.send(self._queue.popleft()))
            try:
                with memoryview(self._unsent) as view:
                    sent = self._sock.send(view)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # `receive` will tell the end, after what still came
                self._break()
                return
            del self._unsent[:sent]
        if self._finishing and not self._unsent:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Take no more messages; send what waits, and then the end. Go on flushing, `discard` what comes."""
        self._finishing, self.hold = True, None

    def discard(self) -> bool:
        """Throw away what has come; True once the other end has closed."""
        try:
            return not self._sock.recv(READ)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def close(self, *, reset: bool = False) -> None:
        """Close at once; what waits is not sent. A forked child closes its copy so, which the other end does
        not notice. `reset` ends the connection itself, without leaving a trace of it in the kernel."""
        self._break()
        if reset:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._channel.end()
        self._sock.close()

    def _put(self, data: bytes) -> None:
        self._unsent += self._tls.encrypt(data) if self._tls is not None else data

    def _break(self) -> None:
        self._broken = True
        self._unsent = bytearray()
        self._queue.clear()


class Connection:
    """A rank's or an operator's end, its handshake done. Use as `with connect(...) as connection:`.

    Blocking use: `send` and `receive`. In a selector: register for reading, and for writing while
    `wants_write`; call `poll` when it fires.
    """

    def __init__(self, link: Link, where: str) -> None:
        """`where` is the other end's address, for messages."""
        self._link, self._where = link, where
        self._inbox: deque[WireMessage] = deque()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The socket's descriptor, for a selector."""
        return self._link.fileno()

    @property
    def peer(self) -> Identity:
        """The controller, as it has proved to be."""
        peer = self._link.peer
        if peer is None:
            raise ProtocolError(f"{self._where}: the handshake is not done")
        return peer

    @property
    def wants_write(self) -> bool:
        """True if something waits until the socket is writable."""
        return self._link.blocked

    @property
    def ended(self) -> bool:
        """True once nothing can come any more and everything that came was taken."""
        return self._link.ended and not self._inbox

    @property
    def error(self) -> ProtocolError | None:
        """What the other end did wrong, if that ended the connection."""
        return self._link.error

    def send(self, message: WireMessage) -> None:
        """Send as much as goes at once, the rest with the next calls; nothing if the connection has ended.

        ProtocolError if the message is too large, or too many wait.
        """
        self._link.send(message)
        self._link.flush()

    def poll(self) -> list[WireMessage]:
        """Send what waits, and return what has come; neither waits."""
        self._link.flush()
        if not self._link.ended:
            self._take(self._link.receive())
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def receive(self, timeout_s: float) -> WireMessage | None:
        """The next message; None if none came in time. UnreachableError once the connection has ended."""
        self._pump(time.monotonic() + timeout_s, lambda: bool(self._inbox))
        if self._inbox:
            return self._inbox.popleft()
        if not self._link.ended:
            return None
        if self._link.error is not None:
            raise self._link.error
        raise UnreachableError(errno.ECONNRESET, f"{self._where}: the connection ended")

    def handshake(self, deadline: float) -> None:
        """Prove, and have proved; `deadline` is monotonic. ProtocolError, UnreachableError."""
        self._pump(deadline, lambda: self._link.peer is not None)
        if self._link.error is not None:
            raise self._link.error
        if self._link.peer is None:
            message = f"{self._where}: whoever listens there did not answer in time"
            raise UnreachableError(errno.ETIMEDOUT, message)

    def finish(self, timeout_s: float) -> None:
        """Send what waits and the end, give the other end so long to close, and close."""
        self._link.finish()
        deadline = time.monotonic() + timeout_s
        with suppress(ProtocolError):
            self._link.flush()
            while _wait(self._link, deadline):
                self._link.flush()
                if self._link.discard():
                    break
        self._link.close()

    def close(self, *, reset: bool = False) -> None:
        """Close at once. Idempotent."""
        self._link.close(reset=reset)

    def _pump(self, deadline: float, done: Callable[[], bool]) -> None:
        """Send and receive until `done()`, the end, or the deadline."""
        self._link.flush()
        while not done() and not self._link.ended and _wait(self._link, deadline):
            self._link.flush()
            self._take(self._link.receive())
            self._link.flush()

    def _take(self, events: list[ChannelEvent]) -> None:
        self._inbox += [event for event in events if not isinstance(event, Reply | Opened | Failed)]


def connect(
    address: Address,
    token: Token,
    me: Identity,
    *,
    timeout_s: float,
    host_timeout_s: float = 10.0,
    tls: ClientTls | ssl.SSLContext | None = None,
) -> Connection:
    """Connect to a controller and do the handshake in `timeout_s`; every socket address is tried in turn.

    Raises UnreachableError if nobody answers, and whatever is wrong with who does: WrongJobError,
    WrongVersionError, SelfConnectionError, AuthenticationError, ProtocolError.
    """
    deadline = time.monotonic() + timeout_s
    left = len(address.endpoints)
    why: UnreachableError | None = None
    for endpoint in address.endpoints:
        now = time.monotonic()
        ends = now + max(0.0, deadline - now) / left
        left -= 1
        secure = ClientTls.of(tls).begin(address.host) if tls is not None else None
        try:
            sock = _dial(endpoint, address, ends, host_timeout_s)
        except UnreachableError as error:
            why = error
            continue
        connection = Connection(Link(sock, Channel(token, me, nonce=os.urandom(NONCE)), secure), str(address))
        try:
            connection.handshake(ends)
        except UnreachableError as error:
            connection.close()
            why = error
        except ProtocolError as error:
            # A connection to itself would keep the port from whoever is to listen there.
            connection.close(reset=isinstance(error, SelfConnectionError))
            raise
        else:
            return connection
    raise why or UnreachableError(errno.EHOSTUNREACH, f"{address}: no address to try")


def _dial(endpoint: Endpoint, address: Address, deadline: float, host_timeout_s: float) -> socket.socket:
    try:
        sock = socket.socket(endpoint.family, socket.SOCK_STREAM)
    except OSError as error:
        raise UnreachableError(error.errno, f"{address}: {error.strerror}") from error
    try:
        sock.settimeout(min(max(0.001, deadline - time.monotonic()), _LONGEST_S))
        sock.connect(endpoint.address)
        tune(sock, host_timeout_s=host_timeout_s)
    except TimeoutError as error:
        sock.close()
        raise UnreachableError(errno.ETIMEDOUT, f"{address}: no answer in time") from error
    except OSError as error:
        sock.close()
        raise UnreachableError(error.errno, f"{address}: {error.strerror}") from error
    return sock


def _wait(link: Link, deadline: float) -> bool:
    """Wait until a link can be read, or written if it wants to be; False: not before the deadline."""
    poller = select.poll()
    poller.register(link, select.POLLIN | (select.POLLOUT if link.blocked else 0))
    while (remaining := deadline - time.monotonic()) > 0:
        if poller.poll(math.ceil(min(remaining, _LONGEST_S) * 1000)):
            return True
    return False
