"""Where tensors lie, by manifests that cannot be true: refused before a byte of memory is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from swansong.errors import MalformedError
from swansong.store import placement
from swansong.store.manifest import Chunk, Document, TensorRecord

PATH = Path("run-1_1")


def document(**tensors: TensorRecord) -> Document:
    return Document(id="0" * 32, files=[], tensors=tensors)


def tensor(*chunks: Chunk, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> TensorRecord:
    return TensorRecord(dtype=dtype, shape=shape, chunks=list(chunks))


def chunk(
    *ranges: tuple[int, int],
    file: int = 0,
    offset: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> Chunk:
    return Chunk(file=file, ranges=list(ranges), offset=offset, shape=shape)


@pytest.mark.parametrize(
    "record",
    [
        tensor(chunk((0, 16))),
        tensor(chunk((84, 100))),
        tensor(chunk((20, 28), (0, 8))),
        tensor(chunk((0, 4)), shape=()),
        tensor(chunk((0, 4), file=1, offset=(), shape=()), shape=()),
        tensor(chunk(), shape=(0, 7)),
        tensor(chunk((50, 50)), shape=(0,)),
        tensor(chunk((0, 8), offset=(0,), shape=(2,)), chunk((0, 8), file=1, offset=(2,), shape=(2,))),
        tensor(chunk((0, 16), offset=(0,), shape=(4,))),
    ],
    ids=[
        "whole",
        "at the end",
        "slices",
        "0-dim",
        "0-dim box",
        "empty",
        "empty range",
        "two boxes",
        "one box",
    ],
)
def test_what_can_be_read_passes(record: TensorRecord) -> None:
    placement.check(PATH, document(t=record), [100, 10])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (tensor(chunk((0, 16)), dtype="float31"), "knows no type 'float31'"),
        (tensor(chunk((0, 16)), shape=(1,) * 64 + (4,)), "no array has 65 dimensions"),
        (tensor(chunk(), shape=(0, 2**62, 2**62)), "no array has 3 dimensions"),
        (tensor(chunk((0, 16)), shape=(-4,)), "no array has 1 dimensions"),
        (tensor(chunk((0, 16)), shape=(-2, -2)), "no array has"),
        (tensor(chunk((0, 16)), shape=(2**100,)), "no array has"),
        (tensor(), "nobody holds"),
        (tensor(chunk((0, 8), offset=(0,), shape=(2,))), r"nobody holds \[2:4\]"),
        (tensor(chunk((0, 16)), chunk((16, 32))), r"0 and 1 both hold \[0:4\]"),
        (tensor(chunk((0, 8), offset=(3,), shape=(2,))), "does not lie inside"),
        (tensor(chunk((0, 16), offset=(-1,), shape=(4,))), "wanted 0 <= offset"),
        (tensor(chunk((0, 16), offset=(0, 0), shape=(4,))), "differ in their number of axes"),
        (tensor(chunk((0, 16), offset=(0,))), "an offset without a shape"),
        (tensor(chunk((0, 16), shape=(4,))), "a shape without an offset"),
        (tensor(chunk((0, 16), file=2)), "stands in file 2 of 2"),
        (tensor(chunk((0, 16), file=-1)), "stands in file -1 of 2"),
        (tensor(chunk((90, 106))), "leaves its file of 100 bytes"),
        (tensor(chunk((-16, 0))), "leaves its file"),
        (tensor(chunk((16, 0), (0, 32))), "leaves its file"),
        (tensor(chunk((0, 15))), r"float32 \[4\] takes 16 bytes, it has 15"),
        (tensor(chunk((0, 16), (0, 16)), shape=(8,)), "share bytes from 0 on"),
    ],
    ids=[
        *("type", "dimensions", "size beyond the zeros", "negative", "two negative", "huge"),
        *("no chunk", "half", "twice whole", "outside", "negative offset", "axes", "no shape", "no offset"),
        *("file", "negative file", "past the end", "negative range", "backwards", "short", "one run twice"),
    ],
)
def test_what_cannot_be_is_refused_with_the_tensors_name(record: TensorRecord, message: str) -> None:
    with pytest.raises(MalformedError, match=rf"run-1_1.*'?t'?.*{message}|{message}") as caught:
        placement.check(PATH, document(t=record), [100, 10])
    assert (caught.value.tensor, caught.value.path) == ("t", "run-1_1")


def test_two_tensors_on_the_same_bytes_are_refused() -> None:
    both = document(a=tensor(chunk((0, 16))), b=tensor(chunk((12, 28))))
    with pytest.raises(MalformedError, match="tensors 'a' and 'b' share bytes from 12 on"):
        placement.check(PATH, both, [100])


def test_neighbours_and_the_same_offsets_in_other_files_are_fine() -> None:
    placement.check(
        PATH,
        document(a=tensor(chunk((0, 16))), b=tensor(chunk((16, 32))), c=tensor(chunk((0, 16), file=1))),
        [32, 16],
    )
