"""CRC-32 of joined data, with zlib as the judge."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swansong.store.crc32 import combine

CRC = st.integers(0, 2**32 - 1)
LENGTH = st.integers(0, 2**50)


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_two_parts_give_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=500)))
def test_many_parts_from_nothing_on(parts: list[bytes]) -> None:
    crc = 0
    for part in parts:
        crc = combine(crc, zlib.crc32(part), len(part))
    assert crc == zlib.crc32(b"".join(parts))


@pytest.mark.parametrize("size", [2**24, 2**24 + 1])
def test_pieces_of_the_size_that_the_writer_uses(size: int) -> None:
    first, second = bytes(range(256)) * 100, b"\x5a" * size
    assert combine(zlib.crc32(first), zlib.crc32(second), size) == zlib.crc32(first + second)


@given(CRC, CRC, LENGTH, CRC, LENGTH)
def test_lengths_beyond_memory_join_in_any_order(
    a: int, b: int, b_length: int, c: int, c_length: int
) -> None:
    left = combine(combine(a, b, b_length), c, c_length)
    right = combine(a, combine(b, c, c_length), b_length + c_length)
    assert left == right
