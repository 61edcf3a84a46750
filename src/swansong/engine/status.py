"""How a job stands, as the controller machine sees it, in the words of `protocol.operator`."""

from __future__ import annotations

from collections import Counter

from swansong.protocol import messages as m
from swansong.protocol.admission import named
from swansong.protocol.controller import Controller
from swansong.protocol.incident import Incident
from swansong.protocol.members import Peer
from swansong.protocol.operator import (
    MAX_LISTED,
    Ending,
    FaultStatus,
    IncidentStatus,
    RankStatus,
    Status,
    short,
)
from swansong.protocol.states import WORKING, Phase

_HOST = 200
"""Characters of a host's name that are told: a whole answer has to fit a frame."""


def describe(machine: Controller, *, generation: int, up_s: float, now: float, last: Ending | None) -> Status:
    """The answer to a StatusRequest."""
    peers = machine.members.peers.values()
    ranks = [_rank(peer, now, up_s) for peer in peers]
    counts = Counter(rank.state for rank in ranks)
    ranks.sort(key=lambda rank: rank.state == "connected")  # stable: by rank within
    reason = _why_unprotected(machine)
    return Status(
        phase=machine.phase.value,
        phase_s=now - machine.since,
        world_size=machine.members.world_size,
        generation=generation,
        up_s=up_s,
        protected=not reason,
        reason=short(reason),
        counts=dict(counts),
        ranks=tuple(ranks[:MAX_LISTED]),
        incident=_incident(machine.incident, now) if machine.incident is not None else None,
        last=last,
    )


def ending(report: m.Report) -> Ending:
    """How an incident ended, from its report."""
    return Ending(
        incident=report.incident,
        outcome=report.outcome,
        step=report.step,
        path=short(report.path),
        reason=short(report.reason),
    )


def _rank(peer: Peer, now: float, up_s: float) -> RankStatus:
    member = peer.member
    return RankStatus(
        rank=peer.rank,
        state=_state(peer),
        state_s=now - peer.since if peer.since is not None else up_s,
        host=member.host[:_HOST] if member is not None else "",
        pid=member.pid if member is not None else None,
        step=peer.step,
        step_age_s=now - peer.step_at if peer.step is not None and peer.step_at is not None else None,
    )


def _state(peer: Peer) -> str:
    if peer.gone:
        return "left"
    if peer.lost:
        return "lost"
    if peer.connection is not None:
        return "connected"
    return "missing" if peer.member is None else "absent"


def _why_unprotected(machine: Controller) -> str:
    members = machine.members
    if machine.phase is Phase.GATHERING:
        return f"{named(members.missing())} of {members.world_size} did not register yet"
    if machine.phase in WORKING:
        return "an incident is under way"
    if machine.phase is not Phase.TRAINING or members.world is None:
        return "the job is ending"
    away = members.peers.keys() - {peer.rank for peer in members.connected()}
    for component in members.world.lost_with(away):
        holders = members.world.holders(component.key)
        return f"component {component.label}, of {named(holders)}, is on no connected rank"
    return ""


def _incident(incident: Incident, now: float) -> IncidentStatus:
    faults = [FaultStatus(kind=f.kind, rank=f.rank, what=short(f.what)) for f in incident.faults]
    return IncidentStatus(
        incident=incident.id,
        faults=tuple(faults[:MAX_LISTED]),
        seconds=now - incident.opened_at,
        step=incident.cut.step if incident.cut is not None else None,
        savers=tuple(sorted({order.rank for order in incident.orders})[:MAX_LISTED]),
    )
