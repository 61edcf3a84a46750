"""The processor machine of one rank: events and the time go in, effects come out. See `protocol.states`."""

from __future__ import annotations

from swansong.protocol import messages as m
from swansong.protocol.messages import Action, Fault, FaultKind, Outcome, ProcessorEffect, ProcessorEvent
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import STEP, Got, Mode

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0


class Processor:
    """Speaks for one rank.

    Call `handle` with every event, and with a Tick when the clock comes to `deadline`. After Connect comes
    Connected or ConnectionEnded; after Disconnect, as after any other end of a connection, ConnectionEnded,
    and nothing more that was said on that connection. What is told without a connection is lost: what matters
    of it is said again on the next one.
    """

    def __init__(self, member: m.Member, world_size: int, options: ProtocolOptions, now: float) -> None:
        self.mode = Mode.CONNECTING
        self.deadline: float | None = now
        """When `handle` must be called again if nothing happens; None: not before an event."""
        self.gate_closed = False
        self._member, self._world_size, self._options = member, world_size, options
        self._world: tuple[m.Member, ...] = ()
        self._left: set[int] = set()
        self._generation = -1
        self._incident = ""
        self._report: m.StateReport | None = None
        self._parts: dict[int, m.PartDone | m.PartFailed | None] = {}
        """Attempt -> how it ended, of the present incident; None: it is being written."""
        self._fault: Fault | None = None
        """The first that still stands."""
        self._registered_fault: Fault | None = None
        self._finished = False
        self._word_at = now
        """When the controller was last heard, or asked for something."""
        self._without_since = now
        """When the last controller was lost."""
        self._retry_at, self._retry_s = now, _FIRST_RETRY_S
        self._linked = False
        """True from Connect until ConnectionEnded."""
        self._registering = False
        """True from Connected until that is answered, or the connection ends."""
        self._effects: list[ProcessorEffect] = []

    @property
    def world(self) -> tuple[m.Member, ...]:
        """Every rank, once all have registered; empty before."""
        return self._world

    def handle(self, event: ProcessorEvent, now: float) -> list[ProcessorEffect]:
        """Take one event at time `now`; return what to do, in order."""
        self._effects = []
        if self.mode is not Mode.ENDED:
            self._take(event, now)
            self._advance(now)
        return self._effects

    # -- events ---------------------------------------------------------------------------------------

    def _take(self, event: ProcessorEvent, now: float) -> None:
        match event:
            case m.Connected():
                self._register()
            case m.ConnectionEnded():
                self._ended(now)
            case m.FromController(message):
                self._word_at = now
                self._hear(message, now)
            case m.LocalFault(fault):
                self._own_fault(fault, now)
            case m.StateRead():
                self._read(event)
            case m.Wrote() | m.Saved() | m.SaveFailed() if event.incident == self._incident:
                self._writer_said(event)
            case m.Finished():
                self._word_at = now
                self._finish()

    def _register(self) -> None:
        if self.mode is not Mode.CONNECTING:
            self._effects.append(m.Disconnect())  # given up meanwhile
            return
        self._registered_fault, self._registering = self._fault, True
        self._tell(
            m.Register(
                member=self._member,
                world_size=self._world_size,
                world=self._world,
                left=tuple(sorted(self._left)),
                fault=self._fault,
                frozen=self.gate_closed,
            )
        )

    def _writer_said(self, event: m.Wrote | m.Saved | m.SaveFailed) -> None:
        incident, attempt = event.incident, event.attempt
        if attempt not in self._parts:
            return  # it was told to stop
        match event:
            case m.Wrote(nbytes=nbytes):
                self._tell(m.Progress(incident=incident, attempt=attempt, nbytes=nbytes))
                return
            case m.Saved():
                ended: m.PartDone | m.PartFailed = m.PartDone(incident=incident, attempt=attempt)
            case m.SaveFailed(reason=reason, moved=moved):
                ended = m.PartFailed(incident=incident, attempt=attempt, reason=reason, moved=moved)
        self._parts[attempt] = ended
        self._tell(ended)

    def _hear(self, message: m.ToProcessor, now: float) -> None:
        match message:
            case m.Welcome(generation=generation):
                self._welcome(generation)
            case m.World(members=members):
                if self._go(Got.WORLD):
                    self._world = members
            case m.Freeze(incident=incident):
                self._freeze(incident)
            case m.Save():
                self._save(message)
            case m.Void(incident=incident, attempt=attempt) if incident == self._incident:
                if attempt in self._parts and self._parts.pop(attempt) is None:
                    self._effects.append(m.StopSave(incident, attempt))
            case m.Release():
                self._released(message)
            case m.Farewell() if self._go(Got.FAREWELL):
                self._effects += [m.Depart(), m.Disconnect()]
            case m.Left(ranks=ranks):
                self._left = set(ranks)
            case m.Refused(reason=reason, retry=retry):
                if not retry:
                    self._give_up(reason)

    def _welcome(self, generation: int) -> None:
        if generation < self._generation:
            self._effects.append(m.Disconnect())  # of the past; the present one is still to be found
            return
        if not self._go(Got.WELCOME):
            return
        self._generation, self._registering = generation, False
        self._retry_s = _FIRST_RETRY_S
        if self._world:
            self._go(Got.WORLD)
        if self._fault is not None and self._fault is not self._registered_fault:
            self._tell(
                m.FaultReport(fault=self._fault)
            )  # of the moment between registering and being welcome
        if self._finished:
            self._tell(m.Goodbye())

    def _freeze(self, incident: str) -> None:
        if not self._go(Got.FREEZE):
            return
        if incident != self._incident:
            self._stop_saves()
            self._incident = incident
        self._report = None
        if not self.gate_closed:
            self.gate_closed = True
            self._effects.append(m.CloseGate())
        self._effects.append(m.Watch())

    def _read(self, state: m.StateRead) -> None:
        if self.mode is not Mode.FROZEN:
            return
        report = m.StateReport(
            incident=self._incident,
            held=state.held,
            settled=state.settled,
            boundary=state.boundary,
            main=state.main,
            stack=state.stack,
        )
        if report != self._report:
            self._report = report
            self._tell(report)

    def _save(self, order: m.Save) -> None:
        incident, attempt = order.incident, order.attempt
        if self.mode is not Mode.FROZEN or incident != self._incident:
            reason = "its gate is open again: no controller was heard for too long"
            self._tell(m.PartFailed(incident=incident, attempt=attempt, reason=reason, moved=True))
        elif attempt not in self._parts:
            self._parts[attempt] = None
            self._effects.append(m.StartSave(incident, attempt, order.step, order.keys))
        elif (ended := self._parts[attempt]) is not None:
            self._tell(ended)  # it was told before, and got lost

    def _released(self, release: m.Release) -> None:
        stop = release.action is Action.STOP
        if not self._go(Got.STOP if stop else Got.RESUME):
            return
        self._stop_saves()
        self._incident, self._report = "", None
        if stop:
            self._effects += [m.Wake(release), m.Disconnect()]
            return
        if self._fault is not None and self._fault.kind is FaultKind.STALLED:
            self._fault = None
        self._open_gate()
        self._effects.append(m.Wake(release))

    def _own_fault(self, fault: Fault, now: float) -> None:
        if not self._fault_stands:
            self._fault = fault
        self._word_at = now
        if self.mode is Mode.UNPROTECTED:
            self._wake_alone("there is no controller")
        elif self.mode is not Mode.CONNECTING:
            self._tell(m.FaultReport(fault=fault))

    def _finish(self) -> None:
        self._finished = True
        if self.mode is Mode.UNPROTECTED:
            self._effects.append(m.Depart())
            self.mode = Mode.ENDED
        elif self.mode is not Mode.CONNECTING:
            self._tell(m.Goodbye())

    # -- connections ----------------------------------------------------------------------------------

    def _ended(self, now: float) -> None:
        self._linked = self._registering = False
        if self.mode in (Mode.JOINED, Mode.TRAINING, Mode.FROZEN):
            self._go(Got.DISCONNECTED)
            self._without_since = now
            self._retry_s = _FIRST_RETRY_S
        self._retry_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _give_up(self, reason: str) -> None:
        if not self._go(Got.GIVEN_UP):
            return
        self._stop_saves()
        self._open_gate()
        self._effects += [m.Disconnect(), m.Unprotected(reason)]
        self._wake_alone(reason)
        if self._finished:
            self._finish()

    def _wake_alone(self, reason: str) -> None:
        """Tell a main thread that waits for an outcome what no controller will tell it."""
        if self._fault is None or not self._fault_stands:
            return
        release = m.Release(
            incident="", outcome=Outcome.NOTHING, action=Action.STOP, reason=reason, cause=self._fault.kind
        )
        self._effects.append(m.Wake(release))

    # -- what is due ----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        moments = [self._lease(now), self._search(now)]
        if self.mode is Mode.ENDED:
            self.deadline = None
        else:
            self.deadline = min((moment for moment in moments if moment is not None), default=None)

    def _lease(self, now: float) -> float | None:
        """Whoever waits for a controller's word does not wait for ever."""
        options = self._options
        connected = self.mode in (Mode.JOINED, Mode.TRAINING, Mode.FROZEN)
        if self.gate_closed or (self._fault_stands and connected):
            ends = self._word_at + options.gate_lease_s
        elif self._finished and connected:
            ends = self._word_at + options.goodbye_timeout_s + options.gate_lease_s
        else:
            return None
        if self.mode is Mode.ENDED or now < ends:
            return ends
        self._lease_over(connected, now)
        return None

    def _lease_over(self, connected: bool, now: float) -> None:
        """Nobody is heard: whatever was going on is void, and training goes on if it can."""
        self._go(Got.LEASE_OVER)
        self._stop_saves()
        self._incident, self._report = "", None
        self._open_gate()
        if connected:
            self._without_since = now
            self._effects.append(m.Disconnect())

    def _search(self, now: float) -> float | None:
        """Look for a controller, for a while."""
        if self.mode is not Mode.CONNECTING:
            return None
        options = self._options
        soon = self._world or self._fault_stands
        gives_up = self._without_since + (options.lost_controller_s if soon else options.register_timeout_s)
        if self._registering:  # the answer may be on its way, from a controller that counts on this rank
            gives_up += options.reconnect_s
        if now >= gives_up:
            self._give_up("no controller could be reached")
            return None
        if self._linked:
            return gives_up
        if now < self._retry_at:
            return min(gives_up, self._retry_at)
        self._linked = True
        self._effects.append(m.Connect())
        return gives_up

    # -- small things ---------------------------------------------------------------------------------

    @property
    def _fault_stands(self) -> bool:
        """True if the main thread waits, or will, to hear how it ended; after a stall it does not."""
        return self._fault is not None and self._fault.kind is not FaultKind.STALLED

    def _go(self, got: Got) -> bool:
        """Take a step of the table; without a row it was the controller's error, and the connection ends."""
        next_mode = STEP.get((self.mode, got))
        if next_mode is None:
            self._effects.append(m.Disconnect())
            return False
        self.mode = next_mode
        return True

    def _tell(self, message: m.ToController) -> None:
        self._effects.append(m.Tell(message))

    def _open_gate(self) -> None:
        if self.gate_closed:
            self.gate_closed = False
            self._effects.append(m.OpenGate())

    def _stop_saves(self) -> None:
        self._effects += [
            m.StopSave(self._incident, attempt) for attempt, ended in self._parts.items() if ended is None
        ]
        self._parts.clear()
