"""The thread around the processor machine: what a rank has beside its training loop."""

from __future__ import annotations

import os
import queue
import selectors
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from swansong.engine.signals import in_forked_children
from swansong.engine.transport import Connection
from swansong.errors import ProtocolError, SwansongError, UnreachableError
from swansong.protocol import messages as m
from swansong.protocol.processor import Processor
from swansong.protocol.states import Mode

WATCH_S: Final = 0.005
"""How often a frozen rank's clock is read while it may still change."""
SETTLED_WATCH_S: Final = 0.1
"""The same, once it has settled."""
LOOK_S: Final = 1.0
"""How often a rank that trains is looked after."""


class StateMovedError(SwansongError):
    """The state changed while it was being saved: it is not at that step any more."""


class Rank(Protocol):
    """What the thread needs done. Every method is called in the processor's thread, but for `save`.

    None may wait for the main thread, which may be stuck for ever.
    """

    def close_gate(self) -> None:
        """Let no update begin; called again for each word from the controller, to renew the lease."""
        ...

    def open_gate(self) -> None:
        """Let updates begin again."""
        ...

    def read_state(self) -> m.StateRead:
        """Read clocks, and what the main thread does."""
        ...

    def save(self, order: m.StartSave, progress: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """Write a part, durably; in a thread of its own.

        `progress` takes bytes written so far, `stopped` says that the part is not wanted any more. Raises
        StateMovedError if the clock moved, anything else if it could not be written.
        """
        ...

    def wake(self, release: m.Release) -> None:
        """Tell the main thread how an incident ended."""
        ...

    def depart(self) -> None:
        """Let the main thread go: nobody needs this rank any more."""
        ...

    def unprotected(self, reason: str) -> None:
        """Say loudly that there is no controller."""
        ...

    def watch(self, now: float) -> m.Fault | None:
        """Called regularly: a stall that was noticed since, if any."""
        ...


class ProcessorThread:
    """Drives a Processor: connects, sends, reads the clock, saves, until released or told farewell."""

    def __init__(
        self, machine: Processor, rank: Rank, dial: Callable[[], Connection], *, look_s: float = LOOK_S
    ) -> None:
        """`dial` connects within a second or so, or raises UnreachableError or ProtocolError.

        `rank.watch` is called at least every `look_s` seconds.
        """
        self._machine, self._rank, self._dial, self._look_s = machine, rank, dial, look_s
        self._events: queue.SimpleQueue[m.ProcessorEvent] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[m.StartSave | None] = queue.SimpleQueue()
        self._stopped: set[tuple[str, int]] = set()
        self._connection: Connection | None = None
        self._watch_at: float | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ringing = threading.Lock()
        self._error: BaseException | None = None
        self._halted = False
        self._thread = threading.Thread(target=self._run, name="swansong-processor", daemon=True)
        self._writer = threading.Thread(target=self._write, name="swansong-part", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self._writer.start()
        in_forked_children(self._close_in_child)

    @property
    def protected(self) -> bool:
        """True if a controller watches over a complete world now."""
        return self._thread.is_alive() and self._machine.mode is Mode.TRAINING

    @property
    def world(self) -> tuple[m.Member, ...]:
        """Every rank, once all have registered; empty before."""
        return self._machine.world

    def halt(self) -> None:
        """End soon, whatever the machine waits for: the main thread needs nothing of it any more."""
        self._halted = True
        self._ring()

    def post(self, event: m.ProcessorEvent) -> None:
        """Hand over an event from any thread."""
        self._events.put(event)
        self._ring()

    def join(self, timeout_s: float) -> bool:
        """Wait until the machine has ended; False if it has not in time. Raises what ended the thread.

        A part that is being written is waited for as long, but no longer: a disk may hang.
        """
        ends = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._writer.join(max(0.0, ends - time.monotonic()))
        with self._ringing:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        if self._error is not None:
            raise self._error
        return True

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                while self._machine.mode is not Mode.ENDED and not self._halted:
                    self._turn(selector)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: told, and kept for `join`
            self._error = error
            self._rank.open_gate()
            self._rank.unprotected(f"the processor's thread failed: {type(error).__name__}: {error}")
        finally:
            self._hang_up()
            self._orders.put(None)

    def _turn(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for event in self._due(now):
            self._feed(event)
        deadlines = [now + self._look_s, self._machine.deadline, self._watch_at]
        left = min(moment for moment in deadlines if moment is not None) - time.monotonic()
        if self._machine.mode is Mode.ENDED:
            return
        connection = self._connection
        if connection is None:
            selector.select(max(0.0, left))
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            key = selector.register(connection, events)
            try:
                selector.select(max(0.0, left))
            finally:
                selector.unregister(key.fd)
        self._quiet()

    def _due(self, now: float) -> list[m.ProcessorEvent]:
        """Everything that has happened since the last turn."""
        due: list[m.ProcessorEvent] = []
        while not self._events.empty():
            due.append(self._events.get_nowait())
        if self._connection is not None:
            due += self._heard(self._connection)
        fault = self._rank.watch(now)
        if fault is not None:
            due.append(m.LocalFault(fault))
        if self._watch_at is not None and now >= self._watch_at:
            state = self._rank.read_state()
            self._watch_at = now + (SETTLED_WATCH_S if state.settled else WATCH_S)
            due.append(state)
        return [*due, m.Tick()]

    def _heard(self, connection: Connection) -> list[m.ProcessorEvent]:
        try:
            messages = connection.poll()
        except (ProtocolError, UnreachableError):
            messages = []
        heard: list[m.ProcessorEvent] = [
            m.FromController(message) for message in messages if isinstance(message, m.ToProcessor)
        ]
        if connection.ended:
            self._hang_up()
            heard.append(m.ConnectionEnded())
        return heard

    def _feed(self, event: m.ProcessorEvent) -> None:
        for effect in self._machine.handle(event, time.monotonic()):
            self._do(effect)
        if isinstance(event, m.FromController) and self._machine.gate_closed:
            self._rank.close_gate()

    def _do(self, effect: m.ProcessorEffect) -> None:
        match effect:
            case m.Connect():
                self._connect()
            case m.Tell(message):
                if self._connection is not None:
                    self._connection.send(message)
            case m.Disconnect():
                self._hang_up()
                self.post(m.ConnectionEnded())
            case m.CloseGate():
                self._rank.close_gate()
            case m.OpenGate():
                self._watch_at = None
                self._rank.open_gate()
            case m.Watch():
                self._watch_at = time.monotonic()
            case m.StartSave():
                self._orders.put(effect)
            case m.StopSave(incident, attempt):
                self._stopped.add((incident, attempt))
            case m.Wake(release):
                self._rank.wake(release)
            case m.Depart():
                self._rank.depart()
            case m.Unprotected(reason):
                self._rank.unprotected(reason)

    def _connect(self) -> None:
        try:
            self._connection = self._dial()
        except (UnreachableError, ProtocolError):
            self.post(m.ConnectionEnded())
        else:
            self.post(m.Connected())

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.finish(0.2)

    def _close_in_child(self) -> None:
        """A child that kept the connection would make a dead parent look alive."""
        self._ringing = threading.Lock()  # a thread that the child does not have may hold the copy
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _ring(self) -> None:
        with self._ringing:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _quiet(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    # -- the writer -----------------------------------------------------------------------------------

    def _write(self) -> None:
        """Write one part after another."""
        while (order := self._orders.get()) is not None:
            incident, attempt = order.incident, order.attempt

            def stopped(part: tuple[str, int] = (incident, attempt)) -> bool:
                return self._halted or part in self._stopped

            def progress(nbytes: int, incident: str = incident, attempt: int = attempt) -> None:
                self.post(m.Wrote(incident=incident, attempt=attempt, nbytes=nbytes))

            if stopped():
                continue
            try:
                self._rank.save(order, progress, stopped)
            except StateMovedError as error:
                self.post(m.SaveFailed(incident=incident, attempt=attempt, reason=str(error), moved=True))
            except BaseException as error:  # noqa: BLE001 - a thread's boundary: the controller is told
                reason = f"{type(error).__name__}: {error}"
                self.post(m.SaveFailed(incident=incident, attempt=attempt, reason=reason))
            else:
                self.post(m.Saved(incident=incident, attempt=attempt))
