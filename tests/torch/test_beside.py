"""Averages of the model and other modules that `also` names: saved in place, whenever they are written."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import swansong.torch
from array_job import QUICK, free_port, until
from swansong import TTPOptions
from swansong.engine.clock import Gate, GateState, UpdateClock
from swansong.errors import ConfigError, LoadError, SwansongWarning
from swansong.store import catalog
from swansong.torch.generators import Generators
from swansong.torch.moved import Moved
from swansong.torch.moving import SMALL
from swansong.torch.state import TrainingState
from swansong.torch.updates import Updates
from torch_states import saved, values
from torch_training import bits

WIDE = SMALL // 4 + 1
"""Elements of float32 that are too many to be copied for nothing."""


def ema(model, **given):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), **given)


class Loop:
    """A model and an average of it, without a run around them."""

    def __init__(self, make=ema, *, norm=True, gate=None):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.average = make(self.model)
        self.state = TrainingState(self.model, {"o": self.optimizer}, {"ema": self.average})
        self.updates = Updates({"o": self.optimizer}, averages=self.state.averages)
        self.clock = UpdateClock("k")
        self.updates.attach(lambda: None)
        self.updates.use(self.clock, gate)

    def learn(self):
        self.optimizer.zero_grad()
        (self.model(torch.randn(5, 3)) * torch.randn(5, 4)).sum().backward()
        self.optimizer.step()

    def update(self):
        self.average.update_parameters(self.model)

    def boundary(self):
        self.updates.boundary()
        self.state.look()

    @property
    def whole(self):
        """At which step the state is, and whether it may lack something of it."""
        return self.clock.read().step, self.state.behind()

    def shown(self):
        return self.state.live().tensors["also/ema/module.0.weight"].array.tolist()

    @property
    def weight(self):
        return self.average.module[0].weight.tolist()


# -- what is saved ------------------------------------------------------------------------------------

KINDS = {
    "exponential": ema,
    "exponential, with buffers": lambda model: ema(model, use_buffers=True),
    "stochastic": AveragedModel,
    "of functions": lambda model: AveragedModel(model, avg_fn=lambda mean, value, n: (mean + value) / 2),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_average_comes_back_in_place_and_goes_on_exactly(make):
    first, second = Loop(make), Loop(make)
    for _ in range(3):
        first.learn()
        first.update()
        first.boundary()
    place = second.average.module[0].weight
    assert second.state.load(*saved(first.state)) == []
    assert second.average.module[0].weight is place
    for loop in (first, second):
        torch.manual_seed(2)
        loop.learn()
        loop.update()
    assert values(second.average) == values(first.average)


def test_parameters_and_counter_of_an_average_are_live_and_statistics_are_copied():
    state = Loop().state
    live = {name for name in state.live().tensors if name.startswith("also/")}
    assert live == {"also/ema/n_averaged"} | {
        f"also/ema/module.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")
    }
    copied = [tensor.name.removeprefix("shared/others/ema/module.1.") for tensor in state.shared()[1]]
    assert copied == ["running_mean", "running_var", "num_batches_tracked"]


@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "buffers too"])
def test_a_step_records_few_bytes_however_large_the_average_is(buffers):
    model = nn.Linear(1000, 1000)
    model.register_buffer("table", torch.zeros(WIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ema(model, use_buffers=buffers)
    state = TrainingState(model, {"o": optimizer}, {"ema": average})
    updates = Updates({"o": optimizer}, averages=state.averages)
    updates.attach(lambda: None)
    moved = Moved(state, None, Generators(None), whole=True)
    for _ in range(3):
        model(torch.randn(2, 1000)).sum().backward()
        told = moved.provisional(None)
        optimizer.step()
        average.update_parameters(model)
        updates.boundary()
        more = moved.boundary()
        assert len(told) + len(more or b"") <= 64 * 1024
    assert sum(tensor.nbytes for tensor in state.live().tensors.values()) > 8_000_000


def test_a_checkpoint_that_has_the_average_among_its_copies_can_be_resumed():
    """As earlier versions wrote them."""
    loop, model = Loop(norm=False), nn.Sequential(nn.Linear(3, 4))

    class Alone:
        def state_dict(self):
            return loop.average.state_dict()

        def load_state_dict(self, state):
            pass

    other = TrainingState(model, {"o": torch.optim.SGD(model.parameters())}, {"ema": Alone()})
    loop.learn()
    loop.update()
    wanted = loop.weight
    tensors, structure, shared = saved(other)
    fresh = Loop(norm=False)
    assert fresh.state.load(tensors, structure, shared) == []
    assert fresh.weight == wanted


def test_what_the_checkpoint_lacks_is_named_and_what_it_has_besides_is_told():
    loop, model = Loop(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    bare = TrainingState(model, {"o": torch.optim.SGD(model.parameters())}, {})
    with pytest.raises(LoadError, match="no state of ema"):
        loop.state.load(*saved(bare))
    assert bare.load(*saved(loop.state)) == ["ema: in the checkpoint, but not given to protect()"]


def test_modules_that_nobody_writes_are_live_and_copied_from_when_they_are_written():
    model, teacher = nn.Linear(1, 1), nn.Linear(WIDE, 1)
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainingState(model, {"o": optimizer}, {"teacher": teacher})
    state.look()
    assert state.shared()[1] == ()
    assert "also/teacher/weight" in state.live().tensors
    with torch.no_grad():
        teacher.weight.add_(1)
    with pytest.warns(SwansongWarning, match=f"teacher: its tensors, {4 * WIDE + 4} bytes, are copied"):
        state.look()
    assert [tensor.name for tensor in state.shared()[1]] == [
        "shared/others/teacher/weight",
        "shared/others/teacher/bias",
    ]
    other = copy.deepcopy(teacher)
    with torch.no_grad():
        other.weight.zero_()
    TrainingState(model, {"o": optimizer}, {"teacher": other}).load(*saved(state))
    assert bits(other.weight) == bits(teacher.weight)


def test_what_makes_every_step_dear_is_told_at_the_start(tmp_path):
    class Large:
        def state_dict(self):
            return {"weights": torch.zeros(WIDE)}

        def load_state_dict(self, state):
            pass

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(SwansongWarning, match=rf"mine: its tensors, {4 * WIDE} bytes.*AveragedModel"):
        swansong.torch.protect(
            model=model, optimizer=optimizer, directory=tmp_path, prefix="m", also={"mine": Large()}
        )


# -- when it is whole ---------------------------------------------------------------------------------


def test_between_an_update_and_that_of_the_average_the_state_is_whole_at_none():
    loop = Loop()
    seen = []
    for _ in range(3):
        loop.learn()
        seen.append(loop.whole)
        loop.update()
        seen.append(loop.whole)
        loop.boundary()
    # Of the first step nobody could know that more would come, and that is said.
    assert seen == [(1, True), (1, False), (None, True), (2, False), (None, True), (3, False)]


def test_without_any_update_of_the_average_the_state_is_whole_as_soon_as_without_one():
    loop = Loop()
    for step in range(3):
        loop.learn()
        assert loop.whole == (step + 1, True)  # it may be about to come
        loop.boundary()
        assert loop.whole == (step + 1, False)


def test_an_average_that_is_updated_now_and_then_is_awaited_to_the_boundary():
    loop = Loop()
    seen = []
    for step in range(4):
        loop.learn()
        if step in (1, 3):
            loop.update()
        seen.append(loop.whole[0])
        loop.boundary()
        assert loop.whole == (step + 1, False)
    assert seen == [1, 2, None, 4]


def test_an_average_is_updated_in_a_step_that_a_scaler_leaves_out():
    loop = Loop(norm=False)
    loop.updates.detach()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop.updates = Updates({"o": loop.optimizer}, scaler, averages=loop.state.averages)
    loop.updates.attach(lambda: None)
    loop.updates.use(loop.clock, None)
    for step, overflow in enumerate([False, True, False]):
        loop.optimizer.zero_grad()
        loss = loop.model(torch.randn(5, 3)).sum() * (float("inf") if overflow else 1.0)
        scaler.scale(loss).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        before = loop.weight
        loop.update()
        if overflow:  # nothing of the step has begun
            assert (loop.whole, loop.shown()) == ((step, False), before)
        assert loop.updates.boundary() == overflow
        assert (loop.whole, loop.shown()) == ((step + 1, False), loop.weight)


def test_an_average_is_updated_by_a_hook_of_the_optimizer():
    loop = Loop()
    loop.optimizer.register_step_post_hook(lambda *_: loop.update())
    for step in range(2):
        loop.learn()
        assert loop.whole == (step + 1, False)
        loop.boundary()


def test_an_average_that_is_updated_at_an_epochs_end_is_what_it_was_at_the_boundary():
    loop = Loop()
    for step in range(2):
        loop.learn()
        loop.boundary()
        before = loop.weight
        loop.update()
        assert loop.whole == (step + 1, False)
        assert loop.shown() == before
    loop.learn()
    assert loop.whole == (3, True)
    assert loop.shown() == loop.weight != before


def test_no_average_is_written_outside_of_an_update_while_the_gate_is_closed():
    gate = Gate(lease_s=60)
    loop = Loop(gate=gate)
    loop.learn()
    loop.boundary()
    before = loop.weight
    gate.close()
    thread = threading.Thread(target=loop.update)
    thread.start()
    until(lambda: gate.state() is GateState.PARKED)
    assert loop.weight == before
    gate.open()
    thread.join()
    assert loop.shown() == before != loop.weight


def test_an_average_that_is_awaited_is_updated_though_the_gate_is_closed():
    gate = Gate(lease_s=60)
    loop = Loop(gate=gate)
    for _ in range(2):
        loop.learn()
        gate.close()
        if loop.whole[0] is None:
            loop.update()
            assert loop.whole == (2, False)
            return
        gate.open()
        loop.update()
        loop.boundary()
    raise AssertionError("it was not awaited")


def test_a_loop_that_ends_before_the_average_is_updated_leaves_the_rest_whole():
    loop = Loop()
    for _ in range(2):
        loop.learn()
        loop.update()
        loop.boundary()
    loop.learn()
    loop.updates.abandon()
    assert loop.whole == (3, True)
    assert Loop().state.load(*saved(loop.state)) == [
        "ema: it may lack its update of this step; the loop had not come to it"
    ]


def test_an_update_of_the_average_that_raises_leaves_the_state_whole_at_none():
    def fails(mean, value, n):
        raise ValueError("no good")

    loop = Loop(lambda model: AveragedModel(model, avg_fn=fails))
    for _ in range(2):
        loop.learn()
        try:
            loop.update()
        except ValueError:
            break
        loop.boundary()
    loop.updates.abandon()
    assert loop.whole[0] is None


# -- attached and detached ----------------------------------------------------------------------------


def test_copies_of_an_average_are_updated_by_themselves_and_detach_leaves_it_as_it_was():
    loop = Loop(AveragedModel)
    loop.learn()
    loop.update()
    duplicate, before = copy.deepcopy(loop.average), loop.weight
    duplicate.update_parameters(loop.model)
    assert (loop.weight, int(loop.average.n_averaged), int(duplicate.n_averaged)) == (before, 1, 2)
    torch.save(loop.average, io.BytesIO())
    with pytest.raises(ConfigError, match="protected already"):
        Updates({}, averages=loop.state.averages).attach(lambda: None)
    loop.updates.detach()
    assert "update_parameters" not in vars(loop.average)


# -- whole runs ---------------------------------------------------------------------------------------


class Training:
    """A loop that averages in each step or at epochs' ends, and what comes of it."""

    def __init__(self, every_step):
        torch.manual_seed(5)
        self.every_step = every_step
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.average = ema(self.model)
        data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randn(12, 2))
        self.loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)

    def run(self, directory, *, fails=None, **given):
        """The step at which it begins, and what is not exact; raises at (place, step)."""

        def at(place):
            if fails == (place, run.step + 1):
                raise ValueError("no good")

        with swansong.torch.protect(
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            also={"ema": self.average},
            directory=directory,
            prefix="net",
            **given,
        ) as run:
            begun = run.resume()
            for _ in run.epochs(3):
                for images, wanted in run.batches():
                    if "ttp" in given:
                        until(lambda: run.protected)
                    self.optimizer.zero_grad()
                    loss = (self.model(images) - wanted).square().mean()
                    at("forward")
                    loss.backward()
                    self.optimizer.step()
                    at("updated")
                    if self.every_step:
                        self.average.update_parameters(self.model)
                if not self.every_step:
                    self.average.update_parameters(self.model)
        return begun, run.inexact

    def outcome(self):
        return values(self.model, self.optimizer), values(self.average)


@pytest.mark.parametrize("every_step", [True, False], ids=["every step", "epochs' ends"])
@pytest.mark.parametrize("step", [5, 6, 9], ids=["after an epoch's end", "within an epoch", "after the next"])
def test_after_an_exception_the_average_comes_back_bit_for_bit(tmp_path, every_step, step):
    wanted = Training(every_step)
    wanted.run(tmp_path / "undisturbed")
    given = {"ttp": f"127.0.0.1:{free_port()}", "options": TTPOptions(**QUICK)}
    with pytest.raises(ValueError, match="no good"):
        Training(every_step).run(tmp_path / "run", fails=("forward", step), **given)
    again = Training(every_step)
    assert again.run(tmp_path / "run") == (step - 1, [])
    assert again.outcome() == wanted.outcome()


def test_after_an_exception_before_the_average_is_updated_the_step_is_saved_and_that_is_said(tmp_path):
    given = {"ttp": f"127.0.0.1:{free_port()}", "options": TTPOptions(**QUICK)}
    with pytest.raises(ValueError, match="no good"):
        Training(True).run(tmp_path, fails=("updated", 6), **given)
    assert catalog.scan(tmp_path)[0].manifest.step == 6
    with pytest.warns(SwansongWarning, match="not exactly"):
        begun, inexact = Training(True).run(tmp_path)
    assert (begun, [reason.split(":")[0] for reason in inexact]) == (6, ["shared objects", "ema"])
