"""Which fault began an incident, whatever became known first."""

from __future__ import annotations

from itertools import permutations

import pytest

from swansong.persist.causes import cause
from swansong.protocol.messages import Fault, FaultKind

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:57531."


def raised(rank: int, what: str = GLOO, traceback: str = "") -> Fault:
    return Fault(kind=FaultKind.RAISED, rank=rank, what=what, traceback=traceback, step=7)


def bad(rank: int) -> Fault:
    return raised(rank, "ValueError: bad batch")


def lost(rank: int, *, answered_at: int | None = None) -> Fault:
    return Fault(kind=FaultKind.LOST, rank=rank, what="its process ended", step=answered_at)


def other(kind: FaultKind, rank: int = 0) -> Fault:
    return Fault(kind=kind, rank=rank, step=7)


STALL, SIGNAL = other(FaultKind.STALLED), other(FaultKind.SIGNALLED)
REQUEST = other(FaultKind.REQUESTED, -1)
WRAPPED = raised(0, "StepFailed: step 8", f"Traceback ...\n{GLOO}\n\nThe above exception was ...")


@pytest.mark.parametrize(
    ("faults", "began"),
    [
        ([lost(2), raised(0), raised(1)], 0),
        ([raised(0), lost(2), raised(1)], 1),
        ([raised(0), raised(1), lost(2)], 2),
        ([raised(0), raised(1), lost(2), lost(3)], 2),
        ([raised(0), SIGNAL, lost(2)], 2),
        ([raised(0), other(FaultKind.STALLED, 1), lost(2)], 2),
        ([WRAPPED, lost(2)], 1),
        ([raised(0, "RuntimeError: something else"), lost(2)], 1),
        ([raised(0, "EOFError"), lost(2)], 1),
        ([raised(2), lost(2), raised(0)], 0),
        ([raised(2), lost(2), raised(0), lost(0)], 0),
        ([raised(0), raised(1), lost(0), lost(2), lost(1)], 3),
        ([raised(0), other(FaultKind.SIGNALLED, 2), lost(2)], 0),
        ([raised(0), lost(2, answered_at=7)], 0),
        ([raised(0), lost(2, answered_at=0)], 0),
        ([raised(0), lost(2, answered_at=7), lost(3)], 2),
        ([bad(2), raised(0), raised(1), raised(3)], 0),
        ([bad(2), lost(2), raised(0)], 0),
        ([bad(2), lost(1)], 0),
        ([raised(0), bad(2)], 0),
        ([lost(1), bad(2)], 0),
        ([STALL, raised(1), lost(2)], 0),
        ([SIGNAL, raised(1), lost(2)], 0),
        ([REQUEST, raised(1), lost(2)], 0),
        ([lost(2), SIGNAL], 0),
        ([STALL, lost(2)], 0),
    ],
    ids=[
        "loss, then what it did",
        "loss between its consequences",
        "loss after its consequences",
        "the first of two losses",
        "the launcher's signal between",
        "a stall between",
        "another exception made of it",
        "an exception that may be of it",
        "an exception without words",
        "died of its own exception",
        "two died of their own exceptions",
        "survivors died, too",
        "ended by a signal that it told of",
        "lost after it had answered",
        "lost after it had answered, at step 0",
        "one lost later, one before",
        "bad batch, then what it did",
        "died of a bad batch",
        "bad batch and a loss at one moment",
        "two exceptions by arrival",
        "loss before a bad batch",
        "a stall came first",
        "a signal came first",
        "a request came first",
        "loss before a signal",
        "stalled, then lost",
    ],
)
def test_what_began_an_incident(faults: list[Fault], began: int) -> None:
    assert cause(faults) is faults[began]


def test_however_a_kill_becomes_known_the_loss_began_it() -> None:
    killed = [raised(0), raised(1), raised(3), lost(2)]
    assert {cause(order) for order in permutations(killed)} == {lost(2)}


def test_nothing_began_what_had_no_fault() -> None:
    assert cause(()) is None
