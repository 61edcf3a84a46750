"""Tensors of a model that something else than an optimizer may write: buffers, and parameters left to no one.

They are written outside of updates, in forward passes or by the loop itself, so those that change are copied
at boundaries. Which do is noticed by PyTorch's own counters of writes, which most kernels raise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swansong.persist.boundary import BoundaryTensor, tensor_of
from swansong.torch.tensors import host_tensor

SMALL: Final = 64 * 1024
"""So many bytes of such tensors in all are copied at every boundary. If there are more, only those are that
training is known to change: buffers of normalisation layers, whose kernels raise no counter, and what belongs
to a module of which any has changed. What changes for the first time is noticed at the next boundary."""


@dataclass(slots=True)
class Slot:
    """A place in a module where such a tensor stands."""

    module: nn.Module
    holder: dict[str, torch.Tensor | None]
    """The module's own dictionary of buffers or parameters."""
    name: str
    """In `holder`."""
    full_name: str
    """In a checkpoint."""
    moves: bool = False
    """True: it changes outside of updates, and is copied at boundaries."""
    seen: tuple[int, int] | None = None
    """Writes and address when it was looked at first."""
    shown: _Shown | None = field(default=None, repr=False)

    @property
    def tensor(self) -> torch.Tensor | None:
        """What stands there now; None: nothing."""
        return self.holder.get(self.name)

    def changed(self) -> bool:
        """True if it was written since the first look, as far as can be seen."""
        tensor = self.tensor
        if tensor is None:
            return self.seen is not None
        now = tensor._version, tensor.data_ptr()
        if self.seen is None:
            self.seen = now
        return self.seen != now

    def copy(self) -> BoundaryTensor | None:
        """A copy; None if nothing stands there. Some microseconds at first, then less than one."""
        tensor = self.tensor
        if tensor is None:
            return None
        if self.shown is None or not self.shown.is_of(tensor):
            shown = host_tensor(tensor, self.full_name)
            self.shown = _Shown(tensor, tensor.data_ptr(), tensor.shape, shown.dtype.name, shown.array)
            if not self.shown.in_place:
                self.shown = None
                return tensor_of(self.full_name, shown)
        shown_here = self.shown
        return BoundaryTensor(
            self.full_name, shown_here.dtype, tuple(shown_here.shape), shown_here.array.tobytes()
        )


@dataclass(frozen=True, slots=True)
class _Shown:
    """How a tensor's memory was shown last."""

    tensor: torch.Tensor
    address: int
    shape: torch.Size
    dtype: str
    array: NDArray[np.generic]

    @property
    def in_place(self) -> bool:
        """True if `array` is the tensor's memory, not a copy of it."""
        return bool(self.array.__array_interface__["data"][0] == self.address)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if that is where `tensor` lies, still."""
        return tensor is self.tensor and tensor.data_ptr() == self.address and tensor.shape == self.shape


class Moving:
    """Those of one model. For the thread that trains, but for `still`."""

    def __init__(
        self,
        model: nn.Module,
        updated: Collection[int],
        prefix: str,
        rule: Callable[[Slot], bool] | None = None,
    ) -> None:
        """`updated` are the `id`s of the parameters that optimizers have; `prefix` begins all names. `rule`
        says which tensors change, where that is not to be noticed but known.

        Raises UnrepresentableError.
        """
        self.prefix, self._rule = prefix, rule
        self._slots = list(_slots(model, updated, prefix))
        tensors = {slot.full_name: tensor for slot in self._slots if (tensor := slot.tensor) is not None}
        small = sum(host_tensor(tensor, name).nbytes for name, tensor in tensors.items()) <= SMALL
        for slot in self._slots:
            slot.moves = rule(slot) if rule is not None else small or of_normalisation(slot)
        self._split()
        self.look()

    @property
    def all(self) -> list[Slot]:
        """All of them."""
        return self._slots

    @property
    def any(self) -> bool:
        """True if some change."""
        return bool(self._moving)

    def look(self) -> bool:
        """Notice which have changed, and copy those from now on; True if any is new. At boundaries."""
        if self._rule is not None:
            return self._ask(self._rule)
        if self._still and (changed := [slot for slot in self._still if slot.changed()]):
            for slot in self._still:
                slot.moves = any(slot.module is other.module for other in changed)
            self._split()
            return True
        return False

    def forget(self) -> None:
        """What was written so far was no change: it has been loaded."""
        for slot in self._still:
            slot.seen = None
        self.look()

    def copies(self) -> tuple[BoundaryTensor, ...]:
        """Copies of those that change."""
        if not self._moving:
            return ()
        return tuple(copy for slot in self._moving if (copy := slot.copy()) is not None)

    def _ask(self, rule: Callable[[Slot], bool]) -> bool:
        changed = [slot for slot in self._slots if slot.moves != rule(slot)]
        for slot in changed:
            slot.moves = not slot.moves
        if changed:
            self._split()
        return bool(changed)

    def _split(self) -> None:
        self._still = [slot for slot in self._slots if not slot.moves]
        self._moving = [slot for slot in self._slots if slot.moves]


def of_normalisation(slot: Slot) -> bool:
    """True for what a normalisation layer gathers."""
    return isinstance(slot.module, _NormBase) and slot.holder is slot.module._buffers


def _slots(model: nn.Module, updated: Collection[int], prefix: str) -> Iterator[Slot]:
    known = set(updated)
    for path, module in model.named_modules():
        passing = module._non_persistent_buffers_set
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is None or id(tensor) in known or (holder is module._buffers and name in passing):
                    continue
                known.add(id(tensor))
                yield Slot(module, holder, name, f"{prefix}{path}.{name}" if path else f"{prefix}{name}")
