"""States of models and optimizers, saved and loaded without files."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

from swansong.persist.boundary import unpacked
from swansong.state.tensors import HostTensor
from swansong.torch.state import TrainingState
from torch_training import bits


def saved(state):
    """All that a checkpoint has of it: tensors, structure, shared objects; by way of JSON."""
    flat = state.live()
    shared, tensors = state.shared()
    found = {name: HostTensor(t.dtype, np.array(t.array)) for name, t in flat.tensors.items()}
    found |= {alias: found[name] for alias, name in flat.aliases.items()}
    for tensor in (*state.moving(), *tensors):
        assert tensor.name not in found, "a checkpoint has each tensor once"
        found[tensor.name] = unpacked(tensor)
    return found, json.loads(json.dumps(flat.skeleton)), json.loads(json.dumps(shared))


def step(model, optimizer, batch=None):
    batch = torch.ones(3, 2) if batch is None else batch
    optimizer.zero_grad()
    model(batch).float().square().sum().backward()
    optimizer.step()


def values(model, *optimizers):
    found = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        said = optimizer.state_dict()
        found[number] = said["param_groups"] and [
            {key: bits(value) for key, value in group.items()} for group in said["param_groups"]
        ]
        found[f"{number} state"] = {
            key: {k: [bits(one) for one in v] if isinstance(v, list) else bits(v) for k, v in entry.items()}
            if isinstance(entry, dict)
            else bits(entry)
            for key, entry in said["state"].items()
        }
    return found


def round_trip(make, train=step, others=lambda model, optimizer: {}):
    """Trained, saved, loaded into another that was made alike; both."""
    torch.manual_seed(1)
    model, optimizer = make()
    given = others(model, optimizer)
    state = TrainingState(model, {"optimizer": optimizer}, given)
    for _ in range(2):
        train(model, optimizer)
        for other in given.values():
            if hasattr(other, "step"):
                other.step(*([1.0] if isinstance(other, lr_scheduler.ReduceLROnPlateau) else []))
        state.look()
    torch.manual_seed(2)
    second, another = make()
    theirs = others(second, another)
    assert TrainingState(second, {"optimizer": another}, theirs).load(*saved(state)) == []
    assert values(second, another) == values(model, optimizer)
    return (model, optimizer, given), (second, another, theirs)


def linear(dtype=torch.float32):
    return nn.Linear(2, 2).to(dtype)


def with_optimizer(make, **given):
    def both():
        model = linear()
        return model, make(model.parameters(), **given)

    return both
