"""Modules that `also` names beside the model: averages of it, and such as no optimizer updates.

Their tensors are live, saved in place, where it is known when they are written: those of an average by its
`update_parameters`, which is part of a step's update (see `updates`); those of another module for as long as
they are not seen to change (see `moving`). What else there is of them is copied at every boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from swansong.errors import LoadError
from swansong.state.tensors import HostTensor
from swansong.torch.moving import Moving, Slot, of_normalisation
from swansong.torch.optimizers import in_torch

_EXTRA: Final = "_extra_state"
"""Ends the names that PyTorch gives, in a `state_dict`, to what modules keep besides tensors."""


class Beside:
    """One such module. `live` may be asked by any thread, the rest by the one that trains."""

    def __init__(self, name: str, module: nn.Module, moving: Moving, prefix: str) -> None:
        """`moving` has its tensors, but for those that others have as well; `prefix` begins their names."""
        self.name, self.module = name, module
        self._moving, self._prefix = moving, len(prefix)
        self._extras = with_extra_state(module)

    @property
    def slots(self) -> list[Slot]:
        """Where its tensors stand."""
        return self._moving.all

    def live(self) -> dict[str, torch.Tensor]:
        """Its tensors that are saved in place, by the names that they have in its `state_dict`."""
        return {name: tensor for name, tensor, moves in self._tensors() if not moves}

    def copied(self) -> dict[str, Any]:
        """What is to be copied at boundaries, likewise: tensors that change, and what else modules keep."""
        moving: dict[str, Any] = {name: tensor for name, tensor, moves in self._tensors() if moves}
        return moving | {f"{path}{_EXTRA}": module.get_extra_state() for path, module in self._extras.items()}

    def look(self) -> bool:
        """Notice which change, at a boundary; True if others than before."""
        return self._moving.look()

    def found(
        self, live: Mapping[str, HostTensor], copied: Mapping[str, Any] | None
    ) -> list[tuple[Slot, HostTensor | None]]:
        """Its tensors in a checkpoint; None for one that is lacking. Those are left out that `copied` would
        have, if that is None: nothing of the kind was recorded.
        """
        both = {**(copied or {}), **live}
        pairs = [(slot, both.get(self._name(slot))) for slot in self.slots if slot.tensor is not None]
        return [pair for pair in pairs if copied is not None or pair[1] is not None or not pair[0].moves]

    def loaded(self, copied: Mapping[str, Any] | None) -> None:
        """The tensors have been set; the rest is to be. Raises LoadError if it is not there."""
        self._moving.forget()
        if copied is None:
            return
        for path, module in self._extras.items():
            if f"{path}{_EXTRA}" not in copied:
                raise LoadError(
                    f"the checkpoint lacks what {self.name}, {path or 'the module'} keeps besides"
                )
            module.set_extra_state(in_torch(copied[f"{path}{_EXTRA}"]))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it changes unseen."""
        for slot in self.slots:
            tensor = slot.tensor
            if tensor is not None:
                yield self._name(slot), tensor, slot.moves

    def _name(self, slot: Slot) -> str:
        return slot.full_name[self._prefix :]


class Averaged(Beside):
    """An average of the model, in a torch.optim.swa_utils.AveragedModel.

    It is updated in the course of a step's update, any number of times or not at all. Where it is updated
    outside of one, as at an epoch's end, the state at the last boundary is what it was before: that is kept,
    and shown, until the next update begins.
    """

    def __init__(self, name: str, module: AveragedModel, moving: Moving, prefix: str) -> None:
        super().__init__(name, module, moving, prefix)
        self.usual = 0
        """How often it is updated in a step, at most, as far as is known."""
        self.taken = 0
        """How often it has been updated in this step's update."""
        self.behind = False
        """The step's update may be over, and lacks this average's part, if there is to be one."""
        self._kept: dict[str, torch.Tensor] | None = None

    def live(self) -> dict[str, torch.Tensor]:
        """See Beside."""
        kept = self._kept
        return super().live() if kept is None else kept

    def keep(self) -> None:
        """It is about to be written outside of an update: go on showing what it was."""
        if self._kept is None:
            with torch.no_grad():
                self._kept = {name: tensor.detach().clone() for name, tensor in super().live().items()}

    def begin(self) -> None:
        """A step's update has begun."""
        self._kept, self.behind = None, True

    def updated(self) -> None:
        """It has been updated in the course of a step's update."""
        self.taken += 1
        self.behind = False

    def boundary(self) -> None:
        """The step is complete."""
        self.usual, self.taken = max(self.usual, self.taken), 0
        self.behind = False


def can_be_followed(other: object) -> bool:
    """True for a module of which all state is in parameters, buffers and extra state, in host memory."""
    return (
        isinstance(other, nn.Module)
        and type(other).state_dict is nn.Module.state_dict
        and type(other).load_state_dict is nn.Module.load_state_dict
        and not any(map(_has_hooks, other.modules()))
        and {t.device.type for t in (*other.parameters(), *other.buffers())} <= {"cpu"}
    )


def beside(name: str, module: nn.Module, known: set[int], prefix: str, model: Moving) -> Beside:
    """Take a module up; the `id`s of its tensors are added to those that are `known` already, and skipped.

    `model` has the buffers of the model. Raises UnrepresentableError.
    """
    if not isinstance(module, AveragedModel):
        made = Beside(name, module, Moving(module, known, prefix), prefix)
    else:
        of_model = {_bare(slot, len(model.prefix)): slot for slot in model.all}

        def moves(slot: Slot) -> bool:
            # Buffers that each rank has its own values of are so in the average, too: replicas would differ.
            if slot.holder is slot.module._parameters or slot.tensor is module.n_averaged:
                return False
            original = of_model.get(_bare(slot, len(prefix)))
            return of_normalisation(slot) if original is None else original.moves

        made = Averaged(name, module, Moving(module, known, prefix, moves), prefix)
    known.update(id(slot.tensor) for slot in made.slots)
    return made


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep more than tensors, by their paths: "" is `model` itself, all others end in "."."""
    plain = nn.Module.get_extra_state
    found = {
        path: module for path, module in model.named_modules() if type(module).get_extra_state is not plain
    }
    return {f"{path}." if path else "": module for path, module in found.items()}


def _bare(slot: Slot, begin: int) -> str:
    """A tensor's name without what wrappers put before it."""
    name = slot.full_name[begin:]
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks or module._load_state_dict_pre_hooks)
