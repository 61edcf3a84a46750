"""Files in memory, and tensors of every type, for the tests of the native container."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store.layout import Layout
from swansong.store.source import check_range


@dataclass
class MemorySource:
    """Bytes as a Source."""

    data: bytes
    path: str = "c0.safetensors"

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        check_range(self, offset, len(out))
        out[:] = np.frombuffer(self.data, np.uint8, len(out), offset)


def file_bytes(layout: Layout) -> bytes:
    """The bytes that a writer would put on disk."""
    out = np.empty(layout.size, np.uint8)
    layout.fill(0, out)
    return out.tobytes()


def header_of(data: bytes) -> bytes:
    """The header's bytes, padding included."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def file_of(header: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    """A file of any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def same(one: HostTensor, other: HostTensor) -> bool:
    """Bit equality: type, shape and every byte."""
    return (one.dtype, one.shape) == (
        other.dtype,
        other.shape,
    ) and one.array.tobytes() == other.array.tobytes()


def sample(name: str, shape: tuple[int, ...], seed: int = 0) -> HostTensor:
    """A tensor of a type with random bits (0 and 1 for bool)."""
    dtype = DTYPES[name]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64))
    raw = rng.integers(0, 2 if name == "bool" else 256, count * dtype.itemsize, np.uint8)
    return HostTensor(dtype, raw.view(dtype.carrier).reshape(shape))


@st.composite
def host_tensors(draw: st.DrawFn) -> HostTensor:
    """A small tensor of any type, 0-dimensional, empty, transposed and strided ones among them."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    tensor = sample(draw(st.sampled_from(sorted(DTYPES))), shape, draw(st.integers(0, 2**16)))
    array = tensor.array
    if draw(st.booleans()):
        array = array.T
    if array.ndim and draw(st.booleans()):
        array = array[:: draw(st.sampled_from([-1, 2]))]
    return HostTensor(tensor.dtype, array)
