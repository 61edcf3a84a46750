"""Which fault of an incident began it. Pure.

Faults come in the order in which the controller learned of them, which is not that in which they happened.
If a process is killed, the kernel frees its memory and closes its sockets before it tells of the end, and an
end on another host is known only when the process has not come back for `reconnect_s`; until then, survivors
that were in a collective with it have thrown. So the first that became known is the cause, but:

- If that is an exception, and a rank is lost in the incident of which nothing was heard since the incident
  began, the loss is the cause: the rank was gone before anybody was told to freeze, or it would have
  answered. Of several such losses, the first.
- It is not if the exception is none that comes out of a collective (a ValueError that does not speak of a
  peer, say); then two things went wrong at one moment, and the one that is known to be first stays.

Something was heard of a lost rank if it answered the freeze (its LOST then has a step), or if it reported a
fault of its own: so an exception stays the cause when the process that threw it dies, and a saver that is
lost later is no cause. A stall, a signal or a request that became known first stays the cause, whatever
follows: nothing of what a loss does to survivors looks like these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from swansong.persist.failure_text import tells_of_a_peer
from swansong.protocol.messages import Fault, FaultKind

_OF_COLLECTIVES: Final = frozenset(
    {
        "RuntimeError",
        "DistError",
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "OSError",
        "ConnectionError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "BrokenPipeError",
        "TimeoutError",
        "EOFError",
    }
)
"""Types of exceptions that come out of communication, by name."""


def cause(faults: Sequence[Fault]) -> Fault | None:
    """The one of `faults`, in the order in which they became known, that began it all; None of none."""
    if not faults:
        return None
    first = faults[0]
    if first.kind is FaultKind.RAISED and _may_follow_from_a_loss(first):
        heard: set[int] = set()
        for fault in faults:
            if fault.kind is FaultKind.LOST and fault.step is None and fault.rank not in heard:
                return fault
            heard.add(fault.rank)
    return first


def _may_follow_from_a_loss(fault: Fault) -> bool:
    type_name, _, _ = fault.what.partition(":")
    return type_name in _OF_COLLECTIVES or tells_of_a_peer(fault.what, fault.traceback)
