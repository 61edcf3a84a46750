"""Bytes that are digested before they are seen: whole pieces, parts of pieces, and what a message says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from store_support import KEY, OTHER_KEY, Memory
from swansong.errors import DamagedError, DigestMismatchError, MalformedError
from swansong.store.crypt import PieceMac
from swansong.store.manifest import FileRecord
from swansong.store.source import read
from swansong.store.verified import Verified

CONTENT = bytes(range(256)) * 4 + b"the end"
SALT = bytes(16)
PIECE = 100


def recorded(content: bytes, piece: int = PIECE, *, macs: bool = False) -> FileRecord:
    parts = [content[start : start + piece] for start in range(0, len(content), piece)]
    codes = [
        PieceMac(KEY, SALT)(i, i == len(parts) - 1, np.frombuffer(part, np.uint8))
        for i, part in enumerate(parts)
    ]
    return FileRecord(
        name="memory",
        size=len(content),
        piece=piece,
        digests=[xxhash.xxh3_128_hexdigest(part) for part in parts],
        macs=codes if macs else None,
    )


def names_at(start: int, stop: int) -> list[str]:
    """Tensors of 150 bytes each."""
    return [f"t{i}" for i in range(7) if i * 150 < stop and (i + 1) * 150 > start]


def verified(data: bytes | Memory, record: FileRecord | None = None, **options: object) -> Verified:
    source = data if isinstance(data, Memory) else Memory(data)
    return Verified(source, record or recorded(CONTENT), names_at, **options)  # type: ignore[arg-type]


@given(st.integers(1, len(CONTENT) + 5), st.data())
def test_any_range_is_read_whatever_the_piece(piece: int, data: st.DataObject) -> None:
    source = verified(CONTENT, recorded(CONTENT, piece))
    start = data.draw(st.integers(0, len(CONTENT)))
    stop = data.draw(st.integers(start, len(CONTENT)))
    assert read(source, start, stop - start) == CONTENT[start:stop]


def test_an_empty_file_has_no_pieces() -> None:
    source = verified(b"", recorded(b""))
    assert (source.pieces, read(source, 0, 0)) == (0, b"")


@pytest.mark.parametrize("at", [0, 99, 100, 550, len(CONTENT) - 1], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "few bytes"])
def test_a_flipped_bit_is_named_by_piece_and_tensor_before_a_byte_is_seen(at: int, whole: bool) -> None:
    damaged = bytearray(CONTENT)
    damaged[at] ^= 4
    source = verified(bytes(damaged))
    start, length = (0, len(CONTENT)) if whole else (at // PIECE * PIECE, 1)
    with pytest.raises(DigestMismatchError, match="memory: damaged") as caught:
        read(source, start, length)
    error, piece = caught.value, at // PIECE
    first = names_at(piece * PIECE, (piece + 1) * PIECE)[0]
    assert (error.file, error.offset, error.tensor) == ("memory", piece * PIECE, first)
    assert error.want == recorded(CONTENT).digests[piece]
    assert error.got == recorded(bytes(damaged)).digests[piece]
    assert error.want in str(error)
    assert error.got in str(error)


def test_pieces_that_are_sound_can_be_read_beside_a_damaged_one() -> None:
    damaged = bytearray(CONTENT)
    damaged[150] ^= 1
    source = verified(bytes(damaged))
    assert read(source, 0, 100) == CONTENT[:100]
    assert read(source, 200, 300) == CONTENT[200:500]
    with pytest.raises(DigestMismatchError):
        read(source, 99, 2)


def test_more_than_three_tensors_are_counted_not_listed() -> None:
    record = recorded(CONTENT, len(CONTENT))
    with pytest.raises(DigestMismatchError, match=r"standing there: t0, t1, t2 and 4 more$"):
        read(verified(CONTENT[:-1] + b"D", record), 0, 1)


def test_a_piece_is_read_once_for_reads_that_follow_one_another() -> None:
    source = Memory(CONTENT)
    checked = verified(source)
    for start in range(0, 300, 30):
        read(checked, start, 30)
    assert source.reads == [(0, 100), (100, 100), (200, 100)]


@pytest.mark.parametrize(
    "change", [lambda c: c[:-1], lambda c: c + b"x", lambda c: b""], ids=["cut", "longer", "empty"]
)
def test_another_size_is_refused_when_opened(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(MalformedError, match="not the committed content") as caught:
        verified(change(CONTENT))
    assert caught.value.offset == min(len(change(CONTENT)), len(CONTENT))


@pytest.mark.parametrize("digests", [[], ["00"] * 10, ["00"] * 12], ids=["none", "one less", "one more"])
def test_another_number_of_digests_is_refused(digests: list[str]) -> None:
    record = FileRecord(name="memory", size=len(CONTENT), piece=PIECE, digests=digests)
    with pytest.raises(MalformedError, match=f"in {len(digests)} pieces"):
        verified(CONTENT, record)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (len(CONTENT), 1), (0, 1 << 60)], ids=str)
def test_a_range_outside_is_refused(start: int, length: int) -> None:
    with pytest.raises(MalformedError, match="wanted bytes"):
        read(verified(CONTENT), start, length)


def test_check_reads_every_piece_into_one_buffer() -> None:
    source, buffer = verified(CONTENT), np.empty(PIECE, np.uint8)
    lengths = [source.check(index, buffer) for index in range(source.pieces)]
    assert lengths == [100] * 10 + [31]
    assert buffer[:31].tobytes() == CONTENT[-31:]


# -- codes ---------------------------------------------------------------------------------------------------


def test_codes_are_compared_where_a_key_is_given() -> None:
    record = recorded(CONTENT, macs=True)
    assert read(verified(CONTENT, record, mac=PieceMac(KEY, SALT)), 0, len(CONTENT)) == CONTENT
    with pytest.raises(DamagedError, match=r"at byte 0 do not authenticate.*t0"):
        read(verified(CONTENT, record, mac=PieceMac(OTHER_KEY, SALT)), 0, 1)


@pytest.mark.parametrize(
    "macs", [None, [], ["00" * 16] * 11, ["é"] * 11], ids=["none", "empty", "false", "no text of one"]
)
def test_a_piece_without_its_right_code_is_refused_although_its_digest_fits(macs: list[str] | None) -> None:
    plain = recorded(CONTENT)
    record = FileRecord(name="memory", size=plain.size, piece=PIECE, digests=plain.digests, macs=macs)
    with pytest.raises(DamagedError, match="do not authenticate") as caught:
        read(verified(CONTENT, record, mac=PieceMac(KEY, SALT)), 205, 1)
    assert (caught.value.offset, caught.value.tensor) == (200, "t1")


# -- threads -------------------------------------------------------------------------------------------------


def test_threads_that_read_parts_of_pieces_get_their_own_bytes() -> None:
    source = verified(CONTENT)
    start = threading.Barrier(4)

    def reader(offset: int) -> bool:
        start.wait()
        return all(read(source, at, 7) == CONTENT[at : at + 7] for at in range(offset, len(CONTENT) - 7, 13))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(reader, range(4)))
