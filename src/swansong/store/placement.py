"""Whether what a manifest says of where tensors lie can be true: found out before memory is asked for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from swansong.errors import ConfigError, MalformedError
from swansong.state.boxes import Box, coverage
from swansong.state.dtypes import DTYPES
from swansong.store.manifest import Chunk, Document, TensorRecord

_DIMENSIONS: Final = 64  # NumPy's limit


def check(path: Path, document: Document, sizes: Sequence[int]) -> None:
    """Raise MalformedError, with the tensor's name, unless every tensor can be read as it is recorded.

    `sizes` are the plain bytes of the document's files. What passes has a known type, a shape that an array
    can have, and boxes that hold each element exactly once, each with as many bytes as it needs. No byte of a
    file belongs to two tensors, so all tensors together are no larger than the files.
    """
    runs: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in document.tensors.items():
        problem = _problem(tensor, sizes)
        if problem is not None:
            raise MalformedError(
                f"{path}: tensor {name!r}: its manifest says what cannot be: {problem}",
                path=str(path),
                tensor=name,
            )
        for chunk in tensor.chunks:
            runs[chunk.file] += [(start, stop, name) for start, stop in chunk.ranges if start < stop]
    for spans in runs.values():
        spans.sort()
        for (_, end, one), (start, _, other) in pairwise(spans):
            if start < end:
                raise MalformedError(
                    f"{path}: tensors {one!r} and {other!r} share bytes from {start:,} on, says the manifest",
                    path=str(path),
                    tensor=other,
                )


def bare_pieces(document: Document, file: int, size: int, piece: int) -> list[int]:
    """Where the pieces of a file of `size` plain bytes begin in which no element of a tensor stands.

    Headers that fill a piece, a trailer that stands alone. For what has passed `check`.
    """
    covered: set[int] = set()
    for tensor in document.tensors.values():
        for chunk in tensor.chunks:
            if chunk.file == file:
                for start, stop in chunk.ranges:
                    covered.update(range(start // piece, -(-stop // piece)) if start < stop else ())
    return [index * piece for index in range(-(-size // piece)) if index not in covered]


def boxes_problem(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str | None:
    """Say why chunks do not hold every element of a tensor of that shape exactly once; None if they do."""
    if len(chunks) == 1 and chunks[0].offset is None and chunks[0].shape is None:
        return None
    if any((chunk.offset is None) != (chunk.shape is None) for chunk in chunks):
        return "a box has an offset without a shape, or a shape without an offset"
    try:
        whole = Box.whole(shape)
        boxes = [
            Box(c.offset, c.shape) if c.offset is not None and c.shape is not None else whole for c in chunks
        ]
        covered = coverage(shape, boxes)
    except ConfigError as error:
        return str(error)
    return None if covered.complete else covered.describe()


def names_in(document: Document, file: int) -> Callable[[int, int], list[str]]:
    """A function that tells which tensors stand in a range of a file's stored bytes.

    Exact for unencrypted files; for encrypted ones, whose plain and stored offsets differ by less than a
    hundred bytes per 16 MiB, a neighbour may be named too.
    """

    @cache  # nobody asks unless something is damaged, and the list takes time
    def spans() -> list[tuple[int, int, str]]:
        return sorted(
            (start, stop, name)
            for name, tensor in document.tensors.items()
            for chunk in tensor.chunks
            if chunk.file == file
            for start, stop in chunk.ranges
        )

    def names(start: int, stop: int) -> list[str]:
        before = bisect_left(spans(), stop, key=lambda span: span[0])
        return [name for _, end, name in spans()[:before] if end > start]

    return names


def _problem(tensor: TensorRecord, sizes: Sequence[int]) -> str | None:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"this release knows no type {tensor.dtype[:40]!r}"
    if not _possible(tensor.shape, dtype.itemsize):
        return f"no array has {len(tensor.shape)} dimensions {list(tensor.shape[:8])}"
    problem = boxes_problem(tensor.shape, tensor.chunks)
    if problem is not None:
        return problem
    for chunk in tensor.chunks:
        if not 0 <= chunk.file < len(sizes):
            return f"it stands in file {chunk.file} of {len(sizes)}"
        if any(not 0 <= start <= stop <= sizes[chunk.file] for start, stop in chunk.ranges):
            return f"it leaves its file of {sizes[chunk.file]:,} bytes"
        shape = tensor.shape if chunk.shape is None else chunk.shape
        want, got = math.prod(shape) * dtype.itemsize, sum(stop - start for start, stop in chunk.ranges)
        if want != got:
            return f"{dtype.name} {list(shape)} takes {want:,} bytes, it has {got:,}"
    return None


def _possible(shape: tuple[int, ...], itemsize: int) -> bool:
    # NumPy counts an array's bytes in 63 bits, and leaves out the zeros when it does.
    return (
        len(shape) <= _DIMENSIONS
        and min(shape, default=0) >= 0
        and math.prod(size or 1 for size in shape) * itemsize < 1 << 63
    )
