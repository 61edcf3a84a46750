"""What the clock says at each moment of a step, and what passes the gate, whatever the optimizers do."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from array_job import until
from swansong.engine.clock import Gate, GateState, UpdateClock
from swansong.errors import ConfigError, NotSupportedError, TrainingInterrupted
from swansong.protocol.messages import Action, FaultKind, Outcome, Release
from swansong.torch.optimizers import check_optimizer
from swansong.torch.updates import Updates

torch.set_num_threads(1)


class Loop:
    """A model, its optimizers, and what the clock read at each moment."""

    def __init__(self, *optimizers, model=None, scaler=None, gate=None, vote=None):
        self.model = model or nn.Linear(2, 1)
        self.optimizers = [make(self.model.parameters()) for make in optimizers or (sgd,)]
        self.updates = Updates({str(n): one for n, one in enumerate(self.optimizers)}, scaler, vote)
        self.clock, self.gate = UpdateClock("k"), gate
        self.updates.attach(lambda: None)
        self.updates.use(self.clock, gate)
        self.optimizer = self.optimizers[0]
        self.seen = []

    def backward(self, factor=1.0):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(torch.ones(1, 2)).sum() * factor
        loss.backward()
        return loss

    @property
    def at(self):
        """(queued, begun, done)."""
        reading = self.clock.read()
        return reading.queued, reading.begun, reading.done

    @property
    def step(self):
        return self.clock.read().step

    def look(self, *_):
        self.seen.append(self.at)


def sgd(parameters, **given):
    return torch.optim.SGD(parameters, lr=0.1, **given)


KINDS = {
    "for-loop": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "fused SGD": lambda p: sgd(p, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "maximising": lambda p: sgd(p, maximize=True),
}


# -- one update a step --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_whole_at_n_before_and_after_the_update_and_at_none_within(kind):
    loop = Loop(KINDS[kind])
    parameter = next(loop.model.parameters())
    loop.optimizer.register_step_pre_hook(loop.look)  # runs after ours
    for step in range(3):
        loop.backward()
        before = parameter.detach().clone()
        assert loop.step == step
        loop.optimizer.step()
        assert not torch.equal(parameter, before)
        assert loop.step == step + 1
        assert loop.updates.pending
        assert not loop.updates.boundary()
        assert loop.step == step + 1
    assert loop.seen == [(1, 1, 0), (2, 2, 1), (3, 3, 2)]


def test_nothing_is_written_while_the_gate_is_closed():
    gate = Gate(lease_s=60)
    loop = Loop(gate=gate)
    loop.backward()
    before = [p.detach().clone() for p in loop.model.parameters()]
    gate.close()
    thread = threading.Thread(target=loop.optimizer.step)
    thread.start()
    until(lambda: gate.state() is GateState.PARKED)
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert loop.step == 0
    gate.open()
    thread.join()
    assert loop.step == 1
    assert not any(map(torch.equal, before, loop.model.parameters()))


def test_an_interruption_comes_out_of_step_with_nothing_written():
    gate = Gate(lease_s=60)
    loop = Loop(gate=gate)
    loop.backward()
    before = [p.detach().clone() for p in loop.model.parameters()]
    release = Release(incident="i", action=Action.STOP, cause=FaultKind.LOST, outcome=Outcome.NOTHING, step=0)
    gate.interrupt(release)
    with pytest.raises(TrainingInterrupted):
        loop.optimizer.step()
    assert all(map(torch.equal, before, loop.model.parameters()))
    assert (loop.step, loop.updates.pending) == (0, False)


def test_gradient_accumulation_leaves_the_clock_alone_until_the_update():
    loop = Loop()
    for _ in range(4):
        loop.backward()
        assert (loop.at, loop.updates.pending) == ((0, 0, 0), False)
    loop.optimizer.step()
    assert loop.at == (1, 1, 1)


def test_a_scheduler_that_wraps_step_is_no_hindrance():
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.5)
    loop.backward()
    loop.optimizer.step()
    scheduler.step()
    assert loop.at == (1, 1, 1)
    later = Loop()
    torch.optim.lr_scheduler.LinearLR(later.optimizer)
    later.backward()
    later.optimizer.step()
    assert later.at == (1, 1, 1)


def test_an_optimizer_that_calls_the_step_of_its_parent_updates_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            self.looked = self.look()
            return loss

    sgd(nn.Linear(1, 1).parameters())  # so that the parent's step has hooks, too
    loop = Loop(lambda p: Twice(p, lr=0.1))
    loop.optimizer.look = lambda: loop.at
    for step in range(2):
        loop.backward()
        loop.optimizer.step()
        assert loop.optimizer.looked == (step + 1, step + 1, step)  # not over before it is
        assert loop.step == step + 1
        loop.updates.boundary()


# -- several updates a step ---------------------------------------------------------------------------


def test_between_two_optimizers_the_state_is_whole_at_no_step():
    loop = Loop(sgd, sgd)
    for step in range(3):
        loop.backward()
        loop.optimizers[0].step()
        assert loop.step is None
        loop.optimizers[1].step()
        assert loop.step == step + 1
        loop.updates.boundary()
        assert loop.step == step + 1


def test_an_optimizer_that_does_not_step_every_time_leaves_the_update_open_to_the_boundary():
    loop = Loop(sgd, sgd)
    for step in range(4):
        loop.backward()
        loop.optimizers[0].step()
        if step % 2:
            loop.optimizers[1].step()
        assert loop.step == (step + 1 if step % 2 else None)
        loop.updates.boundary()
        assert loop.step == step + 1


def test_one_that_steps_twice_is_expected_to_do_so_again():
    loop = Loop()
    whole = []
    for _ in range(3):
        for _ in range(2):
            loop.backward()
            loop.optimizer.step()
            whole.append(loop.step)
        loop.updates.boundary()
        assert loop.step == len(whole) // 2
    assert whole == [1, 1, None, 2, None, 3]  # of the first step nobody could know that more would come


def test_an_update_that_goes_on_passes_the_gate_again():
    gate = Gate(lease_s=60)
    loop = Loop(gate=gate)
    loop.optimizer.register_step_pre_hook(loop.look)
    loop.backward()
    loop.optimizer.step()
    gate.close()
    thread = threading.Thread(target=loop.optimizer.step)
    thread.start()
    until(lambda: gate.state() is GateState.PARKED)
    assert loop.step == 1
    gate.open()
    thread.join()
    assert loop.seen == [(1, 1, 0), (1, 1, 0)]
    assert loop.step == 1


# -- closures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_with_a_closure_the_update_begins_when_it_has_returned(by_name):
    loop = Loop()

    def closure():
        loop.look()
        return loop.backward()

    for step in range(2):
        result = loop.optimizer.step(closure=closure) if by_name else loop.optimizer.step(closure)
        assert isinstance(result, torch.Tensor)
        assert loop.step == step + 1
        loop.updates.boundary()
    assert loop.seen == [(0, 0, 0), (1, 1, 1)]


def test_lbfgs_calls_its_closure_within_the_update_after_the_first_time():
    loop = Loop(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), model=nn.Linear(2, 1))

    def closure():
        loop.look()
        loop.optimizer.zero_grad()
        loss = (loop.model(torch.ones(1, 2)) - 3).square().sum()
        loss.backward()
        return loss

    loop.optimizer.step(closure)
    assert loop.seen[0] == (0, 0, 0)
    assert set(loop.seen[1:]) == {(1, 1, 0)}
    assert loop.step == 1


def test_a_closure_that_raises_before_the_update_leaves_the_state_whole():
    loop = Loop()

    def closure():
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        loop.optimizer.step(closure)
    assert (loop.step, loop.updates.pending) == (0, False)


# -- scalers ------------------------------------------------------------------------------------------


def scaled(*optimizers):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    return scaler, Loop(*optimizers, scaler=scaler)


def attempt(scaler, loop, *, overflow):
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    loss = loop.model(torch.ones(1, 2)).sum() * (float("inf") if overflow else 1.0)
    scaler.scale(loss).backward()
    for optimizer in loop.optimizers:
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    "kinds", [(sgd,), (KINDS["fused SGD"],), (sgd, sgd)], ids=["plain", "fused", "two optimizers"]
)
def test_a_step_that_a_scaler_leaves_out_counts_and_is_marked(kinds):
    scaler, loop = scaled(*kinds)
    skipped = []
    for step, overflow in enumerate([False, True, False, True]):
        before = [p.detach().clone() for p in loop.model.parameters()]
        attempt(scaler, loop, overflow=overflow)
        assert all(map(torch.equal, before, loop.model.parameters())) == overflow
        assert loop.updates.pending
        skipped.append(loop.updates.boundary())
        assert loop.step == step + 1
    assert skipped == [False, True, False, True]


def test_a_step_left_out_passes_the_gate():
    gate = Gate(lease_s=60)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(scaler=scaler, gate=gate)
    attempt(scaler, loop, overflow=True)
    gate.close()
    thread = threading.Thread(target=loop.updates.boundary)
    thread.start()
    until(lambda: gate.state() is GateState.PARKED)
    assert loop.step == 0
    gate.open()
    thread.join()
    assert loop.step == 1


class Voting:
    """Votes without anybody else."""

    def __init__(self):
        self.asked = []

    def enter(self, gate, clock):
        self.asked.append(clock.read().queued)
        gate.enter((clock,))


def test_each_step_takes_one_vote_and_one_left_out_takes_it_at_once():
    scaler, vote = torch.amp.GradScaler("cpu", init_scale=4.0), Voting()
    loop = Loop(sgd, sgd, scaler=scaler, gate=Gate(lease_s=60), vote=vote)
    for step, overflow in enumerate([False, True, False]):
        attempt(scaler, loop, overflow=overflow)
        assert vote.asked == list(range(step + 1))
        loop.updates.boundary()
        assert loop.step == step + 1
    assert vote.asked == [0, 1, 2]


# -- what goes wrong ----------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    fails = True

    def step(self, closure=None):
        if self.fails:
            raise ValueError("no good")
        return super().step(closure)


def test_a_step_that_raises_leaves_the_state_whole_at_none():
    loop = Loop(lambda p: Failing(p, lr=0.1))
    loop.backward()
    with pytest.raises(ValueError, match="no good"):
        loop.optimizer.step()
    assert loop.step is None


def test_a_loop_that_goes_on_after_a_step_that_raised_counts_right():
    loop = Loop(lambda p: Failing(p, lr=0.1))
    loop.backward()
    with pytest.raises(ValueError, match="no good"):
        loop.optimizer.step()
    loop.optimizer.fails = False
    loop.optimizer.step()  # tried again
    assert loop.step is None
    loop.updates.boundary()
    assert loop.step == 1
    loop.optimizer.step()
    loop.updates.boundary()
    assert loop.step == 2


# -- attached and detached ----------------------------------------------------------------------------


def test_detach_leaves_all_as_it_was():
    scaler = torch.amp.GradScaler("cpu")
    optimizer = sgd(nn.Linear(1, 1).parameters())
    before = dict(vars(optimizer)), dict(vars(scaler))
    updates = Updates({"o": optimizer}, scaler)
    updates.attach(lambda: None)
    assert "step" in vars(scaler)
    updates.detach()
    updates.detach()
    assert (dict(vars(optimizer)), dict(vars(scaler))) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_detach_gives_back_a_step_that_was_wrapped_before_and_leaves_one_wrapped_after():
    scaler = torch.amp.GradScaler("cpu")
    scaler.step = former = lambda optimizer: None
    updates = Updates({"o": sgd(nn.Linear(1, 1).parameters())}, scaler)
    updates.attach(lambda: None)
    updates.detach()
    assert scaler.step is former
    updates.attach(lambda: None)
    scaler.step = later = lambda optimizer: None
    updates.detach()
    assert scaler.step is later


def test_two_protects_on_one_optimizer_are_refused_whenever_the_first_was_entered():
    optimizer = sgd(nn.Linear(1, 1).parameters())
    first, second = Updates({"o": optimizer}), Updates({"o": optimizer})
    first.attach(lambda: None)
    with pytest.raises(ConfigError, match="protected already"):
        second.attach(lambda: None)
    second.detach()  # takes nothing away from the first
    with pytest.raises(ConfigError, match="protected already"):
        Updates({"mine": optimizer})
    first.detach()
    second.attach(lambda: None)


def test_the_run_begins_with_the_first_update_that_is_seen():
    loop = Loop()
    begun = []
    loop.updates.detach()
    loop.updates.attach(lambda: begun.append(loop.at))
    loop.backward()
    assert not begun
    loop.optimizer.step()
    assert begun == [(0, 0, 0)]


class OwnState(torch.optim.SGD):
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("make", "distributed", "error", "words"),
    [
        (lambda p: object(), False, ConfigError, "wanted a torch.optim.Optimizer"),
        (torch.optim.LBFGS, True, ConfigError, "closure"),
        (OwnState, False, NotSupportedError, "state_dict"),
    ],
    ids=["no optimizer", "LBFGS of several ranks", "state elsewhere"],
)
def test_what_cannot_be_followed_is_refused(make, distributed, error, words):
    with pytest.raises(error, match=words):
        check_optimizer("it", make(nn.Linear(1, 1).parameters()), distributed)
