"""What PyTorch's optimizers, schedulers and generators keep comes back so that they load it unchanged."""

import json
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from swansong.state.tensors import HostTensor
from swansong.state.tree import flatten, unflatten


def as_tensor(value: object) -> HostTensor | None:
    return HostTensor.of(value.detach().numpy()) if isinstance(value, torch.Tensor) else None


def through_bytes(state: object) -> object:
    flat = flatten(state, as_tensor)
    tensors = {name: tensor.array.copy() for name, tensor in flat.tensors.items()}
    return unflatten(
        msgspec.json.decode(msgspec.json.encode(flat.skeleton)),
        {name: torch.from_numpy(array) for name, array in tensors.items()},
        as_array=lambda tensor: tensor.numpy(),
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def trained(make: Callable[..., torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    optimizer = make(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer


OPTIMIZERS = [
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.ASGD, torch.optim.LBFGS, torch.optim.Muon, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
]  # fmt: skip
SCHEDULERS = {
    "steps": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]
    ),
    "average": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_optimizer_loads_what_came_back(make: Callable[..., torch.optim.Optimizer]) -> None:
    model, optimizer = trained(make)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    got = through_bytes(state)
    assert same(got, state)
    fresh = make(model.parameters(), lr=0.5)
    fresh.load_state_dict(got["optimizer"])
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_scheduler_loads_what_came_back(make: Callable[..., object]) -> None:
    _, optimizer = trained(torch.optim.SGD)
    state = make(optimizer).state_dict()
    got = through_bytes({"scheduler": state})
    assert same(got, {"scheduler": state})
    fresh = make(optimizer)
    fresh.load_state_dict(got["scheduler"])
    assert json.dumps(fresh.state_dict(), default=repr) == json.dumps(state, default=repr)


def test_generators_go_on_where_they_were() -> None:
    generator = np.random.default_rng(3)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    want = (random.random(), np.random.rand(), generator.random(), torch.rand(()).item())
    got = through_bytes(state)
    random.setstate(got["python"])
    np.random.set_state(got["numpy"])
    generator.bit_generator.state = got["generator"]
    torch.set_rng_state(got["torch"])
    assert (random.random(), np.random.rand(), generator.random(), torch.rand(()).item()) == want


def test_tied_weights_are_stored_once_and_come_back_tied() -> None:
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    flat = flatten({"model": model.state_dict()}, as_tensor)
    assert flat.aliases == {"model/head.weight": "model/embedding.weight"}
    got = through_bytes({"model": model.state_dict()})["model"]
    assert got["head.weight"] is got["embedding.weight"]
