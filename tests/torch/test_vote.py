"""All ranks begin an update or none does: how a voice is cast, counted, taken back and read again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from array_job import until
from swansong.engine.clock import Gate, GateState, UpdateClock
from swansong.errors import SwansongError, TrainingInterrupted
from swansong.protocol.messages import Action, FaultKind, Outcome, Release
from swansong.torch import vote as module
from swansong.torch.vote import Vote

YES, NO = 1, 0


class Others:
    """What one other rank says, ballot after ballot: (step, voice), or an error; None: nothing yet."""

    def __init__(self, *says):
        self.says, self.cast, self.ready = list(says), [], threading.Event()
        self.totals = []

    def start(self, total):
        self.cast.append(divmod(total.item(), module._STEP))
        self.totals.append(total)
        said = self.says.pop(0)
        if said is not None:
            self.answer(said)
        return self

    def answer(self, said):
        if isinstance(said, Exception):
            self.failure = said
        else:
            self.failure = None
            self.totals[-1] += said[0] * module._STEP + said[1]
        self.ready.set()

    def is_completed(self):
        return self.ready.is_set()

    def wait(self, timeout):
        if not self.ready.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise self.failure
        if self.says:
            self.ready.clear()


@pytest.fixture
def gate():
    return Gate(lease_s=60)


@pytest.fixture
def clock():
    return UpdateClock("k", step=4)


def queued(clock):
    return clock.read().queued


def test_a_unanimous_yes_queues_the_update(gate, clock):
    others = Others((5, YES))
    Vote(2, others.start).enter(gate, clock)
    assert (others.cast, queued(clock)) == ([(5, YES)], 5)


def test_a_no_of_another_takes_back_what_was_queued_and_the_vote_is_taken_again(gate, clock):
    others = Others((5, NO), (5, YES))
    Vote(2, others.start).enter(gate, clock)
    assert (others.cast, queued(clock)) == ([(5, YES), (5, YES)], 5)


def test_with_the_gate_closed_it_says_no_and_parks_and_votes_again_when_it_opens(gate, clock):
    others = Others((5, YES), (5, YES))
    gate.close()
    thread = threading.Thread(target=Vote(2, others.start).enter, args=(gate, clock))
    thread.start()
    until(lambda: gate.state() is GateState.PARKED)
    assert (others.cast, clock.read().step) == ([(5, NO)], 4)
    gate.open()
    thread.join()
    assert (others.cast, queued(clock)) == ([(5, NO), (5, YES)], 5)


def test_a_yes_of_all_is_carried_out_though_the_gate_has_closed_meanwhile(gate, clock):
    others = Others(None)
    thread = threading.Thread(target=Vote(2, others.start).enter, args=(gate, clock))
    thread.start()
    until(lambda: others.totals)
    gate.close()
    others.answer((5, YES))
    thread.join()
    assert queued(clock) == 5


def test_a_vote_pending_at_a_closed_gate_is_taken_back_and_read_again_not_repeated(gate, clock, monkeypatch):
    monkeypatch.setattr(module, "_GRACE_S", 0.0)
    others = Others(None)
    thread = threading.Thread(target=Vote(2, others.start).enter, args=(gate, clock))
    thread.start()
    until(lambda: others.totals)
    gate.close()
    until(lambda: gate.state() is GateState.PARKED)
    assert clock.read().step == 4  # whole, and can be saved
    gate.open()
    others.answer((5, YES))
    thread.join()
    assert (others.cast, queued(clock)) == ([(5, YES)], 5)


def test_the_end_of_training_at_a_closed_gate_leaves_nothing_queued(gate, clock):
    others = Others((5, YES))
    gate.interrupt(Release(incident="i", action=Action.STOP, cause=FaultKind.LOST, outcome=Outcome.NOTHING))
    with pytest.raises(TrainingInterrupted):
        Vote(2, others.start).enter(gate, clock)
    assert clock.read().step == 4


@pytest.mark.parametrize(
    ("says", "error", "words"),
    [
        (RuntimeError("Connection closed by peer"), RuntimeError, "closed by peer"),
        ((4, YES), SwansongError, "another step"),
        ((6, NO), SwansongError, "another step"),
    ],
    ids=["dead", "a step behind", "a step ahead"],
)
def test_a_vote_that_fails_leaves_the_state_whole(gate, clock, says, error, words):
    with pytest.raises(error, match=words):
        Vote(2, Others(says).start).enter(gate, clock)
    assert clock.read().step == 4


def test_a_rank_that_dies_while_votes_are_counted_leaves_the_word_to_the_incident(gate, clock):
    others = Others(None)
    ended = []

    def enter():
        with pytest.raises(TrainingInterrupted) as caught:
            Vote(2, others.start).enter(gate, clock)
        ended.append(caught.value)

    thread = threading.Thread(target=enter)
    thread.start()
    until(lambda: others.totals)
    others.answer(RuntimeError("Connection closed by peer"))
    gate.close()  # perhaps a moment later, perhaps before
    until(lambda: gate.state() is GateState.PARKED)
    assert clock.read().step == 4
    gate.interrupt(Release(incident="i", action=Action.STOP, cause=FaultKind.LOST, outcome=Outcome.NOTHING))
    thread.join()
    assert len(ended) == 1


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(gate, clock, monkeypatch):
    monkeypatch.setattr(module, "_DEADLINE", module._SLICE)
    with pytest.raises(SwansongError, match="did not come"):
        Vote(2, Others(None).start).enter(gate, clock)
    assert clock.read().step == 4


SCRIPT = """
import os, random, sys, threading
from torch import distributed as dist
from swansong.engine.clock import Gate, UpdateClock
from swansong.torch.vote import Vote

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
vote, gate, clock = Vote.of_all_ranks(), Gate(lease_s=60), UpdateClock("k")
over = threading.Event()

def close_and_open():
    draw = random.Random(rank)
    while not over.wait(draw.random() * 0.01):
        gate.close()
        over.wait(draw.random() * 0.01)
        gate.open()
    gate.open()

thread = threading.Thread(target=close_and_open)
thread.start()
for _ in range(100):
    vote.enter(gate, clock)
    clock.begin()
    clock.finish()
over.set()
thread.join()
os.write(1, b"rank %d at %d\\n" % (rank, clock.read().step))
dist.destroy_process_group()
if rank == 0:
    os.wait()
"""


def test_ranks_whose_gates_close_and_open_at_any_time_stay_in_step(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert sorted(ended.stdout.splitlines()) == ["rank 0 at 100", "rank 1 at 100"], ended.stderr
