"""Sampled digests: equal for equal tensors, however they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from swansong.engine.samples import BLOCK_BYTES, BLOCKS, sampled_digest
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor

WHOLE = BLOCKS * BLOCK_BYTES
"""Bytes of the largest tensor that is read whole."""


def digest(array: NDArray[np.generic], name: str = "w", dtype: str | None = None) -> str:
    return sampled_digest({name: HostTensor.of(array, dtype=dtype)})


def ramp(*shape: int) -> NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("shape", [(40, 30), (400, 300)], ids=["read-whole", "sampled"])
def test_strides_make_no_difference(shape: tuple[int, int]) -> None:
    array = ramp(*shape)
    padded = np.zeros((shape[0], shape[1] + 5), np.float32)
    padded[:, : shape[1]] = array
    assert digest(array) == digest(np.asfortranarray(array)) == digest(padded[:, : shape[1]])


@pytest.mark.parametrize("size", [1, 100, WHOLE // 4, WHOLE // 4 + 1, 1_000_003])
@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_a_difference_in_the_first_or_the_last_element_is_seen(size: int, at: int) -> None:
    other = ramp(size)
    other[at] += 1
    assert digest(other) != digest(ramp(size))


@pytest.mark.parametrize("at", range(0, WHOLE // 4, 97))
def test_a_small_tensor_is_read_whole(at: int) -> None:
    other = ramp(WHOLE // 4)
    other[at] += 1
    assert digest(other) != digest(ramp(WHOLE // 4))


def test_blocks_of_a_large_tensor_are_spread_evenly() -> None:
    size = 1_000_000
    seen = [at for at in range(0, size, 101) if digest(marked(size, at)) != digest(np.zeros(size, np.uint8))]
    blocks = [at for before, at in zip([-size, *seen], seen, strict=False) if at - before > BLOCK_BYTES]
    assert len(blocks) == BLOCKS
    assert np.diff(blocks) == pytest.approx((size - BLOCK_BYTES) / (BLOCKS - 1), abs=300)


def marked(size: int, at: int) -> NDArray[np.uint8]:
    array = np.zeros(size, np.uint8)
    array[at] = 1
    return array


def test_name_type_and_shape_are_part_of_it_and_order_is_not() -> None:
    base = ramp(4, 6)
    digests = [
        digest(base),
        digest(base, name="v"),
        digest(base.view(np.int32)),
        digest(base.reshape(6, 4)),
        digest(base.reshape(24)),
    ]
    assert len(set(digests)) == len(digests)
    a, b = HostTensor.of(base), HostTensor.of(base + 1)
    assert sampled_digest({"a": a, "b": b}) == sampled_digest({"b": b, "a": a})
    assert sampled_digest({"a": a, "b": b}) != sampled_digest({"a": b, "b": a})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (1, 70_000)], ids=str)
def test_every_type_and_shape_has_a_digest(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, DTYPES[dtype].carrier)
    text = digest(array, dtype=dtype)
    assert len(text) == 32
    assert text == digest(array.copy(), dtype=dtype)


def test_no_tensors_have_a_digest_too() -> None:
    assert sampled_digest({}) != digest(ramp(1))
