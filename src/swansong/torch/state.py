"""What a training run consists of: live tensors, tensors that are written outside of updates, and all else.

Names in a checkpoint are paths: `model/conv1.weight`, `optimizer/state/0/exp_avg`, `also/ema/module.weight`,
`shared/...` for tensors among what the loop moves. A parameter of an optimizer is known by its number, as in
`Optimizer.state_dict`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from swansong.errors import ConfigError, LoadError, SwansongWarning
from swansong.persist.boundary import BoundaryTensor, tensor_of
from swansong.state import tree
from swansong.state.components import TensorShape
from swansong.state.leaves import Json
from swansong.state.tensors import HostTensor
from swansong.state.tree import Flat
from swansong.torch import optimizers as optim
from swansong.torch.beside import Averaged, Beside, beside, can_be_followed, with_extra_state
from swansong.torch.moving import SMALL, Moving, Slot
from swansong.torch.optimizers import in_torch, parameters_of
from swansong.torch.tensors import NAMES, as_tensor, fill, form_of

MODEL: Final = "model"
SHARED: Final = "shared"
ALSO: Final = "also"
BEHIND: Final = "behind"
"""Beside the live tensors: averages that may lack their part of the step."""

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
        self.model, self._optimizers = model, dict(optimizers)
        self._scope = scope
        for name, other in others.items():
            _check_other(name, other)
        self._others = {name: other for name, other in others.items() if not can_be_followed(other)}
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ConfigError(f"model: {name} has no shape yet; pass a batch through the model first")
        if taken := sorted(self._optimizers.keys() & {MODEL, SHARED, ALSO, BEHIND}):
            raise ConfigError(f"optimizer: the name {taken[0]!r} stands for something else; choose another")
        self._extras = {path.removesuffix("."): module for path, module in with_extra_state(model).items()}
        updated = {id(p) for optimizer in self._optimizers.values() for p in parameters_of(optimizer)}
        self._moving = Moving(model, updated, self._named(""))
        self._beside = self._taken_up({name: o for name, o in others.items() if can_be_followed(o)})
        self._groups: tuple[Any, Json] | None = None
        """What the optimizers' groups said last, and that as a skeleton."""
        self.check()
        self.live(form_of)
        self.moving()
        self._warn_of_copies(self._others)

    # -- what is saved --------------------------------------------------------------------------------

    def shapes(self) -> dict[str, TensorShape]:
        """What the component's key says of it: parameters, by name."""
        return {
            f"{MODEL}/{name}": TensorShape(NAMES.get(p.dtype, str(p.dtype)), tuple(p.shape))
            for name, p in self.model.named_parameters()
        }

    def live(self, as_tensor: Callable[[object], HostTensor | None] = as_tensor) -> Flat:
        """Parameters, optimizer tensors, and buffers that have never been seen to change.

        `as_tensor` shows a tensor: by default in place on the CPU, and a copy of it from elsewhere.
        """
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
        if also := {one.name: shown for one in self._beside if (shown := one.live())}:
            state[ALSO] = also
        if behind := [one.name for one in self.averages if one.behind]:
            state[BEHIND] = behind
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
        others |= {one.name: copied for one in self._beside if (copied := one.copied())}
        extras = {name: module.get_extra_state() for name, module in self._extras.items()}
        flat = tree.flatten({SHARED: {"groups": groups, "others": others, "extras": extras}}, as_tensor)
        alone = not others and not self._extras
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
        if self._beside:
            self._look_beside()

    def _look_beside(self) -> None:
        changed = [one for one in self._beside if one.look()]
        if changed:
            self._groups = None
            self._warn_of_copies([one.name for one in changed if not isinstance(one, Averaged)])

    @property
    def averages(self) -> list[Averaged]:
        """Those of the model that `also` names, and that are followed."""
        return [one for one in self._beside if isinstance(one, Averaged)]

    def behind(self) -> bool:
        """True if an average may lack its part of the step at which all else is whole. From any thread."""
        return any(one.behind for one in self._beside if isinstance(one, Averaged))

    def _warn_of_copies(self, names: Iterable[str]) -> None:
        """Say which of these make every step dear."""
        nbytes = dict.fromkeys(names, 0)
        for tensor in self.shared()[1]:
            path = tree.split_path(tensor.name)
            if path[1] == "others" and path[2] in nbytes:
                nbytes[str(path[2])] += len(tensor.data)
        for name, count in nbytes.items():
            if count > SMALL:
                warnings.warn(
                    f"{name}: its tensors, {count} bytes, are copied at every step, for it is not known when "
                    "they are written. Averages of the model cost nothing in a "
                    "torch.optim.swa_utils.AveragedModel, nor does a module that nobody writes to; leave out "
                    "of also= what can be made again",
                    SwansongWarning,
                    stacklevel=4,
                )

    # -- loading --------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, HostTensor], structure: Json, shared: Json) -> list[str]:
        """Take up what was saved, in place; return what could not be, each with the reason.

        `structure` is of `live`, `shared` of `shared` or None, if nothing was recorded; `tensors` are those
        of both, and the moving ones. Raises LoadError for what does not fit; then nothing is changed.
        """
        live = self._unpacked(structure, tensors)
        said = self._said(shared, tensors)
        self._check_fit(tensors)
        also = self._found_beside(live, said)
        names = _names(self.model)
        for name, optimizer in self._optimizers.items():
            optim.check_fit(name, optimizer, live.get(name), names)
        places: dict[str, torch.Tensor] = {
            self._named(name): parameter for name, parameter in self.model.named_parameters()
        }
        places |= {slot.full_name: slot.tensor for slot in self._moving.all if slot.tensor is not None}
        for name, place in places.items():
            fill(place, tensors[name])
        for slot, found in also:
            if slot.tensor is not None:
                fill(slot.tensor, found)
        others = said["others"] if said is not None else None
        for one in self._beside:
            one.loaded(others and others.get(one.name, {}))
        behind = [
            f"{name}: it may lack its update of this step; the loop had not come to it"
            for name in live.get(BEHIND, ())
        ]
        for name, optimizer in self._optimizers.items():
            optim.load(optimizer, live[name], said["groups"][name] if said is not None else None)
        self._moving.forget()
        if said is None:
            return [
                *behind,
                "optimizers' groups, and all that has a state_dict: the checkpoint has none of it",
            ]
        for name, other in self._others.items():
            other.load_state_dict(in_torch(said["others"][name]))
        for name, module in self._extras.items():
            module.set_extra_state(in_torch(said["extras"][name]))
        known = self._others.keys() | {one.name for one in self._beside}
        unknown = (said["others"].keys() | live.get(ALSO, {}).keys()) - known
        return behind + [f"{name}: in the checkpoint, but not given to protect()" for name in sorted(unknown)]

    def _found_beside(
        self, live: Mapping[str, Any], said: Mapping[str, Mapping[str, Any]] | None
    ) -> list[tuple[Slot, HostTensor]]:
        """Where the tensors of other modules stand, and what is to. Raises LoadError."""
        filled: list[tuple[Slot, HostTensor]] = []
        for one in self._beside:
            shown = live.get(ALSO, {}).get(one.name)
            copied = said["others"].get(one.name) if said is not None else {}
            if one.slots and shown is None and copied is None:
                raise LoadError(f"the checkpoint has no state of {one.name}; it was saved by a run without")
            for slot, found in one.found(shown or {}, None if said is None else copied or {}):
                tensor = slot.tensor
                if tensor is not None:
                    _check_tensor(slot.full_name, tensor, found)
                    if found is not None:
                        filled.append((slot, found))
        return filled

    def _taken_up(self, modules: Mapping[str, nn.Module]) -> list[Beside]:
        known = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        start = (self._scope, ALSO) if self._scope else (ALSO,)
        return [
            beside(name, module, known, f"{tree.join_path((*start, name))}/", self._moving)
            for name, module in modules.items()
        ]

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
            _check_tensor(name, tensor, tensors.get(name))

    def _named(self, name: str) -> str:
        """Full name of a parameter or buffer."""
        return f"{self._scope}/{MODEL}/{name}" if self._scope else f"{MODEL}/{name}"


def _names(model: nn.Module) -> dict[int, str]:
    """A parameter's `id` -> its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _check_tensor(name: str, tensor: torch.Tensor, found: HostTensor | None) -> None:
    if found is None:
        raise LoadError(f"the checkpoint lacks {name}; is it of another model?")
    said = (found.dtype.name, tuple(found.shape))
    if said != (NAMES.get(tensor.dtype), tuple(tensor.shape)):
        raise LoadError(
            f"{name}: wanted {NAMES.get(tensor.dtype)} {list(tensor.shape)}, found {said[0]} {list(said[1])}"
        )


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
