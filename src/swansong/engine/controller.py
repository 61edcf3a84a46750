"""The loop around the controller machine: connections, deadlines, the store's thread, deaths on this host.

One thread selects, and feeds the machine. Its effects are carried out in order, but for orders to save: they
wait, with what follows on their connection, until the store has prepared the place.
"""

from __future__ import annotations

import os
import selectors
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from swansong.engine import status
from swansong.engine.address import Address
from swansong.engine.deaths import Deaths
from swansong.engine.desk import Desk
from swansong.engine.guests import READ, Guest, Limits, Standing
from swansong.engine.notes import Notes
from swansong.engine.processes import raise_descriptor_limit
from swansong.engine.reception import Reception
from swansong.engine.storekeeper import Prepared, StoreCalls, Storekeeper, Trouble
from swansong.engine.waker import Waker
from swansong.protocol import messages as m
from swansong.protocol.codec import Channel, ChannelEvent, Failed, Opened, Reply, WireMessage
from swansong.protocol.controller import Controller
from swansong.protocol.handshake import NONCE, Identity, Role, Token
from swansong.protocol.operator import OperatorAnswer, PersistRequest, StatusRequest
from swansong.protocol.options import ProtocolOptions

_UNREAD: Final = 8
"""Answers that may wait for an operator who asks again."""


class ControllerServer:
    """One controller of one incarnation of a job: `with ControllerServer(...) as server: server.run()`."""

    def __init__(
        self,
        address: Address,
        *,
        world_size: int,
        token: Token,
        incarnation: bytes,
        store: StoreCalls,
        options: ProtocolOptions,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        note: Callable[[str], object] | None = None,
    ) -> None:
        """Listens when made. `incarnation` is 16 bytes; `tls` a context for the server's end of TLS 1.3.

        `note` gets a line for each peer that was sent away, in the loop's thread; not more than a few a
        second. Raises ConfigError for arguments that cannot be, AddressInUseError.
        """
        self._limits, self._token = limits or Limits(), token
        self._notes = Notes(note)
        self._desk = Desk(self._answer)
        self._store_calls = store
        self._store: Storekeeper | None = None
        self._events: deque[m.ControllerEvent] = deque()
        self._feeding = False
        self._holding: dict[str, list[Guest]] = {}
        """Incident that the store prepares -> guests with an order that waits for that."""
        self._world_watched = False
        self._closed: str | None = None
        self._stop: str | None = None
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._reception = Reception(
                address, self._selector, self, self._new_channel, self._limits, ranks=world_size, tls=tls
            )
            stack.callback(self._reception.close)
            # Read with the port in hand, so that of two controllers of a port the later has the higher.
            self.generation: Final = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            """Of this controller: of two, the one with the higher is the present one."""
            self._me = Identity(role=Role.CONTROLLER, incarnation=incarnation, generation=self.generation)
            self._began = time.monotonic()
            name = f"{incarnation.hex()[:8]}-{self.generation:x}"
            self._machine = Controller(world_size, self.generation, name, options, self._began)
            self._waker = Waker()
            stack.callback(self._waker.close)
            self._selector.register(self._waker, READ, lambda _: self._woken())
            self._deaths = Deaths(self._selector, lambda rank: self._feed(m.Died(rank)))
            stack.callback(self._deaths.close)
            self._resources = stack.pop_all()
        self._see_to_descriptors(4 * world_size + self._limits.max_strangers + 64)

    def _new_channel(self) -> Channel:
        return Channel(self._token, self._me, nonce=os.urandom(NONCE))

    def __enter__(self) -> ControllerServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """On which it listens."""
        return self._reception.port

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._reception.guests)

    def run(self) -> str:
        """Serve until the job has ended or another controller takes over; return why it ended."""
        self._store = Storekeeper(self._store_calls, self._waker.wake)
        try:
            self._reception.open()
            while self._closed is None:
                self._turn()
                if self._stop is not None:
                    self._shut(self._stop)
            self._take_leave(self._closed)
        finally:
            if not self._store.close(self._limits.store_exit_s):
                self.note(f"the store did not end in {self._limits.store_exit_s:g} s")
        self._take_results(self._store)
        return self._closed

    def stop(self, reason: str) -> None:
        """End `run` soon. For other threads and signal handlers."""
        self._stop = reason
        self._waker.wake()

    def close(self) -> None:
        """Close every connection at once, and the port. Idempotent; not while `run` runs."""
        self._closed = self._closed or "closed"
        self._resources.close()

    # -- the loop -------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait until something happens or is due, and see to it."""
        moments = [self._reception.next_moment()]
        if self._closed is None:
            moments.append(self._machine.deadline)
        until = min((moment for moment in moments if moment is not None), default=None)
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for key, events in self._selector.select(0.0 if self._reception.busy else timeout):
            key.data(events)
        now = time.monotonic()
        if self._machine.deadline is not None and now >= self._machine.deadline:
            self._feed(m.Tick())
        self._reception.look_around(now)

    def _woken(self) -> None:
        self._waker.clear()
        if self._store is not None:
            self._take_results(self._store)

    def _take_results(self, store: Storekeeper) -> None:
        for result in store.results():
            match result:
                case Prepared(incident):
                    self._let_go(incident)
                case m.Committed() | m.CommitFailed():
                    self._let_go(result.incident)
                    self._feed(result)
                case Trouble(what):
                    self.note(what)

    # -- what the reception says ----------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Tell people, unless too much was told just now."""
        self._notes.note(text, time.monotonic())

    def lost(self, guest: Guest) -> None:
        """A connection has ended, or is as good as ended."""
        self._desk.left(guest.number)
        self._feed(m.Disconnected(guest.number))

    def heard(self, guest: Guest, event: ChannelEvent) -> None:
        """Something came on a connection."""
        match event:
            case Opened(peer):
                self._opened(guest, peer)
            case Failed(error):
                self.note(f"{guest}: {error}")
            case StatusRequest() | PersistRequest() if guest.link.waiting >= _UNREAD:
                self._reception.send_away(guest, "asks, and does not read the answers")
            case StatusRequest():
                self._reception.settle(guest, guest.standing)
                self._desk.visited(guest.number)
                self._reception.send(guest, self._status())
            case PersistRequest(who=who):
                self._desk.persist(guest.number, self._machine, lambda: self._feed(m.Persist(who)))
                if self._desk.waits(guest.number):
                    self._reception.settle(guest, Standing.WAITING)
            case Reply():
                pass  # the link has seen to it
            case _:
                self._said(guest, event)

    def _opened(self, guest: Guest, peer: Identity) -> None:
        """A handshake is done: is there anything to talk about?"""
        other_start = peer.incarnation != self._me.incarnation
        if peer.role is Role.OPERATOR:
            self._reception.settle(guest, Standing.OPERATOR)
        elif other_start and 0 <= peer.generation <= self.generation:
            # It has known a controller older than this one: a straggler of a start that is over.
            self._refuse(guest, "another start of the job has taken over", retry=False)
        elif other_start or peer.generation > self.generation:
            self._refuse(guest, "this controller is closing, another is to take over", retry=True)
            self._feed(m.Superseded())
        else:
            self._reception.settle(guest, Standing.PROVED)

    def _refuse(self, guest: Guest, reason: str, *, retry: bool) -> None:
        self._reception.send(guest, m.Refused(reason=reason, retry=retry))
        self._reception.leave(guest)

    def _said(self, guest: Guest, message: WireMessage) -> None:
        """A rank has said something."""
        self._feed(m.Received(guest.number, message))  # type: ignore[arg-type]  # by the codec's vocabulary
        if isinstance(message, m.Register):
            self._registered(guest)

    def _registered(self, guest: Guest) -> None:
        """Keep a rank whose registration was accepted, and watch its process."""
        members = self._machine.members
        peer = members.on(guest.number)
        if peer is None or peer.member is None:
            return
        if guest.standing is Standing.PROVED:
            self._reception.settle(guest, Standing.RANK)
        self._watch(peer.member)
        if members.world is not None and not self._world_watched:
            # A world map that came along names processes that may be dead by now.
            self._world_watched = True
            for other in members.peers.values():
                if other.member is not None and not self._watch(other.member) and other.connection is None:
                    self._feed(m.Died(other.rank))

    def _watch(self, member: m.Member) -> bool:
        try:
            return self._deaths.watch(member)
        except OSError as error:
            self.note(f"the process of rank {member.rank} is not watched: {error.strerror}")
            return True

    # -- the machine ----------------------------------------------------------------------------------

    def _feed(self, event: m.ControllerEvent) -> None:
        """Give the machine an event, and do what it says; what comes of that is given to it afterwards."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events and self._closed is None:
                for effect in self._machine.handle(self._events.popleft(), time.monotonic()):
                    self._do(effect)
        finally:
            self._feeding = False

    def _do(self, effect: m.ControllerEffect) -> None:
        match effect:
            case m.Send(number, message):
                if (guest := self._reception.guests.get(number)) is not None:
                    self._send(guest, message)
            case m.Drop(number):
                if (guest := self._reception.guests.get(number)) is not None:
                    self._reception.leave(guest)
            case m.Close(reason):
                self._shut(reason)
            case _:
                self._ask_store(effect)

    def _send(self, guest: Guest, message: m.ToProcessor) -> None:
        self._reception.send(guest, message)
        if isinstance(message, m.Save) and message.incident in self._holding and guest.link.hold is None:
            guest.link.hold = message
            self._holding[message.incident].append(guest)

    def _ask_store(self, effect: m.Prepare | m.Commit | m.Discard | m.Report) -> None:
        match effect:
            case m.Prepare(incident):
                self._holding.setdefault(incident, [])
            case m.Discard(incident):
                self._let_go(incident)
            case m.Report():
                for number in self._desk.reported(effect):
                    if (operator := self._reception.guests.get(number)) is not None:
                        self._reception.settle(operator, Standing.OPERATOR)
        if self._store is not None:
            self._store.do(effect)

    def _let_go(self, incident: str) -> None:
        """Orders that waited for the store wait no more."""
        for guest in self._holding.pop(incident, []):
            guest.link.hold = None
            self._reception.attend(guest)

    def _answer(self, number: int, message: OperatorAnswer) -> None:
        if (guest := self._reception.guests.get(number)) is not None:
            self._reception.send(guest, message)

    def _status(self) -> OperatorAnswer:
        now = time.monotonic()
        return status.describe(
            self._machine, generation=self.generation, up_s=now - self._began, now=now, last=self._desk.last
        )

    # -- the end --------------------------------------------------------------------------------------

    def _shut(self, reason: str) -> None:
        """Free the port; whoever is connected is still told."""
        self._closed = reason
        self._reception.shut()

    def _take_leave(self, reason: str) -> None:
        """Send everybody what is to be said, and wait a moment until they have closed."""
        self._desk.closing(reason)
        for guest in self._reception.guests.present():
            self._reception.leave(guest)
        while len(self._reception.guests):
            self._turn()

    def _see_to_descriptors(self, wanted: int) -> None:
        most = raise_descriptor_limit(wanted)
        if most < wanted:
            self.note(f"this process may open {most} files, wanted {wanted} for this world size")
