"""What the controller says: effects collected while one event is handled."""

from __future__ import annotations

from dataclasses import dataclass, field

from swansong.protocol import messages as m
from swansong.protocol.members import Members, Peer
from swansong.protocol.messages import ControllerEffect


@dataclass(slots=True)
class Outbox:
    """Effects in order, and when everybody was last spoken to."""

    members: Members
    spoke_at: float
    effects: list[ControllerEffect] = field(default_factory=list)

    def take(self) -> list[ControllerEffect]:
        """Return what has been collected, and begin anew."""
        taken, self.effects = self.effects, []
        return taken

    def do(self, effect: ControllerEffect) -> None:
        """Anything but a message."""
        self.effects.append(effect)

    def send(self, peer: Peer, message: m.ToProcessor) -> None:
        """To one rank, if it is connected; who is not hears what matters when it registers again."""
        if peer.connection is not None:
            self.effects.append(m.Send(peer.connection, message))

    def broadcast(self, message: m.ToProcessor, now: float) -> None:
        """To every connected rank."""
        self.spoke_at = now
        for peer in self.members.connected():
            self.send(peer, message)

    def hold(self, incident: str, now: float, every_s: float) -> float:
        """Tell everybody that an incident goes on, unless they heard anything lately; when to look again."""
        if now >= self.spoke_at + every_s:
            self.broadcast(m.Hold(incident=incident), now)
        return self.spoke_at + every_s

    def inform(self) -> None:
        """Tell the world map to every connected rank that does not know it."""
        peers = self.members.peers.values()
        members = tuple(peer.member for peer in peers if peer.member is not None)
        for peer in peers:
            if peer.connection is not None and not peer.informed:
                peer.informed = True
                self.send(peer, m.World(members=members))

    def farewell(self, now: float, timeout_s: float) -> float | None:
        """Let go who has said goodbye and is not needed, or has waited long enough; when to look again."""
        moments: list[float] = []
        going: list[Peer] = []
        may_leave = self.members.may_leave()
        for peer in self.members.peers.values():
            if peer.leaving_since is None or peer.gone:
                continue
            ends = peer.leaving_since + timeout_s
            if now < ends and not may_leave:
                moments.append(ends)
            else:
                peer.gone, peer.absent_until, peer.since = True, None, now
                going.append(peer)
        if going:
            left = self._left()
            for peer in self.members.connected():
                self.send(peer, left)
        for peer in going:
            self.send(peer, m.Farewell())
        return min(moments, default=None)

    def tell_left(self, peer: Peer) -> None:
        """Tell a rank who has left, if anybody has."""
        if (left := self._left()).ranks:
            self.send(peer, left)

    def _left(self) -> m.Left:
        return m.Left(ranks=tuple(peer.rank for peer in self.members.peers.values() if peer.gone))

    def refuse(self, connection: int, why: m.Refused) -> None:
        """Say why, and end the connection."""
        self.effects += [m.Send(connection, why), m.Drop(connection)]

    def refuse_all(self, why: m.Refused) -> None:
        """End every connection."""
        for peer in self.members.peers.values():
            if peer.connection is not None:
                self.refuse(peer.connection, why)
