"""A stand-in for a framework's tensors, and equality that no difference passes, for tests of state.tree."""

from __future__ import annotations

import json

import numpy as np

from swansong.state.tensors import HostTensor
from swansong.state.tree import flatten, unflatten


class FrameworkTensor:
    """Stands for a framework's tensor type; equal if its elements are."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FrameworkTensor) and identical(self.array, other.array)

    __hash__ = None


def as_tensor(value: object) -> HostTensor | None:
    return HostTensor.of(value.array) if isinstance(value, FrameworkTensor) else None


def round_trip(state: object, through=lambda skeleton: json.loads(json.dumps(skeleton))) -> object:
    flat = flatten(state, as_tensor)
    tensors = {name: FrameworkTensor(tensor.array) for name, tensor in flat.tensors.items()}
    return unflatten(through(flat.skeleton), tensors, as_array=lambda tensor: tensor.array)


def identical(one: object, other: object) -> bool:
    """Equal in type, structure, order and every bit, NaN being itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return one.hex() == other.hex()
    if isinstance(one, complex):
        return identical(one.real, other.real) and identical(one.imag, other.imag)
    if isinstance(one, dict):
        if getattr(one, "default_factory", 0) is not getattr(other, "default_factory", 0):
            return False
        return identical(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, set | frozenset):
        key = lambda item: (type(item).__name__, repr(item))  # noqa: E731
        return identical(sorted(one, key=key), sorted(other, key=key))
    return one == other


def nested(depth: int) -> list:
    state: list = []
    for _ in range(depth - 1):
        state = [state]
    return state
