"""The state of an optimizer: shown in place, and set exactly.

`Optimizer.load_state_dict` would cast what it sets to the types of the parameters, and take any parameters in
the same order for the same ones. So state is set here, and parameters are told apart by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch.optim import Optimizer

from swansong.errors import ConfigError, LoadError, NotSupportedError
from swansong.state.tensors import HostTensor
from swansong.torch.tensors import torch_tensor


def check_optimizer(name: str, optimizer: object, distributed: bool) -> None:
    """Refuse what cannot be followed, or keeps state elsewhere. Raises ConfigError, NotSupportedError."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{name}: wanted a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if distributed and isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{name}: LBFGS evaluates its closure, and with it collectives, inside an update; a rank that "
            "dies there leaves all others torn. Use another optimizer, or protect a job of one process"
        )
    if type(optimizer).state_dict is not Optimizer.state_dict:
        raise NotSupportedError(
            f"{name}: {type(optimizer).__name__} has a state_dict() of its own, so its state may "
            "be elsewhere, or on each rank a part of it; not supported yet"
        )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """In the order in which PyTorch numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def live_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Its tensors in place, by parameter's number, and whatever else stands beside them.

    `names` are those of the parameters in the model, by `id`.
    """
    state = optimizer.state
    entries = {number: dict(state[p]) for number, p in enumerate(parameters_of(optimizer)) if p in state}
    general = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    return {"state": entries, "general": general, "groups": groups}


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its parameter groups, but for the parameters."""
    groups = optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def check_fit(name: str, optimizer: Optimizer, saved: Any, names: Mapping[int, str]) -> None:
    """Raise LoadError unless `saved`, what `live_state` gave, is of an optimizer of these parameters."""
    if not isinstance(saved, dict) or not {"state", "general", "groups"} <= saved.keys():
        raise LoadError(f"the checkpoint has no optimizer of the name {name!r}")
    here = live_state(optimizer, names)["groups"]
    if len(here) != len(saved["groups"]):
        raise LoadError(f"{name}: it has {len(here)} parameter groups, the checkpoint {len(saved['groups'])}")
    for number, (ours, theirs) in enumerate(zip(here, saved["groups"], strict=True)):
        if ours != theirs:
            odd = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), None)
            what = f"{odd[0]} here, {odd[1]} there" if odd else f"{len(ours)} here, {len(theirs)} there"
            raise LoadError(f"{name}: parameter group {number} is not that of the checkpoint: {what}")


def load(optimizer: Optimizer, saved: Mapping[str, Any], groups: list[dict[str, Any]] | None) -> None:
    """Set it, once `check_fit` has passed. `groups` are what `groups_of` gave; None: they stay."""
    of_group = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    if groups is not None:
        for group, said in zip(optimizer.param_groups, groups, strict=True):
            group.update(in_torch(said))
    # A scheduler warns at its first step if this was never called; it was, by the run that saved.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.state.clear()
    optimizer.state.update(in_torch(saved["general"]))
    for number, (parameter, group) in enumerate(of_group):
        if number in saved["state"]:
            optimizer.state[parameter] = {
                key: _on_device(in_torch(value), key, parameter, group)
                for key, value in saved["state"][number].items()
            }


def _on_device(value: Any, key: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """Where PyTorch keeps it: with its parameter, but for step counters that no kernel reads."""
    if not isinstance(value, torch.Tensor) or (
        key == "step" and not group.get("capturable") and not group.get("fused")
    ):
        return value
    return value.to(parameter.device)


def in_torch(value: Any) -> Any:
    """Nested plain values with tensors of PyTorch in place of host tensors."""
    if isinstance(value, HostTensor):
        return torch_tensor(value)
    if isinstance(value, dict):
        changed = copy(value)  # of its own kind: ordered, counting, with a default
        for key, item in value.items():
            changed[key] = in_torch(item)
        return changed
    if isinstance(value, list | tuple):
        return type(value)(in_torch(item) for item in value)
    return value
