"""PyTorch's tensors as tensors in host memory, and back. On the CPU they are shown in place."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from swansong.errors import NotSupportedError, UnrepresentableError
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16}
"""Bytes per element -> what NumPy knows of that size, for types that it lacks."""
NAMES: Final = {
    getattr(torch, name): name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)
}
"""torch.dtype -> canonical name."""
TYPES: Final = {name: dtype for dtype, name in NAMES.items()}
"""Canonical name -> torch.dtype."""


def host_tensor(tensor: torch.Tensor, name: str) -> HostTensor:
    """Show a tensor's elements: in place on the CPU, from elsewhere a copy.

    Raises UnrepresentableError for elements or layouts without a fixed binary form (quantized, sparse,
    nested, meta), NotSupportedError for a DTensor.
    """
    if type(tensor).__name__ == "DTensor":
        raise NotSupportedError(f"{name}: a DTensor; split state is not supported yet")
    dtype = NAMES.get(tensor.dtype)
    if dtype is None or tensor.is_quantized:
        raise UnrepresentableError(f"{name}: elements of type {tensor.dtype} cannot be stored")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        what = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnrepresentableError(f"{name}: a tensor of layout {what} cannot be stored; wanted a dense one")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if not DTYPES[dtype].exact:
        carrier = _CARRIERS[plain.element_size()]
        return HostTensor.of(plain.view(carrier).numpy(), dtype=dtype, name=name)
    return HostTensor.of(plain.numpy(), name=name)


def as_tensor(value: object) -> HostTensor | None:
    """For `state.tree.flatten`."""
    return host_tensor(value, "tensor") if isinstance(value, torch.Tensor) else None


def form_of(value: object) -> HostTensor | None:
    """As `as_tensor`, with nothing of a tensor that is elsewhere than on the CPU but its form."""
    if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
        value = torch.empty_like(value, device="cpu")
    return as_tensor(value)


def torch_tensor(tensor: HostTensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """A new tensor with these elements."""
    return _shown(HostTensor(tensor.dtype, _copy(tensor.array))).to(device)


def fill(target: torch.Tensor, tensor: HostTensor) -> None:
    """Write a tensor's elements into one of the same type and shape, in place."""
    flags = tensor.array.flags
    with torch.no_grad():
        target.copy_(_shown(tensor) if flags.carray else torch_tensor(tensor))


def _copy(array: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.array(array, copy=True, order="C")  # np.ascontiguousarray would turn () into (1,)


def _shown(tensor: HostTensor) -> torch.Tensor:
    """A tensor on the same memory, which is aligned, contiguous and writable."""
    dtype = TYPES.get(tensor.dtype.name)
    if dtype is None:
        raise NotSupportedError(f"this PyTorch has no type {tensor.dtype.name}")
    carrier = tensor.array
    if not tensor.dtype.exact:
        carrier = carrier.view(np.uint8 if carrier.itemsize == 1 else np.int16)
    return torch.from_numpy(carrier).view(dtype)
