"""Who may register: reasons to refuse. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from swansong.protocol import messages as m
from swansong.protocol.members import Members
from swansong.protocol.messages import Member


def objection(members: Members, connection: int, message: m.Register) -> m.Refused | None:
    """Why a registration is refused; None if it is not. Whatever a peer may send is looked at here."""
    member, size = message.member, members.world_size
    if message.world_size != size or not 0 <= member.rank < size:
        return _never(f"rank {member.rank} of {message.world_size}, this job has {size} ranks")
    speaker = members.on(connection)
    if speaker is not None and speaker.rank != member.rank:
        return _never(f"rank {member.rank} on the connection of rank {speaker.rank}")
    keys = _keys(member)
    if len(keys) != len(member.components):
        return _never(f"rank {member.rank} names a component twice")
    known = members.peers[member.rank].member
    if known is not None and not known.same_process(member):
        return m.Refused(reason=f"rank {member.rank} of this start is another process", retry=True)
    if known is not None and _keys(known) != keys:
        return _never(f"rank {member.rank} has other components than before")
    if not all(0 <= rank < size for rank in message.left):
        return _never(f"rank {member.rank} names ranks that have left, and this job does not have")
    if message.world:
        return _world_objection(members, member, message.world)
    return None


def _world_objection(members: Members, member: Member, world: tuple[Member, ...]) -> m.Refused | None:
    if sorted(other.rank for other in world) != list(range(members.world_size)):
        return _never(
            f"rank {member.rank} brings a world map that is not of ranks 0 to {members.world_size - 1}"
        )
    for other in world:
        known = member if other.rank == member.rank else members.peers[other.rank].member
        if len(_keys(other)) != len(other.components) or (
            known is not None and not (known.same_process(other) and _keys(known) == _keys(other))
        ):
            return _never(f"rank {member.rank} brings a world map that is wrong about rank {other.rank}")
    return None


def _keys(member: Member) -> set[str]:
    return {component.key for component in member.components}


def _never(reason: str) -> m.Refused:
    return m.Refused(reason=reason, retry=False)


def own(fault: m.Fault, rank: int) -> m.Fault:
    """A fault as `rank` may report it: its own, or a request, which is nobody's. It cannot blame another."""
    if fault.rank == rank or (fault.kind is m.FaultKind.REQUESTED and fault.rank == -1):
        return fault
    return msgspec.structs.replace(fault, rank=rank)


def named(ranks: Iterable[int]) -> str:
    """At most eight ranks, in words."""
    listed = sorted(ranks)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed[:8]))}{more}"
