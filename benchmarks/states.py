"""What is saved in the measurements: random float32, so that nothing can compress it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content

State = dict[str, NDArray[np.float32]]


def state(size: int, count: int = 64) -> State:
    """`size` bytes in `count` tensors of equal size, except for less than a row of each."""
    random = np.random.default_rng(0)
    elements = max(1, size // count // 4)
    width = min(1024, elements)
    return {
        f"layer{number:05d}.weight": random.random((elements // width, width), np.float32)
        for number in range(count)
    }


def content(arrays: State) -> Content:
    """The same, as our savers want it."""
    return Content(tensors={name: HostTensor.of(array) for name, array in arrays.items()})


def nbytes(arrays: State) -> int:
    """Bytes of all elements."""
    return sum(array.nbytes for array in arrays.values())
