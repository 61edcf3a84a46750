"""The gate: no update begins after it was closed, and nobody waits at it for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from child_process import forked
from swansong.engine.clock import Gate, GateState, UpdateClock, interrupted_by
from swansong.errors import SwansongWarning, TrainingInterrupted
from swansong.protocol.messages import Action, FaultKind, Outcome, Release

LEASE_S = 60.0
SAVED = Release(
    incident="i", outcome=Outcome.SAVED, action=Action.STOP, step=4, path="/here", cause=FaultKind.RAISED
)
NOT_SAVED = Release(
    incident="i",
    outcome=Outcome.NOTHING,
    action=Action.STOP,
    reason="component x has no holder",
    cause=FaultKind.LOST,
)


class Visitor:
    """A main thread that comes to a gate."""

    def __init__(self) -> None:
        self.parks = threading.Event()
        self.gate = Gate(lease_s=LEASE_S, monotonic=self._time)
        self.clock = UpdateClock("k")
        self._pool = ThreadPoolExecutor(1)
        self.now = 0.0

    def _time(self) -> float:
        # Whoever parks asks for the time with the gate's lock held, and lets go of it by waiting.
        if threading.current_thread() is not threading.main_thread():
            self.parks.set()
        return self.now

    def comes(self) -> Future[None]:
        """Let it come to the gate, which is closed; return once it waits there."""
        self.parks.clear()
        coming = self._pool.submit(self.gate.enter, [self.clock])
        self.parks.wait()
        assert self.gate.state() is GateState.PARKED
        return coming


def test_an_open_gate_queues_an_update_of_every_component_that_comes() -> None:
    gate = Gate(lease_s=LEASE_S)
    clocks = [UpdateClock("a"), UpdateClock("b", step=3)]
    gate.enter(clocks)
    assert [clock.read().queued for clock in clocks] == [1, 4]
    assert gate.state() is GateState.OPEN


def test_who_comes_to_a_closed_gate_waits_with_nothing_queued_until_it_opens() -> None:
    visitor = Visitor()
    visitor.gate.close()
    assert visitor.gate.state() is GateState.CLOSED
    coming = visitor.comes()
    assert visitor.clock.read().step == 0
    visitor.gate.open()
    coming.result()
    assert visitor.clock.read().queued == 1
    assert visitor.gate.state() is GateState.OPEN


@pytest.mark.parametrize(
    ("release", "message"),
    [
        pytest.param(SAVED, r"an incident \(raised\): the state of step 4 is in /here", id="saved"),
        pytest.param(
            NOT_SAVED, r"\(lost\): nothing was saved \(component x has no holder\)", id="nothing-saved"
        ),
    ],
)
def test_who_waits_is_told_how_it_ended_and_so_is_whoever_comes_later(release: Release, message: str) -> None:
    visitor = Visitor()
    visitor.gate.close()
    coming = visitor.comes()
    visitor.gate.interrupt(release)
    with pytest.raises(TrainingInterrupted, match=message) as raised:
        coming.result()
    assert (raised.value.step, raised.value.path, raised.value.reason) == (
        release.step,
        release.path,
        release.reason,
    )
    visitor.gate.open()
    with pytest.raises(TrainingInterrupted):
        visitor.gate.enter([visitor.clock])
    assert visitor.clock.read().step == 0


def test_who_is_told_to_end_before_it_comes_ends_at_an_open_gate() -> None:
    gate = Gate(lease_s=LEASE_S)
    gate.interrupt(SAVED)
    with pytest.raises(TrainingInterrupted):
        gate.enter([UpdateClock("k")])


def test_each_who_is_interrupted_has_an_exception_of_its_own() -> None:
    assert interrupted_by(SAVED) is not interrupted_by(SAVED)


def test_who_comes_after_the_lease_of_a_closed_gate_goes_on_and_is_told_why() -> None:
    visitor = Visitor()
    visitor.gate.close()
    visitor.now = LEASE_S
    with pytest.warns(SwansongWarning, match=r"closed for 60 s without a word .* training goes on"):
        visitor.gate.enter([visitor.clock])
    assert visitor.clock.read().queued == 1
    assert visitor.gate.state() is GateState.OPEN


@pytest.mark.parametrize("word", [Gate.renew, Gate.close], ids=["renew", "close"])
def test_a_word_keeps_a_closed_gate_closed_for_another_lease(word: Callable[[Gate], None]) -> None:
    visitor = Visitor()
    visitor.gate.close()
    visitor.now = LEASE_S - 1
    word(visitor.gate)
    visitor.now = 2 * LEASE_S - 2
    coming = visitor.comes()
    visitor.gate.open()
    coming.result()


def test_a_lease_that_ends_while_somebody_waits_lets_it_go_on() -> None:
    gate = Gate(lease_s=0.05)
    gate.close()
    with pytest.warns(SwansongWarning, match="without a word"):
        gate.enter([UpdateClock("k")])


def test_no_update_is_queued_between_the_return_of_close_and_open() -> None:
    gate = Gate(lease_s=LEASE_S)
    clock = UpdateClock("k")
    rounds = 300

    def train() -> None:
        try:
            while True:
                gate.enter([clock])
                with clock.window():
                    pass
        except TrainingInterrupted:
            pass

    trainer = threading.Thread(target=train)
    trainer.start()
    moved = []
    for _ in range(rounds):
        gate.close()
        queued = clock.read().queued
        while gate.state() is not GateState.PARKED:
            moved.append(clock.read().queued - queued)
        moved.append(clock.read().queued - queued)
        assert clock.read().step == queued
        gate.open()
    gate.interrupt(SAVED)
    trainer.join()
    assert set(moved) == {0}


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_vote_is_one_act_with_what_the_gate_says(closed: bool) -> None:
    gate = Gate(lease_s=LEASE_S)
    clock = UpdateClock("k")
    if closed:
        gate.close()
    votes: list[tuple[bool, bool, int]] = []

    def contribute(answer: bool) -> None:
        votes.append((answer, gate._lock.locked(), clock.read().queued))

    assert gate.try_enter([clock], contribute) is not closed
    assert votes == [(not closed, True, 0 if closed else 1)]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(lambda gate: gate.close(), id="closed"),
        pytest.param(lambda gate: gate.interrupt(SAVED), id="interrupted"),
        pytest.param(lambda gate: gate._lock.acquire(), id="in-the-hands-of-another-thread"),
    ],
)
def test_a_forked_child_has_an_open_gate_of_its_own(before: Callable[[Gate], object]) -> None:
    gate = Gate(lease_s=LEASE_S)
    clock = UpdateClock("k")
    before(gate)

    def child() -> None:
        gate.enter([clock])
        assert gate.state() is GateState.OPEN

    assert forked(child) == 0
    assert clock.read().queued == 0
