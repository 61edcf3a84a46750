"""A digest of sampled values: what replicas compare at a freeze, in milliseconds whatever their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import xxhash

from swansong.state.tensors import HostTensor

BLOCKS: Final = 8
"""Blocks that are read of each tensor, evenly spaced, its first and last elements among them."""
BLOCK_BYTES: Final = 1024
"""Size of a block. A tensor of at most BLOCKS x BLOCK_BYTES bytes is read whole."""


def sampled_digest(tensors: Mapping[str, HostTensor]) -> str:
    """Return 32 hexadecimal digits: XXH3-128 of names, types, shapes and sampled elements.

    Equal for equal tensors, whatever their strides and the mapping's order. Different digests prove different
    values; equal ones make equal values likely, since replicas that part do so nearly everywhere.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        described = f"{len(name)}:{name}:{tensor.dtype.name}{tensor.shape}"
        digest.update(described.encode(errors="backslashreplace"))
        _sample(digest, tensor)
    return digest.hexdigest()


def _sample(digest: xxhash.xxh3_128, tensor: HostTensor) -> None:
    array, itemsize = tensor.array, tensor.dtype.itemsize
    length = max(1, BLOCK_BYTES // itemsize)
    surplus = array.size - length
    if surplus <= (BLOCKS - 1) * length:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return
    if tensor.contiguous:
        memory = tensor.bytes_view().data
        for block in range(BLOCKS):
            start = surplus * block // (BLOCKS - 1) * itemsize
            digest.update(memory[start : start + length * itemsize])
        return
    for block in range(BLOCKS):
        start = surplus * block // (BLOCKS - 1)
        digest.update(array.flat[start : start + length].view(np.uint8).data)
