"""Which tensors are copied at boundaries, and that copies are of what stands there now."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from swansong.torch.moving import SMALL
from swansong.torch.state import TrainingState
from torch_states import saved
from torch_training import bits


class Holder(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def state_of(model):
    return TrainingState(model, {"o": torch.optim.SGD([model.weight])}, {})


def moving(state):
    return [tensor.name.removeprefix("model/") for tensor in state.moving()]


LARGE = SMALL // 4 + 1
"""Elements of float32 that are too many to be copied for nothing."""


def test_small_buffers_are_copied_at_every_boundary():
    state = state_of(Holder(mine=torch.zeros(3)))
    assert moving(state) == ["mine"]
    assert sorted(state.live().tensors) == ["model/weight"]


def test_large_buffers_are_live_until_one_of_their_module_is_written():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(1))
    model.moved = Holder(a=torch.zeros(LARGE), b=torch.zeros(LARGE))
    model.still = Holder(c=torch.zeros(LARGE))
    del model.moved.weight, model.still.weight
    state = state_of(model)
    assert moving(state) == []
    model.moved.a.add_(1)
    assert moving(state) == []  # not in the midst of a step, so that no checkpoint has it twice, or never
    state.look()
    assert moving(state) == ["moved.a", "moved.b"]
    assert "model/still.c" in state.live().tensors
    assert not {"model/moved.a", "model/moved.b"} & state.live().tensors.keys()
    assert saved(state)


def test_large_statistics_of_normalisation_are_copied_from_the_start():
    model = nn.Sequential(nn.BatchNorm1d(LARGE))
    state = TrainingState(model, {"o": torch.optim.SGD(model.parameters())}, {})
    assert moving(state) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def write(parameter):
    parameter.mul_(2)


def replace_data(parameter):
    parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [write, replace_data])
def test_parameters_that_the_loop_writes_itself_are_copied_as_buffers_are(change):
    """A teacher's, say, or a momentum encoder's: no optimizer has them."""
    model = Holder()
    model.teacher = nn.Linear(LARGE, 1)
    model.frozen = nn.Linear(LARGE, 1)
    state = state_of(model)
    assert moving(state) == []
    with torch.no_grad():
        change(model.teacher.weight)
    state.look()
    assert moving(state) == ["teacher.weight", "teacher.bias"]
    tensors, structure, shared = saved(state)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.teacher.weight.zero_()
    state_of(other).load(tensors, structure, shared)
    assert bits(other.teacher.weight) == bits(model.teacher.weight)


def test_loading_is_no_change_of_theirs():
    model = Holder(large=torch.zeros(LARGE))
    state = state_of(model)
    state.load(*saved(state))
    state.look()
    assert moving(state) == []


def test_copies_follow_a_buffer_that_is_replaced_resized_or_of_another_type():
    model = Holder(mine=torch.zeros(2))
    state = state_of(model)

    def copied():
        (tensor,) = state.moving()
        return tensor.dtype, tensor.shape, np.frombuffer(tensor.data, tensor.dtype).tolist()

    assert copied() == ("float32", (2,), [0, 0])
    model.mine.add_(1)
    assert copied() == ("float32", (2,), [1, 1])
    model.mine = torch.full((3,), 2.0)
    assert copied() == ("float32", (3,), [2, 2, 2])
    model.mine.data = torch.full((3,), 4.0)
    assert copied() == ("float32", (3,), [4, 4, 4])
    model.double()
    assert copied() == ("float64", (3,), [4, 4, 4])
    model.mine = None
    assert state.moving() == ()


def test_buffers_that_are_not_persistent_are_left_out():
    model = Holder()
    model.register_buffer("passing", torch.ones(1), persistent=False)
    assert list(saved(state_of(model))[0]) == ["model/weight"]
