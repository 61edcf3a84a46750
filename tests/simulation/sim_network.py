"""Connections between ranks and controllers: in order, delayed, cut, refused."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from simulation.sim_transcript import shown
from swansong.protocol import messages as m

if TYPE_CHECKING:
    from simulation.sim_controller import SimController
    from simulation.sim_rank import SimRank
    from simulation.sim_world import World

HANDSHAKE_S = 5.0
"""How long either side waits for the other's part of the handshake."""


class Connection:
    """One connection. What was sent comes in order, unless the connection breaks first."""

    __slots__ = (
        "broken",
        "controller",
        "controller_open",
        "down",
        "made_at",
        "number",
        "rank",
        "rank_open",
        "up",
    )

    def __init__(self, number: int, rank: SimRank, controller: SimController, now: float) -> None:
        self.number, self.rank, self.controller, self.made_at = number, rank, controller, now
        self.up = self.down = now
        self.broken = False
        self.rank_open = self.controller_open = True


class Network:
    """Every connection, and what is in the way of new ones."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng, self.plan = world, rng, world.plan
        self.connections: list[Connection] = []
        self.blocked_until: dict[int, float] = {}
        """By rank."""
        self.lost_hosts: set[int] = set()
        self.messages = 0

    def _delay(self) -> float:
        return self.plan.latency_s * (0.2 + self.rng.random())

    # -- making connections ---------------------------------------------------------------------------

    def connect(self, rank: SimRank) -> None:
        """A rank wants a connection; on the controller's host it starts a controller if none listens."""
        now, world = self.world.clock.now, self.world
        if self.blocked_until.get(rank.number, 0.0) > now or rank.host in self.lost_hosts:
            rank.after(0.5 + self.rng.random(), rank.not_connected)
            return
        controller = world.reached()
        if 0 in self.lost_hosts:
            rank.after(1.0, rank.not_connected)
        elif controller is None:
            if rank.host == 0:
                world.start_controller(f"rank {rank.number}")
            rank.after(self._delay(), rank.not_connected)
        elif controller.stopped and controller.stopped_until > now + HANDSHAKE_S:
            rank.after(HANDSHAKE_S, rank.not_connected)
        elif controller.stopped:
            rank.at(controller.stopped_until + 0.001, self.connect, rank)
        else:
            connection = Connection(len(self.connections), rank, controller, now)
            self.connections.append(connection)
            controller.connections[connection.number] = connection
            if self.plan.greetings:
                controller.greeted(connection, rank.seen)
            rank.after(2 * self._delay(), rank.connected, connection)

    # -- sending --------------------------------------------------------------------------------------

    def to_controller(self, connection: Connection, message: m.ToController) -> None:
        """Send, from the rank."""
        if connection.rank_open:
            self.messages += 1
            self.world.checks.message(message)
            if isinstance(message, m.Register):
                self.world.happened("register")
            connection.up = max(connection.up, self.world.clock.now + self._delay())
            self.world.clock.at(connection.up, self._arrive_up, connection, message)

    def to_rank(self, connection: Connection, message: m.ToProcessor) -> None:
        """Send, from the controller."""
        if connection.controller_open:
            self.messages += 1
            self.world.checks.message(message)
            if isinstance(message, m.Welcome):
                self.world.happened("welcome")
            connection.down = max(connection.down, self.world.clock.now + self._delay())
            self.world.clock.at(connection.down, self._arrive_down, connection, message)

    def _arrive_up(self, connection: Connection, message: m.ToController | None) -> None:
        if connection.broken or not connection.controller_open:
            return
        connection.controller.run(self._hear_up, connection, message)

    def _hear_up(self, connection: Connection, message: m.ToController | None) -> None:
        if not connection.controller_open:
            return
        if message is None:
            self._end_controller_side(connection)
        else:
            self.world.record(
                connection.controller.name, f"<- rank {connection.rank.number}: {shown(message)}"
            )
            connection.controller.feed(m.Received(connection.number, message))

    def _arrive_down(self, connection: Connection, message: m.ToProcessor | None) -> None:
        if connection.broken or not connection.rank_open:
            return
        connection.rank.run(self._hear_down, connection, message)

    def _hear_down(self, connection: Connection, message: m.ToProcessor | None) -> None:
        if not connection.rank_open:
            return
        if message is None:
            self._end_rank_side(connection)
        else:
            self.world.record(connection.rank.name, f"<- controller: {shown(message)}")
            connection.rank.feed(m.FromController(message))

    # -- ends -----------------------------------------------------------------------------------------

    def close_from_rank(self, connection: Connection) -> None:
        """The rank's end is closed, or its process gone: what was sent still comes."""
        if connection.rank_open:
            connection.rank_open = False
            connection.up = max(connection.up, self.world.clock.now + self._delay())
            self.world.clock.at(connection.up, self._arrive_up, connection, None)

    def close_from_controller(self, connection: Connection) -> None:
        """The controller's end is closed, or its process gone."""
        if connection.controller_open:
            connection.controller_open = False
            connection.controller.connections.pop(connection.number, None)
            connection.down = max(connection.down, self.world.clock.now + self._delay())
            self.world.clock.at(connection.down, self._arrive_down, connection, None)

    def cut(self, connection: Connection, *, silent: bool) -> None:
        """Nothing comes through any more; each side notices for itself, by keep-alive if `silent`."""
        if connection.broken:
            return
        connection.broken = True
        late = self.plan.host_timeout_s if silent else 0.0
        connection.rank.after(late + self.rng.random() * 0.5, self._end_rank_side, connection)
        connection.controller.after(late + self.rng.random() * 0.5, self._end_controller_side, connection)

    def _end_rank_side(self, connection: Connection) -> None:
        if connection.rank_open:
            connection.rank_open = False
            self.world.record(connection.rank.name, "sees its connection end")
            connection.rank.disconnected(connection)

    def _end_controller_side(self, connection: Connection) -> None:
        if connection.controller_open:
            connection.controller_open = False
            connection.controller.connections.pop(connection.number, None)
            self.world.record(
                connection.controller.name, f"sees the connection of rank {connection.rank.number} end"
            )
            connection.controller.feed(m.Disconnected(connection.number))

    def lose_host(self, host: int) -> None:
        """A host is gone without a word."""
        self.lost_hosts.add(host)
        for connection in self.connections:
            if connection.rank.host == host or host == 0:
                self.cut(connection, silent=True)
