"""Clocks inside MindSpore's optimizers: what they say, and that the update is the same with them."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim as experimental

import tiny_training as tiny
from swansong.errors import NotSupportedError, SwansongWarning
from swansong.mindspore.clock import SILENT, BorderClock, Counters, OptimizerClock, install, optimizers
from swansong.mindspore.parameters import named_state
from swansong.mindspore.trained import LARGE, TrainedState

pytestmark = pytest.mark.mindspore

OPTIMIZERS = {
    "Adam": lambda p: nn.Adam(p, nn.exponential_decay_lr(0.1, 0.9, 1000, 4, 1)),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "RMSProp": lambda p: nn.RMSProp(p, 0.1),
    "SGD": lambda p: nn.SGD(p, 0.1),
}


def model(kind: str) -> ms.Model:
    ms.set_seed(3)
    ms.dataset.config.set_seed(3)
    net = tiny.Net(16)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return ms.Model(net, loss, OPTIMIZERS[kind](net.trainable_params()))


class Watches(ms.train.Callback):
    """Installs a clock, passes no gate, and notes where it stands."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, int | None]] = []

    def on_train_begin(self, run_context) -> None:
        found = optimizers(run_context.original_args().train_network)
        for number, optimizer in enumerate(found):
            install(optimizer, number)
        self.clock = OptimizerClock("key", [Counters(one) for one in found], step=40, cells=None)

    def on_train_step_begin(self, run_context) -> None:
        self.clock.queue()
        self.before = self.clock.read().step

    def on_train_step_end(self, run_context) -> None:
        self.seen.append((self.before, self.clock.read().step))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_clock_says_which_step_is_whole_and_changes_no_bit(mode, kind):
    undisturbed = model(kind)
    undisturbed.train(1, tiny.generated())
    watched, watches = model(kind), Watches()
    watched.train(1, tiny.generated(), callbacks=[watches])
    assert watches.seen == [(None, step) for step in range(41, 47)]
    got = {name: data for name, data in tiny.state(watched).items() if not name.startswith("swansong")}
    assert got == tiny.state(undisturbed)


class Step(nn.Cell):
    """A train network of one's own, for optimizers that Model does not take."""

    def __init__(self, optimizer) -> None:
        super().__init__(auto_prefix=False)
        self.network = tiny.Net(16)
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        self.optimizer = optimizer(self.network.trainable_params())
        weights = self.optimizer.parameters
        self.gradients = ms.value_and_grad(lambda x, y: self.loss(self.network(x), y), None, weights)

    def construct(self, x, y):
        loss, gradients = self.gradients(x, y)
        self.optimizer(gradients)
        return loss


@pytest.mark.parametrize("kind", [experimental.Adam, experimental.SGD])
def test_the_experimental_optimizers_have_one_too(kind):
    def trained(*callbacks) -> dict[str, bytes]:
        ms.set_seed(3)
        ms.dataset.config.set_seed(3)
        model = ms.Model(Step(lambda parameters: kind(parameters, 0.1)))
        model.train(1, tiny.generated(), callbacks=list(callbacks))
        return {name: of for name, of in tiny.state(model).items() if not name.startswith("swansong")}

    undisturbed, watches = trained(), Watches()
    assert trained(watches) == undisturbed
    assert watches.seen == [(None, step) for step in range(41, 47)]


def test_the_clock_is_no_part_of_the_state():
    network = model("Momentum").train_network
    before = list(named_state(network))
    assert install(optimizers(network)[0], 0)
    assert list(named_state(network)) == before
    assert not install(optimizers(network)[0], 0)


class Optimizer(nn.Optimizer):
    """Adds the gradients, or fails half-way."""

    def __init__(self, parameters) -> None:
        super().__init__(0.1, parameters)
        self.fails = False

    def construct(self, gradients):
        ops.assign_add(self.parameters[0], gradients[0])
        if self.fails:
            raise RuntimeError("half-way")
        ops.assign_add(self.parameters[1], gradients[1])
        return gradients


@pytest.fixture
def trained():
    """An optimizer with a clock at step 5, and what updates it."""
    parameters = [Parameter(Tensor(np.zeros(3, np.float32)), name=name) for name in ("a", "b")]
    optimizer = Optimizer(parameters)
    install(optimizer, 0)
    clock = OptimizerClock("key", [Counters(optimizer)], step=4, cells=None)
    ones = tuple(Tensor(np.ones(3, np.float32)) for _ in parameters)

    def update() -> None:
        optimizer(ones)

    clock.queue()
    update()
    clock.boundary(5)
    return optimizer, clock, update


def test_an_update_that_fails_half_way_is_whole_at_no_step_ever_after(trained):
    optimizer, clock, update = trained
    optimizer.fails = True
    clock.queue()
    with pytest.raises(RuntimeError, match="half-way"):
        update()
    clock.abandon()
    assert clock.read().step is None
    assert not clock.finished()


def test_what_was_dispatched_and_never_began_is_taken_back(trained):
    _, clock, _ = trained
    clock.queue()
    assert clock.read().step is None
    assert not clock.finished()
    clock.abandon()
    assert clock.read().step == 5


def test_of_counters_that_never_moved_nothing_is_believed():
    optimizer = Optimizer([Parameter(Tensor(np.zeros(3, np.float32)), name=name) for name in ("a", "b")])
    install(optimizer, 0)
    clock = OptimizerClock("key", [Counters(optimizer)], step=0, cells=None)
    for step in range(1, SILENT):
        clock.queue()
        clock.boundary(step)
    clock.queue()
    with pytest.warns(SwansongWarning, match="no update of an optimizer was seen"):
        clock.boundary(SILENT)
    assert clock.read().step == SILENT
    clock.queue()
    clock.abandon()
    assert not clock.finished()
    assert clock.read().step is None


def test_a_step_without_an_update_counts_at_its_boundary(trained):
    _, clock, update = trained
    clock.queue()
    clock.boundary(6)
    assert clock.read().step == 6
    clock.queue()
    update()
    assert clock.finished()
    clock.boundary(7)
    assert clock.read().step == 7


def test_steps_that_are_dispatched_together_are_whole_together(trained):
    _, clock, update = trained
    clock.dispatching(2)
    clock.queue()
    update()
    clock.abandon()
    assert clock.read().step is None
    update()
    assert clock.finished()
    clock.boundary(7)
    assert clock.read().step == 7


def test_two_updates_in_one_step_are_refused(trained):
    _, clock, update = trained
    clock.queue()
    update()
    update()
    with pytest.raises(NotSupportedError, match="step 6"):
        clock.boundary(6)


def test_a_border_clock_is_whole_only_between_steps():
    clock = BorderClock("key", step=5, cells=None)
    clock.dispatching(3)
    clock.queue()
    clock.dispatched()
    assert clock.read().step is None
    clock.abandon()
    assert clock.read().step is None
    clock.boundary(8)
    assert clock.read().step == 8


class Frozen(nn.Cell):
    """A trained weight, a large frozen one, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(4, np.float32)), name="weight")
        large = Tensor(np.ones(LARGE // 4, np.float32))
        self.large = Parameter(large, name="large", requires_grad=False)
        self.count = Parameter(Tensor(np.zeros(1, np.float32)), name="count", requires_grad=False)
        self.optimizer = nn.SGD([self.weight], 0.1)


def test_a_large_tensor_that_is_not_trained_is_copied_once_it_was_seen_to_change():
    network = Frozen()
    state = TrainedState(network)
    assert {network.weight.name, "large"} <= state.show().tensors.keys()
    assert [tensor.name for tensor in state.moved()] == ["count"]
    ops.assign(network.large, Tensor(np.zeros(LARGE // 4, np.float32)))
    assert sorted(tensor.name for tensor in state.moved()) == ["count", "large"]
    assert "large" not in state.show().tensors
