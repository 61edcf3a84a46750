"""What a boundary says, however little of it is written: as if all had been captured anew."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swansong.persist.boundary import Record
from swansong.torch.moved import Moved
from swansong.torch.position import Feed
from swansong.torch.state import TrainingState


class Loop:
    """A model in training, of which what it moves is told at the end of forward passes and at boundaries."""

    def __init__(self, *, norm: bool = False, scheduled: bool = False, dropout: float = 0.5) -> None:
        torch.manual_seed(3)
        layers = [nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if norm else []), nn.Dropout(dropout)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        data = TensorDataset(torch.randn(12, 4))
        self.feed = Feed(DataLoader(data, batch_size=2, shuffle=True))
        others = {"scheduler": self.scheduler} if scheduled else {}
        state = TrainingState(self.model, {"optimizer": self.optimizer}, others)
        self.moved = Moved(state, self.feed, self.feed.generators, whole=True)
        self.batches = self.feed.batches()
        self.told = b""

    def step(self) -> None:
        (inputs,) = next(self.batches)
        loss = self.model(inputs).square().mean()
        self.told = self.moved.provisional(None)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def boundary(self) -> tuple[bool, bytes]:
        """Whether the provisional record was enough, and what counts."""
        payload = self.moved.boundary()
        return payload is None, self.told if payload is None else payload


def told(payload: bytes) -> tuple[object, ...]:
    state = Record(1, False, payload).state()
    assert state is not None
    return state.own, state.shared, state.tensors, state.shared_tensors


DISTURBANCES = {
    "python": lambda loop: random.random(),
    "python_deviate": lambda loop: random.gauss(0, 1),
    "numpy": lambda loop: np.random.rand(),
    "numpy_deviate": lambda loop: np.random.randn(),
    "torch": lambda loop: torch.rand(1),
    "torch_deviate": lambda loop: torch.randn(1),
    "torch_double_deviate": lambda loop: torch.randn(1, dtype=torch.float64),
    "seeded": lambda loop: torch.manual_seed(17),
    "learning_rate": lambda loop: loop.optimizer.param_groups[0].update(lr=0.01),
    "a_field_more": lambda loop: loop.optimizer.param_groups[0].update(more=1),
    "a_step_left_out": lambda loop: setattr(loop.moved.progress, "skipped", 1),
    "a_batch_more": lambda loop: next(loop.batches),
}


def test_at_an_undisturbed_boundary_nothing_more_is_written() -> None:
    loop = Loop()
    said = []
    for _ in range(4):
        loop.step()
        enough, payload = loop.boundary()
        said.append(enough)
        assert told(payload) == told(loop.moved.capture())
    assert said == [True] * 4


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_whatever_changes_between_forward_pass_and_boundary_is_written(disturb) -> None:
    loop = Loop()
    for _ in range(2):
        loop.step()
        loop.boundary()
    loop.step()
    before = told(loop.told)
    disturb(loop)
    enough, payload = loop.boundary()
    assert not enough
    assert told(payload) == told(loop.moved.capture()) != before


@pytest.mark.parametrize("draw", [np.random.randn, lambda: torch.randn(1), lambda: random.gauss(0, 1)])
def test_a_deviate_out_of_store_is_noticed_too(draw) -> None:
    loop = Loop(dropout=0.0)
    draw()
    for _ in range(2):  # each second one changes nothing but the store
        loop.step()
        draw()
        enough, payload = loop.boundary()
        assert not enough
        assert told(payload) == told(loop.moved.capture())


@pytest.mark.parametrize("given", [{"norm": True}, {"scheduled": True}], ids=["batch_norm", "scheduler"])
def test_what_may_change_unseen_is_written_at_every_boundary(given) -> None:
    loop = Loop(**given)
    for _ in range(3):
        loop.step()
        loop.scheduler.step()
        enough, payload = loop.boundary()
        assert not enough
        assert told(payload) == told(loop.moved.capture())


def test_a_boundary_without_a_forward_pass_of_the_model_is_written() -> None:
    loop = Loop()
    loop.step()
    assert loop.boundary()[0]
    assert not loop.boundary()[0]
    loop.step()
    assert loop.boundary()[0]
