"""A controller's connections: accepted, read, written, sent away, without delaying one another.

Whoever can be read is read once, `transport.READ` bytes at most, before the next turn. What is to be sent
waits on its link, and is sent between turns, for `_SENDING_S` at most before the loop listens again.
"""

from __future__ import annotations

import errno
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from swansong.engine.address import Address, listen
from swansong.engine.guests import READ, WRITE, Guest, Guests, Limits, Standing
from swansong.engine.tls import Tls
from swansong.engine.transport import Link, tune
from swansong.errors import ProtocolError
from swansong.protocol.codec import Channel, ChannelEvent, WireMessage

_BACKLOG: Final = 1024
_ACCEPTS: Final = 32
"""Connections accepted before others have their turn."""
_SENDING_S: Final = 0.05
_PAUSE_S: Final = 1.0
"""How long nobody is accepted when there are no descriptors left."""
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Host(Protocol):
    """Whom a reception works for. All is called in the loop's thread."""

    def heard(self, guest: Guest, event: ChannelEvent) -> None:
        """Something came from a guest that is not leaving."""

    def lost(self, guest: Guest) -> None:
        """A guest is gone, or leaving: it will not be heard again."""

    def note(self, text: str) -> None:
        """Something for people."""


class Reception:
    """Listens from when it is made to `close`; accepts from `open` to `shut`."""

    def __init__(
        self,
        address: Address,
        selector: selectors.BaseSelector,
        host: Host,
        channel: Callable[[], Channel],
        limits: Limits,
        *,
        ranks: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """`channel` makes the controller's end of one connection. Raises what `listen` and `Tls` raise."""
        if tls is not None:
            Tls(tls, server=True)  # to refuse a context that will not do before anybody connects
        self._selector, self._host, self._channel, self._limits, self._tls = (
            selector,
            host,
            channel,
            limits,
            tls,
        )
        self._listeners = listen(address, backlog=_BACKLOG)
        self.port: Final[int] = self._listeners[0].getsockname()[1]
        """On which it listens."""
        self.guests = Guests(selector, self._ready, limits, ranks)
        self._unsent: dict[int, Guest] = {}
        """Guests that may have something to be sent."""
        self._accepting = False
        self._accept_again: float | None = None

    @property
    def busy(self) -> bool:
        """True if there is more to be sent at once."""
        return bool(self._unsent)

    def open(self) -> None:
        """Accept from now on."""
        self._accept_again = None
        if not self._accepting:
            self._accepting = True
            for listener in self._listeners:
                self._selector.register(listener, READ, lambda _, listener=listener: self._accept(listener))

    def shut(self) -> None:
        """Free the port; those who are here may stay."""
        self._stop_accepting(None)
        for listener in self._listeners:
            listener.close()

    def close(self) -> None:
        """End everything at once."""
        for guest in self.guests.everybody():
            self.guests.remove(guest)
        self.shut()

    def next_moment(self) -> float | None:
        """When `look_around` must be called at the latest."""
        moments = (self.guests.next_deadline(), self._accept_again)
        return min((moment for moment in moments if moment is not None), default=None)

    def look_around(self, now: float) -> None:
        """Do what is due: end whose time is up, send what waits."""
        for guest in self.guests.overdue(now):
            if guest.standing in (Standing.STRANGER, Standing.PROVED):
                self._host.note(
                    f"{guest}: did not say who it is within {self._limits.handshake_timeout_s:g} s"
                )
            self.remove(guest)
        if self._accept_again is not None and now >= self._accept_again:
            self.open()
        while self._unsent:
            self._flush(self._unsent.pop(next(iter(self._unsent))))
            if time.monotonic() >= now + _SENDING_S:
                return

    # -- what the host does with a guest ----------------------------------------------------------------

    def send(self, guest: Guest, message: WireMessage) -> None:
        """Send soon. A guest for which too much waits is sent away."""
        try:
            guest.link.send(message)
        except ProtocolError as error:
            self.send_away(guest, str(error))
        else:
            self.attend(guest)

    def attend(self, guest: Guest) -> None:
        """Look soon whether a guest has something to be sent."""
        self._unsent[guest.number] = guest

    def settle(self, guest: Guest, standing: Standing) -> None:
        """A guest is of a standing now; if there are too many like it, the oldest makes room."""
        self.guests.move(guest, standing, time.monotonic())
        self._make_room(standing)

    def leave(self, guest: Guest) -> None:
        """End a connection after what was sent. The host hears `lost`."""
        guest.link.finish()
        self.settle(guest, Standing.LEAVING)
        self.attend(guest)
        self._host.lost(guest)

    def send_away(self, guest: Guest, why: str) -> None:
        """End a connection at once, and note why. The host hears `lost`."""
        self._host.note(f"{guest}: {why}")
        self.remove(guest)

    def remove(self, guest: Guest) -> None:
        """End a connection at once, but for what goes out at once. The host hears `lost`."""
        with suppress(ProtocolError):
            guest.link.flush()
        was_leaving = guest.standing is Standing.LEAVING
        self.guests.remove(guest)
        if not was_leaving:
            self._host.lost(guest)

    # -- small things -----------------------------------------------------------------------------------

    def _stop_accepting(self, again: float | None) -> None:
        self._accept_again = again
        if self._accepting:
            self._accepting = False
            for listener in self._listeners:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, where = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    continue  # that connection is gone already
                self._no_descriptors()
                return
            self._admit(sock, f"{where[0]} port {where[1]}")

    def _no_descriptors(self) -> None:
        stranger = self.guests.oldest(Standing.LEAVING) or self.guests.oldest(Standing.STRANGER)
        if stranger is not None:
            self.remove(stranger)
            return
        self._host.note("no descriptors left: nobody is accepted for a moment")
        self._stop_accepting(time.monotonic() + _PAUSE_S)

    def _admit(self, sock: socket.socket, where: str) -> None:
        try:
            tune(sock, host_timeout_s=self._limits.host_timeout_s)
        except OSError:  # gone already
            sock.close()
            return
        secure = Tls(self._tls, server=True) if self._tls is not None else None
        guest = self.guests.admit(Link(sock, self._channel(), secure), where, time.monotonic())
        self._flush(guest)
        self._make_room(Standing.STRANGER)

    def _make_room(self, standing: Standing) -> None:
        surplus = self.guests.surplus(standing)
        if surplus is not None:
            if standing is not Standing.LEAVING:
                self._host.note(f"{surplus}: makes room, there are too many connections like it")
            self.remove(surplus)

    def _ready(self, guest: Guest, events: int) -> None:
        """A connection can be read or written. It may have been closed since the selector saw it."""
        if guest.link.fileno() < 0:
            return
        if events & WRITE:
            self.attend(guest)
        if not events & READ:
            return
        if guest.standing is Standing.LEAVING:
            if guest.link.discard():
                self.remove(guest)
            return
        for event in guest.link.receive():
            if not guest.here:
                return  # sent away for what came before
            self._host.heard(guest, event)
        if guest.link.ended:
            self.remove(guest)
        elif guest.link.has_more:
            self.attend(guest)

    def _flush(self, guest: Guest) -> None:
        if guest.link.fileno() < 0:
            return
        try:
            guest.link.flush()
        except ProtocolError as error:
            self.send_away(guest, str(error))
        else:
            self.guests.listen_for_room(guest)
