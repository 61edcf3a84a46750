"""A rank's process: the processor machine, what carries out its effects, and the main thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.sim_network import Connection
from simulation.sim_store import Writer
from simulation.sim_training import MainThread
from simulation.sim_transcript import shown
from swansong.protocol import messages as m
from swansong.protocol.processor import Processor
from swansong.protocol.states import Mode

if TYPE_CHECKING:
    from simulation.sim_world import World


class SimRank:
    """One rank. Nothing of it runs while it is stopped; nothing of it ever runs again when it is dead."""

    def __init__(self, world: World, number: int, rng: random.Random) -> None:
        self.world, self.number, self.rng = world, number, rng
        self.name = f"rank {number}"
        self.host = world.plan.hosts[number]
        self.alive, self.stopped = True, False
        self.stopped_until = 0.0
        """When it was or will be continued; 0: it was never stopped."""
        self.killed_at: float | None = None
        """When it was killed in the middle of training."""
        self.died_at: float | None = None
        self.backlog: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.connection: Connection | None = None
        self.connection_before: Connection | None = None
        """While an event is handled: the connection that there was."""
        self.connecting = False
        self.watching = False
        self.released: list[m.Release] = []
        self.departed = False
        self.unprotected = ""
        self.seen = 0
        """Highest generation of a controller whose greeting it had."""
        self.followed = 0
        """Highest generation of a controller whose word it acted on."""
        self.writers: dict[tuple[str, int], Writer] = {}
        components = tuple(
            m.ComponentEntry(key=key, label=key, nbytes=100) for key in world.plan.layout[number]
        )
        self.member = m.Member(
            rank=number, host=f"host {self.host}", pid=100 + number, start_time=1, components=components
        )
        self.machine = Processor(self.member, world.plan.ranks, world.plan.options, world.clock.now)
        self.main = MainThread(world, self, rng)
        self._alarm: list[Any] | None = None
        self._alarm_at: float | None = None
        self._reading = False
        self._disconnects = 0

    # -- running --------------------------------------------------------------------------------------

    def at(self, moment: float, do: Callable[..., object], *args: object) -> None:
        """Do something in this process at a moment."""
        self.world.clock.at(moment, self.run, do, *args)

    def after(self, seconds: float, do: Callable[..., object], *args: object) -> None:
        """Do something in this process in so many seconds."""
        self.world.clock.at(self.world.clock.now + seconds, self.run, do, *args)

    def run(self, do: Callable[..., object], *args: object) -> None:
        """Do something now, unless the process is dead, or once it runs again."""
        if not self.alive:
            return
        if self.stopped:
            self.backlog.append((do, args))
        else:
            do(*args)

    def start(self) -> None:
        """The process begins: it registers, and trains."""
        self.feed(m.Tick())
        self.main.start()

    def stop(self, until: float) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.stopped_until = until

    def go_on(self) -> None:
        """SIGCONT: everything that waited happens now."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for do, args in backlog:
            self.run(do, *args)

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive and self.main.doing != "finished":
            self.killed_at = self.world.clock.now
        self.die()

    def die(self) -> None:
        """The process is gone."""
        if not self.alive:
            return
        self.alive, self.died_at = False, self.world.clock.now
        self.main.ended = True
        self.world.clock.cancel(self._alarm)
        if self.connection is not None:
            self.world.network.close_from_rank(self.connection)
        self.world.process_ended(self)

    def exit(self) -> None:
        """The main thread has ended, and with it the process."""
        self.world.record(self.name, "ends")
        self.die()

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: m.ProcessorEvent) -> None:
        """Give the machine an event, and do what it says."""
        if not self.alive:
            return
        self.connection_before = self.connection
        for effect in self.world.checks.processor(self, event):
            self._do(effect)
        moment = self.machine.deadline
        if moment != self._alarm_at:
            self.world.clock.cancel(self._alarm)
            self._alarm_at = moment
            self._alarm = None if moment is None else self.world.clock.at(moment, self.run, self._tick)

    def _tick(self) -> None:
        self._alarm_at = self._alarm = None
        self.feed(m.Tick())

    def _do(self, effect: m.ProcessorEffect) -> None:
        match effect:
            case m.Tell(message):
                if self.connection is not None:
                    self.world.network.to_controller(self.connection, message)
            case m.Connect():
                self.world.checks.that(
                    not self.connecting and self.connection is None, f"{self.name}: two connections"
                )
                self.connecting = True
                self.world.network.connect(self)
            case m.Disconnect():
                if self.connection is not None:
                    self.world.network.close_from_rank(self.connection)
                    self.connection = None
                    self.after(0.0, self._disconnected_myself)
            case m.CloseGate():
                self.world.record(self.name, "closes its gate")
                self.main.close_gate()
            case m.OpenGate():
                self.world.record(self.name, "opens its gate")
                self.watching = False
                self.main.open_gate()
            case m.Watch():
                self.watching = True
                self.read_soon()
            case m.StartSave():
                self.world.store.start(self, effect)
            case m.StopSave():
                self.world.store.stop(self, effect)
            case m.Wake(release):
                self.world.record(self.name, f"main thread hears: {shown(release)}")
                self.released.append(release)
                self.world.checks.woken(self, release)
                self.main.wake(release)
            case m.Depart():
                self.world.record(self.name, "may go")
                self.departed = True
                self.main.wake(_DEPART)
            case m.Unprotected(reason):
                self.world.record(self.name, f"is unprotected: {reason}")
                self.unprotected = reason

    # -- connection -----------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """A connection stands."""
        if not connection.rank_open:
            self.not_connected()
            return
        self.connecting = False
        if self.machine.mode is Mode.ENDED:
            self.world.network.close_from_rank(connection)
            return
        self.connection = connection
        self.seen = max(self.seen, connection.controller.generation)
        self.feed(m.Connected())

    def not_connected(self) -> None:
        """A connection could not be made."""
        self.connecting = False
        self.feed(m.ConnectionEnded())

    def disconnected(self, connection: Connection) -> None:
        """The other side, or the network, ended a connection."""
        if self.connection is connection:
            self.connection = None
            self.feed(m.ConnectionEnded())

    def _disconnected_myself(self) -> None:
        self.feed(m.ConnectionEnded())

    # -- reading the clock ----------------------------------------------------------------------------

    def read_soon(self) -> None:
        """The watcher reads the clock."""
        if not self._reading:
            self._reading = True
            self.after(0.0005 + 0.001 * self.rng.random(), self._read)

    def _read(self) -> None:
        self._reading = False
        if not self.watching:
            return
        main = self.main
        if main.unreadable_until > self.world.clock.now:
            self.feed(m.StateRead({}, False, main.boundary, main.doing))
            self._reading = True
            self.at(main.unreadable_until, self._read)
        else:
            self.feed(m.StateRead(main.held(), main.settled(), main.boundary, main.doing))


_DEPART = m.Release(incident="", outcome=m.Outcome.SAVED, action=m.Action.STOP)
