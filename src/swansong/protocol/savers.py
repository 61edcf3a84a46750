"""Orders to savers: given, repeated, given to others, recalled."""

from __future__ import annotations

from swansong.policy.cut import Cut
from swansong.protocol import messages as m
from swansong.protocol.incident import Incident, Order
from swansong.protocol.members import Peer
from swansong.protocol.outbox import Outbox


def begin(incident: Incident, cut: Cut, out: Outbox, now: float) -> None:
    """Give the orders of a cut, but for components that are durable already."""
    incident.decide(cut)
    out.do(m.Prepare(incident.id, cut.step))
    durable = incident.durable(cut)
    for order in incident.order({key: rank for key, rank in cut.savers.items() if key not in durable}, now):
        _tell(order, incident, out)
    _cover_hosts(incident, out, now)


def repeat(incident: Incident, peer: Peer, out: Outbox) -> None:
    """Tell a rank that has come back what it is to write: it may not have heard."""
    for order in incident.open_orders(peer.rank):
        _tell(order, incident, out)


def replace(
    incident: Incident, failed: list[Order], reason: str, out: Outbox, now: float, *, lost: bool, moved: bool
) -> bool:
    """Give the components of failed orders to others at that step; False if one has nobody left.

    A rank that was lost may write again should it come back, and so may one whose state moved, once it has
    reported afresh.
    """
    for order in failed:
        incident.note(f"rank {order.rank}, attempt {order.attempt}: {reason}")
        if not order.keys and not lost:
            incident.mute_hosts.add(_host(out.members.peers[order.rank]))
        if not lost:
            pairs = ((order.rank, key) for key in order.keys)
            (incident.moved if moved else incident.excluded).update(pairs)
            incident.failure = f"rank {order.rank}: {reason[:1000]}"
        _void(order, incident, out)
    incident.drop(failed)
    chosen = incident.substitutes(failed, {peer.rank for peer in out.members.connected()})
    if chosen is None:
        return False
    for order in incident.order(chosen, now):
        _tell(order, incident, out)
    _cover_hosts(incident, out, now)
    return True


def recall(incident: Incident, out: Outbox) -> None:
    """Nothing that is not done yet will count."""
    for order in incident.open_orders():
        _void(order, incident, out)


def _cover_hosts(incident: Incident, out: Outbox, now: float) -> None:
    """Have a rank of each host without a saver write what the flight recorders there hold of all its ranks.

    Only there can they be read; it is worth a part, but no more than one try that fails.
    """
    peers = out.members.peers
    covered = incident.mute_hosts | {_host(peers[rank]) for rank in incident.recording()}
    for peer in out.members.connected():
        if _host(peer) not in covered and peer.rank in incident.reports:
            covered.add(_host(peer))
            _tell(incident.order_records(peer.rank, now), incident, out)


def _host(peer: Peer) -> str:
    return peer.member.host if peer.member is not None else ""


def _tell(order: Order, incident: Incident, out: Outbox) -> None:
    save = m.Save(incident=incident.id, attempt=order.attempt, step=order.step, keys=order.keys)
    out.send(out.members.peers[order.rank], save)


def _void(order: Order, incident: Incident, out: Outbox) -> None:
    out.send(out.members.peers[order.rank], m.Void(incident=incident.id, attempt=order.attempt))
