"""The ranks as the controller sees them: who registered, who is connected, who is lost, who has left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swansong.protocol.messages import Member, Register
from swansong.state.components import Component, WorldMap


@dataclass(slots=True)
class Peer:
    """One rank."""

    rank: int
    member: Member | None = None
    """What it registered with; None: it never has."""
    connection: int | None = None
    """None: not connected."""
    absent_until: float | None = None
    """When an unconnected rank counts as lost; None: connected, lost, gone, or never here."""
    lost: bool = False
    informed: bool = False
    """It knows the world map."""
    frozen: bool = False
    """Its gate was closed when it registered."""
    leaving_since: float | None = None
    """When it said goodbye."""
    gone: bool = False
    """It has been told farewell: its end is no fault."""
    since: float | None = None
    """When it came to be as it is: connected, absent, lost or gone. None: it was never here."""
    step: int | None = None
    """Last boundary that it reported."""
    step_at: float | None = None
    """When; None: never."""

    def register(self, connection: int, message: Register, now: float) -> None:
        """It is here, for the first time or again; whatever it missed, it will be told again."""
        self.member, self.connection = message.member, connection
        self.absent_until, self.lost = None, False
        self.leaving_since, self.gone = None, False
        self.informed, self.frozen = bool(message.world), message.frozen
        self.since = now


@dataclass(slots=True)
class Members:
    """All ranks, and which connection is whose."""

    world_size: int
    peers: dict[int, Peer] = field(init=False)
    adopted_at: float | None = None
    """When the world map was taken over from a former controller; None: it was not."""
    world: WorldMap | None = None
    """Known once everybody has registered, or as told by a rank that knew it."""

    def __post_init__(self) -> None:
        self.peers = {rank: Peer(rank) for rank in range(self.world_size)}

    def on(self, connection: int) -> Peer | None:
        """The rank that speaks on a connection."""
        return next((peer for peer in self.peers.values() if peer.connection == connection), None)

    def connected(self) -> list[Peer]:
        """Ranks that can be told something, lowest first; those that were told farewell not among them."""
        return [p for p in self.peers.values() if p.connection is not None and not p.gone]

    def absent(self) -> list[Peer]:
        """Ranks whose connection ended and that may yet come back."""
        return [p for p in self.peers.values() if p.absent_until is not None]

    def overdue(self, now: float) -> list[Peer]:
        """Of these, those that have had their time."""
        return [p for p in self.absent() if p.absent_until is not None and p.absent_until <= now]

    def expected(self) -> set[int]:
        """Ranks that may still report something."""
        return {p.rank for p in self.connected()} | {p.rank for p in self.absent()}

    def missing(self) -> list[int]:
        """Ranks that never registered."""
        return [peer.rank for peer in self.peers.values() if peer.member is None]

    def adopt(self, members: Iterable[Member], now: float, patience_s: float) -> None:
        """Take over a world map that a rank brought along; who is not connected is awaited."""
        self.adopted_at = now
        for member in members:
            peer = self.peers[member.rank]
            peer.member = member
            if peer.connection is None and not peer.gone:
                peer.absent_until, peer.since = now + patience_s, now
        self.complete()

    def waited_s(self, now: float, most_s: float) -> float:
        """How long the ranks of an adopted world were awaited; a pause of this process does not count."""
        return 0.0 if self.adopted_at is None else min(now - self.adopted_at, most_s)

    def dismiss(self, ranks: Iterable[int], now: float) -> None:
        """These have left, as a rank says that a former controller said; those that are here have not."""
        for rank in ranks:
            peer = self.peers[rank]
            if peer.connection is None:
                peer.gone, peer.absent_until, peer.since = True, None, now

    def complete(self) -> tuple[Member, ...]:
        """Make the world map of what has been registered."""
        members = tuple(peer.member for peer in self.peers.values() if peer.member is not None)
        self.world = WorldMap(
            {
                member.rank: tuple(Component(c.key, c.label, c.nbytes) for c in member.components)
                for member in members
            }
        )
        return members

    def may_leave(self) -> bool:
        """True if nobody stays, so that who has finished need not.

        Replicas still at work do not make a finished rank's state dispensable: a fault may tear them.
        """
        return all(p.leaving_since is not None or p.gone or p.lost for p in self.peers.values())
