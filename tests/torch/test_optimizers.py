"""Optimizers of each kind come back exactly, and only with the parameters that they had."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

from swansong.errors import LoadError
from swansong.torch.state import TrainingState
from torch_states import linear, round_trip, saved, step, values, with_optimizer


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False, capturable=False),
        functools.partial(torch.optim.Adam, lr=0.1, fused=True),
        functools.partial(torch.optim.Adagrad, lr=0.1),
        functools.partial(torch.optim.RMSprop, lr=0.1, centered=True),
        functools.partial(torch.optim.NAdam, lr=0.1),
        functools.partial(torch.optim.Rprop, lr=0.1),
        functools.partial(torch.optim.Adafactor, lr=0.1),
    ],
    ids=[
        "SGD",
        "momentum",
        "amsgrad",
        "rate in a tensor",
        "fused",
        "Adagrad",
        "RMSprop",
        "NAdam",
        "Rprop",
        "Adafactor",
    ],
)
def test_an_optimizer_comes_back_and_goes_on_exactly(make):
    (model, optimizer, _), (second, another, _) = round_trip(with_optimizer(make))
    for _ in range(2):
        step(model, optimizer)
        step(second, another)
    assert values(second, another) == values(model, optimizer)


def test_lbfgs_comes_back_with_its_history():
    def train(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(3, 2)) - 1).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    make = with_optimizer(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3)
    (model, optimizer, _), (second, another, _) = round_trip(make, train)
    train(model, optimizer)
    train(second, another)
    assert values(second, another) == values(model, optimizer)


def test_moments_of_another_type_than_the_parameter_are_kept_as_they_are():
    """`Optimizer.load_state_dict` would cast them."""

    def make():
        model = linear(torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(model, optimizer):
        step(model, optimizer, torch.ones(3, 2, dtype=torch.bfloat16))
        for entry in optimizer.state.values():
            entry["momentum_buffer"] = torch.randn(entry["momentum_buffer"].shape)

    _, (_, another, _) = round_trip(make, train)
    assert {entry["momentum_buffer"].dtype for entry in another.state.values()} == {torch.float32}


def test_what_an_optimizer_keeps_for_no_parameter_comes_back():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.state["count"] = self.state.get("count", 0) + 1
            self.state["average"] = torch.tensor([float(self.state["count"])])
            return super().step(closure)

    _, (_, another, _) = round_trip(with_optimizer(Counting, lr=0.1))
    assert another.state["count"] == 2
    assert another.state["average"].tolist() == [2.0]


def test_groups_changed_during_training_come_back():
    def make():
        model = nn.Sequential(linear(), linear())
        groups = [
            {"params": [*model[0].parameters()], "lr": 0.1},
            {"params": [*model[1].parameters()], "lr": 0.2, "mine": [1]},
        ]
        return model, torch.optim.SGD(groups, momentum=0.5)

    def train(model, optimizer):
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] /= 3
        optimizer.param_groups[1]["mine"].append(len(optimizer.param_groups[1]["mine"]))

    _, (_, another, _) = round_trip(make, train)
    assert another.param_groups[1]["mine"] == [1, 1, 2]


def test_a_change_of_groups_is_seen_at_the_next_boundary():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["mine"] = mine = [1]
    state = TrainingState(model, {"o": optimizer}, {})
    first = state.shared()
    mine.append(2)  # the very same list
    second = state.shared()
    optimizer.param_groups[0]["lr"] = 1
    third = state.shared()
    assert len({json.dumps(shared) for shared, _ in (first, second, third)}) == 3
    del optimizer.param_groups[0]["mine"]
    optimizer.param_groups[0]["lr"] = 1.0
    assert json.dumps(state.shared()[0]) != json.dumps(third[0])


def test_groups_of_plain_values_are_taken_apart_once():
    model = linear()
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model, {"o": optimizer}, {})
    assert state.shared()[0] is state.shared()[0]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda m: [m[0].weight, m[0].bias, m[1].weight], "4 here|3 here"),
        (
            lambda m: [{"params": [*m[0].parameters()]}, {"params": [*m[1].parameters()]}],
            "2 parameter groups",
        ),
        (lambda m: [m[1].weight, m[0].bias, m[0].weight, m[1].bias], r"1\.weight here, 0\.weight there"),
    ],
    ids=["fewer", "more groups", "another order"],
)
def test_an_optimizer_of_other_parameters_is_refused_and_nothing_is_changed(groups, words):
    model = nn.Sequential(linear(), linear())
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters())}, {})
    other = nn.Sequential(linear(), linear())
    another = torch.optim.SGD(groups(other))
    before = values(other, another)
    with pytest.raises(LoadError, match=words):
        TrainingState(other, {"optimizer": another}, {}).load(*saved(state))
    assert values(other, another) == before
