"""What a training run consists of: live tensors, tensors that are written outside of updates, and all else.

Names in a checkpoint are paths: `model/conv1.weight`, `optimizer/state/0/exp_avg`, `shared/...` for tensors
among what the loop moves. A parameter of an optimizer is known by its number, as in `Optimizer.state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from swansong.errors import ConfigError, LoadError
from swansong.persist.boundary import BoundaryTensor, tensor_of
from swansong.state import tree
from swansong.state.components import TensorShape
from swansong.state.leaves import Json
from swansong.state.tensors import HostTensor
from swansong.state.tree import Flat
from swansong.torch import optimizers as optim
from swansong.torch.moving import Moving
from swansong.torch.optimizers import in_torch, parameters_of
from swansong.torch.tensors import NAMES, as_tensor, fill

MODEL: Final = "model"
SHARED: Final = "shared"

_CONSTANT: Final = (bool, int, float, str, type(None))


class TrainingState:
    """The state of one run on this rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        others: Mapping[str, Any],
        scope: str = "",
    ) -> None:
        """`model` as it is wrapped by nothing; `others` have `state_dict` and `load_state_dict`. `scope`
        begins all names where other ranks have other states.

        Raises UnrepresentableError for what cannot be saved, ConfigError for an optimizer of another model.
        """
        self.model, self._optimizers, self._others = model, dict(optimizers), dict(others)
        self._scope = scope
        for name, other in self._others.items():
            _check_other(name, other)
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ConfigError(f"model: {name} has no shape yet; pass a batch through the model first")
        self._extras = {name: module for name, module in model.named_modules() if _has_extra_state(module)}
        updated = {id(p) for optimizer in self._optimizers.values() for p in parameters_of(optimizer)}
        self._moving = Moving(model, updated, self._named(""))
        self._groups: tuple[Any, Json] | None = None
        """What the optimizers' groups said last, and that as a skeleton."""
        self.check()
        self.live()
        self.moving()
        self.shared()

    # -- what is saved --------------------------------------------------------------------------------

    def shapes(self) -> dict[str, TensorShape]:
        """What the component's key says of it: parameters, by name."""
        return {
            f"{MODEL}/{name}": TensorShape(NAMES.get(p.dtype, str(p.dtype)), tuple(p.shape))
            for name, p in self.model.named_parameters()
        }

    def live(self) -> Flat:
        """Parameters, optimizer tensors, and buffers that have never been seen to change: in place."""
        tensors: dict[str, torch.Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        names = _names(self.model)
        begin = len(self._named(""))
        for slot in self._moving.all:
            name, tensor = slot.full_name[begin:], slot.tensor
            if slot.moves:
                tensors.pop(name, None)
            elif tensor is not None:
                tensors[name] = tensor
        state: dict[str, Any] = {MODEL: tensors}
        for name, optimizer in self._optimizers.items():
            state[name] = optim.live_state(optimizer, names)
        return tree.flatten({self._scope: state} if self._scope else state, as_tensor)

    def moving(self) -> tuple[BoundaryTensor, ...]:
        """Copies of the tensors that are written outside of updates."""
        return self._moving.copies()

    def shared(self) -> tuple[Json, tuple[BoundaryTensor, ...]]:
        """What is the same on all ranks: the optimizers' groups, and whatever has a state of its own."""
        if self._groups is not None and self.unchanged():
            return self._groups[1], ()
        groups = {name: optim.groups_of(optimizer) for name, optimizer in self._optimizers.items()}
        others = {name: other.state_dict() for name, other in self._others.items()}
        extras = {name: module.get_extra_state() for name, module in self._extras.items()}
        flat = tree.flatten({SHARED: {"groups": groups, "others": others, "extras": extras}}, as_tensor)
        alone = not self._others and not self._extras
        said = [value for of_one in groups.values() for group in of_one for value in group.values()]
        self._groups = (groups, flat.skeleton) if alone and all(map(_constant, said)) else None
        return flat.skeleton, tuple(tensor_of(name, tensor) for name, tensor in flat.tensors.items())

    @property
    def settled(self) -> Json:
        """What `shared` said last, if `unchanged` tells whether that still holds, and nothing is moving."""
        return None if self._groups is None or self._moving.any else self._groups[1]

    def unchanged(self) -> bool:
        """True if what is shared is the same for certain: the same constants, not only equal ones."""
        if self._groups is None:
            return False
        groups = self._groups[0]
        for name, optimizer in self._optimizers.items():
            if len(optimizer.param_groups) != len(groups[name]):
                return False
            for group, known in zip(optimizer.param_groups, groups[name], strict=True):
                if len(group) != len(known) + 1:  # the parameters are not in there
                    return False
                for key, value in known.items():
                    if group.get(key, known) is not value:
                        return False
        return True

    def check(self) -> None:
        """Raise ConfigError if an optimizer updates what is no parameter of the model (any more)."""
        known = {id(p) for p in self.model.parameters()}
        for name, optimizer in self._optimizers.items():
            strangers = sum(id(p) not in known for p in parameters_of(optimizer))
            if strangers:
                raise ConfigError(
                    f"{name}: {strangers} of its parameters are not the model's. Were they replaced after "
                    "the optimizer was made (as by some ways of moving or wrapping a model)? Make it anew"
                )

    def look(self) -> None:
        """Notice which tensors are written outside of updates. At boundaries."""
        self._moving.look()

    # -- loading --------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, HostTensor], structure: Json, shared: Json) -> list[str]:
        """Take up what was saved, in place; return what could not be, each with the reason.

        `structure` is of `live`, `shared` of `shared` or None, if nothing was recorded; `tensors` are those
        of both, and the moving ones. Raises LoadError for what does not fit; then nothing is changed.
        """
        live = self._unpacked(structure, tensors)
        said = self._said(shared, tensors)
        self._check_fit(tensors)
        names = _names(self.model)
        for name, optimizer in self._optimizers.items():
            optim.check_fit(name, optimizer, live.get(name), names)
        places: dict[str, torch.Tensor] = {
            self._named(name): parameter for name, parameter in self.model.named_parameters()
        }
        places |= {slot.full_name: slot.tensor for slot in self._moving.all if slot.tensor is not None}
        for name, place in places.items():
            fill(place, tensors[name])
        for name, optimizer in self._optimizers.items():
            optim.load(optimizer, live[name], said["groups"][name] if said is not None else None)
        self._moving.forget()
        if said is None:
            return ["optimizers' groups, and all that has a state_dict: the checkpoint has none of it"]
        for name, other in self._others.items():
            other.load_state_dict(in_torch(said["others"][name]))
        for name, module in self._extras.items():
            module.set_extra_state(in_torch(said["extras"][name]))
        unknown = said["others"].keys() - self._others.keys()
        return [f"{name}: in the checkpoint, but not given to protect()" for name in sorted(unknown)]

    def _unpacked(self, structure: Json, tensors: Mapping[str, HostTensor]) -> dict[str, Any]:
        live = tree.unflatten(structure, tensors)
        if self._scope and isinstance(live, dict):
            live = live.get(self._scope)
        if not isinstance(live, dict) or MODEL not in live:
            raise LoadError("the checkpoint's structure is not that of a PyTorch run of this rank")
        return live

    def _said(self, shared: Json, tensors: Mapping[str, HostTensor]) -> dict[str, dict[str, Any]] | None:
        """What `shared` had, checked for what is needed of it here."""
        said = tree.unflatten(shared, tensors)
        if said is None:
            return None
        said = said.get(SHARED) if isinstance(said, dict) else None
        for part, wanted in (
            ("groups", self._optimizers),
            ("others", self._others),
            ("extras", self._extras),
        ):
            found = said.get(part) if isinstance(said, dict) else None
            if not isinstance(found, dict):
                raise LoadError(f"the checkpoint's shared objects lack {part}")
            if missing := sorted(wanted.keys() - found.keys()):
                raise LoadError(
                    f"the checkpoint has no state of {', '.join(missing)}; it was saved by a run without"
                )
        return said

    def _check_fit(self, tensors: Mapping[str, HostTensor]) -> None:
        wanted: dict[str, torch.Tensor] = {self._named(n): p for n, p in self.model.named_parameters()}
        wanted |= {slot.full_name: slot.tensor for slot in self._moving.all if slot.tensor is not None}
        for name, tensor in wanted.items():
            found = tensors.get(name)
            if found is None:
                raise LoadError(f"the checkpoint lacks {name}; is it of another model?")
            said = (found.dtype.name, tuple(found.shape))
            if said != (NAMES.get(tensor.dtype), tuple(tensor.shape)):
                raise LoadError(
                    f"{name}: wanted {NAMES.get(tensor.dtype)} {list(tensor.shape)}, "
                    f"found {said[0]} {list(said[1])}"
                )

    def _named(self, name: str) -> str:
        """Full name of a parameter or buffer."""
        return f"{self._scope}/{MODEL}/{name}" if self._scope else f"{MODEL}/{name}"


def _names(model: nn.Module) -> dict[int, str]:
    """A parameter's `id` -> its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _check_other(name: str, other: object) -> None:
    if not callable(getattr(other, "state_dict", None)) or not callable(
        getattr(other, "load_state_dict", None)
    ):
        raise ConfigError(
            f"{name}: wanted an object with state_dict() and load_state_dict(), got {type(other).__name__}"
        )


def _constant(value: Any) -> bool:
    """True if nobody can write to it."""
    return type(value) in _CONSTANT or (type(value) is tuple and all(map(_constant, value)))
