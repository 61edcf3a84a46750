"""The controller machine: events and the time go in, effects come out. See `protocol.states`."""

from __future__ import annotations

from swansong.errors import ConfigError
from swansong.policy.cut import Cut
from swansong.protocol import messages as m
from swansong.protocol import savers
from swansong.protocol.admission import named, objection, own
from swansong.protocol.incident import Incident, Order, false_alarm
from swansong.protocol.members import Members, Peer
from swansong.protocol.messages import Action, ControllerEffect, ControllerEvent, Fault, FaultKind, Outcome
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.outbox import Outbox
from swansong.protocol.states import NEXT, WORKING, On, Phase


class Controller:
    """Decides for one incarnation of a job.

    Call `handle` with every event, and with a Tick when the clock comes to `deadline`; what has come till
    then goes first: after a pause of this process, who spoke meanwhile must not count as silent.
    """

    def __init__(
        self, world_size: int, generation: int, name: str, options: ProtocolOptions, now: float
    ) -> None:
        """`name` begins the incidents' names and is this controller's alone. ConfigError for no ranks."""
        if world_size < 1:
            raise ConfigError(f"world_size: wanted at least 1, got {world_size}")
        self.phase, self.members = Phase.GATHERING, Members(world_size)
        self.incident: Incident | None = None
        self.deadline: float | None = now + options.register_timeout_s
        """When `handle` must be called again if nothing happens; None: not before an event."""
        self._generation, self._name, self._options = generation, name, options
        self.since = now
        """When the present phase began."""
        self._out = Outbox(self.members, now)
        self._opened = 0
        self._standing: list[Fault] = []
        """Faults that became known before the world was complete."""
        self._saved_step: int | None = None
        self._last: m.Release | None = None
        self._superseded = False

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerEffect]:
        """Take one event at time `now`; return what to do, in order."""
        if self.phase is not Phase.CLOSED:
            self._take(event, now)
            self._advance(now)
        return self._out.take()

    # -- events ---------------------------------------------------------------------------------------

    def _take(self, event: ControllerEvent, now: float) -> None:
        match event:
            case m.Received(connection, m.Register() as message):
                self._register(connection, message, now)
            case m.Received(connection, message):
                peer = self.members.on(connection)
                if peer is None:
                    self._out.refuse(connection, m.Refused(reason="register first", retry=False))
                else:
                    self._receive(peer, message, now)
            case m.Disconnected(connection):
                self._disconnected(connection, now)
            case m.Died(rank):
                self._lost(self.members.peers[rank], "its process ended", now)
            case m.Persist(who):
                self._fault(Fault(kind=FaultKind.REQUESTED, rank=-1, what=f"requested by {who}"), now)
            case m.Superseded():
                self._superseded = True
            case m.Committed(incident, path) if self._is(incident, Phase.COMMITTING):
                self._release(On.COMMITTED, Outcome.SAVED, now, path=path)
            case m.CommitFailed(incident, reason) if self._is(incident, Phase.COMMITTING):
                self._current.orders.clear()  # for all we know, it was the parts
                self._again(reason, now)
            case m.CommitFailed(incident, reason) if self._is(incident, Phase.SAVING):
                self._release(On.NO_CUT, Outcome.NOTHING, now, reason=reason)

    def _register(self, connection: int, message: m.Register, now: float) -> None:
        members = self.members
        if (refusal := objection(members, connection, message)) is not None:
            self._out.refuse(connection, refusal)
            return
        peer = members.peers[message.member.rank]
        if peer.connection is not None and peer.connection != connection:
            self._out.do(m.Drop(peer.connection))
        peer.register(connection, message, now)
        if self.phase is Phase.GATHERING:
            members.dismiss(message.left, now)
        if members.world is None and message.world:
            members.adopt(message.world, now, self._options.reregister_timeout_s)
        self._out.send(peer, m.Welcome(generation=self._generation))
        if members.world is not None:
            self._out.inform()
            self._out.tell_left(peer)
        if self.incident is not None and not message.frozen:  # what it reported, or was writing, is past
            self._forget(peer, "its gate was open", now, moved=True)
        if message.fault is not None:
            self._fault(own(message.fault, peer.rank), now)
        self._bring_up_to_date(peer)

    def _bring_up_to_date(self, peer: Peer) -> None:
        """Tell a rank that has come back what it missed."""
        if self.phase in WORKING:
            self._out.send(peer, m.Freeze(incident=self._current.id))
            savers.repeat(self._current, peer, self._out)
        elif self.phase is Phase.RELEASING and self._last is not None:
            self._out.send(peer, self._last)
        elif self.phase is Phase.TRAINING and peer.frozen:
            self._out.send(peer, self._last or false_alarm())

    def _receive(self, peer: Peer, message: m.ToController, now: float) -> None:
        incident = self.incident
        match message:
            case m.FaultReport(fault=fault):
                self._fault(own(fault, peer.rank), now)
            case m.Goodbye():
                peer.leaving_since = now
            case m.StateReport() if incident is not None and message.incident == incident.id:
                incident.reports[peer.rank], peer.step, peer.step_at = message, message.boundary, now
            case m.Progress() | m.PartDone() | m.PartFailed() if self._is(message.incident, Phase.SAVING):
                order = self._current.find(peer.rank, message.attempt)
                if order is not None and not order.done:
                    self._saver_said(order, message, now)

    def _saver_said(self, order: Order, message: m.Progress | m.PartDone | m.PartFailed, now: float) -> None:
        match message:
            case m.Progress(nbytes=nbytes) if nbytes > order.nbytes:
                order.nbytes, order.moved_at = nbytes, now
            case m.PartDone():
                order.done = True
            case m.PartFailed(reason=reason, moved=moved):
                self._replace([order], reason, now, moved=moved)

    def _disconnected(self, connection: int, now: float) -> None:
        if (peer := self.members.on(connection)) is None:
            return
        peer.connection, peer.since = None, now
        if not peer.gone and self.phase is not Phase.RELEASING:
            peer.absent_until = now + self._options.reconnect_s
            if self.phase is Phase.TRAINING:
                self._open(now)

    def _lost(self, peer: Peer, what: str, now: float) -> None:
        """A rank is gone for good, as far as anybody can tell."""
        if peer.gone or peer.lost or self.phase is Phase.RELEASING:
            return
        if peer.connection is not None:
            self._out.do(m.Drop(peer.connection))
        peer.connection, peer.absent_until, peer.lost, peer.since = None, None, True, now
        self._fault(Fault(kind=FaultKind.LOST, rank=peer.rank, what=what), now)
        if self.incident is not None:
            self._forget(peer, "lost while saving", now, lost=True)

    def _forget(self, peer: Peer, why: str, now: float, *, lost: bool = False, moved: bool = False) -> None:
        """What a rank reported does not count any more, nor what it has not finished writing."""
        self._current.forget(peer.rank)
        if self.phase is Phase.SAVING and (orders := self._current.open_orders(peer.rank)):
            self._replace(orders, why, now, lost=lost, moved=moved)

    def _fault(self, fault: Fault, now: float) -> None:
        """Take note of a fault; the first opens an incident."""
        if fault.kind is FaultKind.STALLED and self._no_use_to_save(fault):
            return
        if self.phase is Phase.GATHERING:
            self._standing.append(fault)
        elif self.phase is Phase.TRAINING:
            self._open(now)
        if self.phase in WORKING:
            self._current.add(fault, now)

    def _no_use_to_save(self, stall: Fault) -> bool:
        """True if a stall is saved already, or comes while there can be nothing to save."""
        if self.members.world is None:
            return True
        return self._saved_step is not None and (stall.step is None or stall.step <= self._saved_step)

    def _open(self, now: float) -> None:
        """Begin an incident: everybody closes the gate and reports."""
        self._opened += 1
        self.incident = Incident(f"{self._name}-{self._opened}", now, self._options)
        self._go(On.FAULT, now)
        self._freeze(now)

    def _freeze(self, now: float) -> None:
        self._current.freeze(now)
        self._out.broadcast(m.Freeze(incident=self._current.id), now)

    # -- what is due ----------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Do everything that is due, and note when to look again."""
        before = None
        while self.phase is not before:
            before = self.phase
            for peer in self.members.overdue(now):
                self._lost(peer, "its connection ended and it did not come back", now)
            look_again = self._due(now)
        moments = [look_again]
        if self.phase not in (Phase.RELEASING, Phase.CLOSED):  # where nobody is missed any more
            moments += [peer.absent_until for peer in self.members.absent()]
        if self.phase in WORKING:
            moments.append(self._out.hold(self._current.id, now, self._options.gate_lease_s / 3))
        self.deadline = min((moment for moment in moments if moment is not None), default=None)

    def _due(self, now: float) -> float | None:
        """Do what is due in the present phase; return when to look again."""
        match self.phase:
            case Phase.GATHERING:
                return self._gathering(now)
            case Phase.TRAINING:
                return self._training(now)
            case Phase.FREEZING:
                return self._freezing(self._current, now)
            case Phase.SAVING:
                return self._saving(self._current, now)
            case Phase.COMMITTING:
                return self._committing(self._current, now)
            case Phase.RELEASING:
                return self._releasing(now)
            case Phase.CLOSED:
                return None

    def _gathering(self, now: float) -> float | None:
        members, ends = self.members, self.since + self._options.register_timeout_s
        missing = members.missing()
        if self._superseded:
            self._end("another start of the job took over", now)
        elif members.world is not None:  # a successor: the world is known, who has not come back is awaited
            if not members.absent():
                self._begin(now)
            return None
        elif not missing:
            members.complete()
            self._out.inform()
            self._begin(now)
        elif self._standing:
            self._open_unprotected(f"nothing was protected yet: {named(missing)} had not registered", now)
        elif now >= ends:
            self._end(f"{named(missing)} did not register in time: the job is not protected", now)
        elif (look_again := self._out.farewell(now, self._options.goodbye_timeout_s)) is not None:
            return min(ends, look_again)
        return ends

    def _begin(self, now: float) -> None:
        """The world is complete. Faults that stand begin an incident."""
        self._go(On.WORLD_COMPLETE, now)
        standing, self._standing = self._standing, []
        for fault in standing:
            self._fault(fault, now)
        if self.incident is not None:  # a launcher's budget was running meanwhile
            self.incident.opened_at -= self.members.waited_s(now, self._options.reregister_timeout_s)
        if self.phase is Phase.TRAINING:
            for peer in self.members.connected():
                if peer.frozen:
                    self._out.send(peer, false_alarm())

    def _open_unprotected(self, reason: str, now: float) -> None:
        """A fault before the world was complete: only the outcome can be told."""
        self._opened += 1
        self.incident = Incident(f"{self._name}-{self._opened}", now, self._options, self._standing)
        self._release(On.NO_CUT, Outcome.NOTHING, now, reason=reason)

    def _training(self, now: float) -> float | None:
        if self._superseded:
            self._end("another start of the job took over", now)
            return None
        look_again = self._out.farewell(now, self._options.goodbye_timeout_s)
        if all(peer.gone for peer in self.members.peers.values()):
            self._end("every rank has finished", now)
        return look_again

    def _freezing(self, incident: Incident, now: float) -> float | None:
        world = self.members.world
        if not incident.faults:
            if not self.members.absent():
                self._go(On.FALSE_ALARM, now)
                self._tell_outcome(false_alarm(incident.id), now)
            return None
        if world is None:
            return None
        expected = self.members.expected()
        if expected - incident.reports.keys() and now < incident.freeze_ends:
            return incident.freeze_ends
        if expected & set(incident.unsettled()) and now < incident.settle_ends:
            return incident.settle_ends
        incident.reported_at = now if incident.reported_at is None else incident.reported_at
        decision = incident.choose(world, expected)
        if isinstance(decision, Cut):
            self._go(On.CUT, now)
            savers.begin(incident, decision, self._out, now)
        elif decision.waiting_for and now < incident.needed_ends:
            return incident.needed_ends
        else:
            self._release(On.NO_CUT, Outcome.NOTHING, now, reason=decision.reason)
        return None

    def _saving(self, incident: Incident, now: float) -> float | None:
        if incident.complete():  # what is still being written are records, which are worth a while
            if now < (ends := incident.records_end()):
                return ends
            savers.recall(incident, self._out)
            self._go(On.PARTS_COMPLETE, now)
            self._out.do(incident.commit())
            return None
        if incident.saving_ends is not None and now >= incident.saving_ends:
            late = named({order.rank for order in incident.open_orders()})
            reason = f"no time left: the parts of {late} were not finished"
            self._release(On.NO_CUT, Outcome.NOTHING, now, reason=reason)
            return None
        if idle := incident.idle(now):
            self._replace(idle, f"no progress for {self._options.idle_timeout_s:g} s", now)
        return incident.next_idle()

    def _committing(self, incident: Incident, now: float) -> float | None:
        ends = self.since + self._options.commit_timeout_s
        if incident.budget_ends is not None:
            ends = min(ends, incident.budget_ends)
        if now >= ends:
            reason = "the commit did not end in time; the directory tells whether it came to be"
            self._release(On.NO_CUT, Outcome.NOTHING, now, reason=reason)
        return ends

    def _releasing(self, now: float) -> float | None:
        if self._last is not None and self._last.action is Action.RESUME:
            self._go(On.RESUMED, now)
            return None
        ends = self.since + self._options.exit_grace_s
        if now >= ends or not self.members.connected():
            self._end("the job ended after an incident", now)
        return ends

    # -- savers ---------------------------------------------------------------------------------------

    def _replace(
        self, failed: list[Order], reason: str, now: float, *, lost: bool = False, moved: bool = False
    ) -> None:
        """Give the components of failed orders to other holders at that step, or choose anew."""
        if savers.replace(self._current, failed, reason, self._out, now, lost=lost, moved=moved):
            self._go(On.REPLACED, now)
        else:
            self._again(reason, now)

    def _again(self, reason: str, now: float) -> None:
        """Have everybody report afresh, unless that was done often enough."""
        incident = self._current
        if incident.round >= self._options.attempts:
            self._release(On.NO_CUT, Outcome.NOTHING, now, reason=reason)
            return
        incident.round += 1
        incident.note(f"chosen anew: {reason}")
        savers.recall(incident, self._out)
        self._go(On.AGAIN, now)
        self._freeze(now)

    # -- endings --------------------------------------------------------------------------------------

    def _release(self, on: On, outcome: Outcome, now: float, *, path: str = "", reason: str = "") -> None:
        """End the incident: its report, and the outcome for everybody."""
        incident = self._current
        self._go(on, now)
        release = incident.release(outcome, path, reason)
        if release.step is None:
            self._out.do(m.Discard(incident.id))
        else:
            self._saved_step = release.step
        self._out.do(incident.summary(release))
        self._tell_outcome(release, now)

    def _tell_outcome(self, release: m.Release, now: float) -> None:
        """Tell everybody how it ended, now and when they come back."""
        self._last = release
        self._out.broadcast(release, now)
        self.incident = None

    def _end(self, reason: str, now: float) -> None:
        self._go(On.ENDED, now)
        self._out.refuse_all(m.Refused(reason=reason, retry=self._superseded))
        self._out.do(m.Close(reason))

    # -- small things ---------------------------------------------------------------------------------

    @property
    def _current(self) -> Incident:
        """The incident under way. There is one in every phase of WORKING; its absence is a bug."""
        if self.incident is None:
            raise RuntimeError(f"no incident while {self.phase}")
        return self.incident

    def _go(self, on: On, now: float) -> None:
        if self.incident is not None:
            self.incident.spend(self.phase, self.since, now)
        self.phase = NEXT[self.phase, on]
        self.since = now

    def _is(self, incident: str, phase: Phase) -> bool:
        return self.phase is phase and self.incident is not None and self.incident.id == incident
