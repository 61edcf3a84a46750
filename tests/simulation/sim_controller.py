"""A controller's process: the controller machine, and what carries out its effects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.sim_network import Connection
from simulation.sim_situations import STEPPED_DOWN
from swansong.protocol import messages as m
from swansong.protocol.controller import Controller
from swansong.protocol.states import Phase

if TYPE_CHECKING:
    from simulation.sim_world import World


class SimController:
    """One controller. It listens from its start to its end."""

    def __init__(self, world: World, generation: int) -> None:
        self.world, self.generation = world, generation
        self.name = f"controller {generation}" if generation > 1 else "controller"
        self.alive, self.stopped = True, False
        self.stopped_until = 0.0
        """When it was or will be continued; 0: it was never stopped."""
        self.backlog: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.connections: dict[int, Connection] = {}
        self.machine = Controller(
            world.plan.ranks, generation, f"i{generation}", world.plan.options, world.clock.now
        )
        self.closed = ""
        self._alarm: list[Any] | None = None
        self._alarm_at: float | None = None
        self._arm()

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

    def stop(self, until: float) -> None:
        """SIGSTOP."""
        self.stopped = True
        self.stopped_until = until

    def go_on(self) -> None:
        """SIGCONT: what has come is handled before the clock is looked at."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for do, args in sorted(backlog, key=lambda entry: entry[0] == self._tick):
            self.run(do, *args)

    def die(self) -> None:
        """The process is gone, and its memory; what it sent still comes."""
        if not self.alive:
            return
        self.alive = False
        self.world.clock.cancel(self._alarm)
        for connection in list(self.connections.values()):
            self.world.network.close_from_controller(connection)
        self.world.controller_ended(self)

    # -- beside the machine ---------------------------------------------------------------------------

    def refuse(self, connection: Connection, why: m.Refused) -> None:
        """Say no to a rank, whatever the machine thinks of it."""
        if connection.controller_open:
            self.world.network.to_rank(connection, why)
            self.world.network.close_from_controller(connection)
            self.feed(m.Disconnected(connection.number))

    def greeted(self, connection: Connection, seen: int) -> None:
        """A rank's greeting tells the highest generation it has seen."""
        if seen > self.generation:
            self.world.checks.met[STEPPED_DOWN] += 1
            self.refuse(connection, m.Refused(reason="another is to take over", retry=True))
            self.feed(m.Superseded())

    # -- the machine ----------------------------------------------------------------------------------

    def feed(self, event: m.ControllerEvent) -> None:
        """Give the machine an event, and do what it says."""
        if not self.alive:
            return
        before = self.machine.phase
        effects = self.world.checks.controller(self, event)
        for effect in effects:
            self._do(effect)
        if not self.alive:
            return
        self._arm()
        if self.machine.phase is not before:
            self.world.phase_entered(self, before)

    def _arm(self) -> None:
        moment = self.machine.deadline
        if moment != self._alarm_at:
            self.world.clock.cancel(self._alarm)
            self._alarm_at = moment
            self._alarm = None if moment is None else self.world.clock.at(moment, self.run, self._tick)

    def _tick(self) -> None:
        self._alarm_at = self._alarm = None
        self.feed(m.Tick())

    def _do(self, effect: m.ControllerEffect) -> None:
        match effect:
            case m.Send(number, message):
                connection = self.connections.get(number)
                if connection is not None:
                    self.world.network.to_rank(connection, message)
            case m.Drop(number):
                connection = self.connections.get(number)
                if connection is not None:
                    self.world.network.close_from_controller(connection)
                    self.after(0.0, self.feed, m.Disconnected(number))
            case m.Prepare(incident):
                self.world.checks.chose(incident, self.machine.incident)
                self.world.store.prepare(self, effect)
            case m.Commit():
                self.world.store.commit(self, effect)
            case m.Discard(incident):
                self.world.store.discard(self, incident)
            case m.Report():
                self.world.checks.reported(self, effect)
            case m.Close(reason):
                self.closed = reason
                self.world.record(self.name, f"closes: {reason}")
                self.die()

    @property
    def working(self) -> bool:
        """True while an incident is under way."""
        return self.machine.phase in (Phase.FREEZING, Phase.SAVING, Phase.COMMITTING)
