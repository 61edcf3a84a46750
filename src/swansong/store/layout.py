"""What a file will contain, before a byte of it is written: memory that already exists, in file order.

Containers build a Layout; the writer gathers it piece by piece. Nothing here copies a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from swansong.state.tensors import HostTensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a file's plain bytes. `name` is the tensor's, or None for headers and padding."""

    data: bytes | HostTensor
    name: str | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        # Not the tensor's own `nbytes`: this is asked for once per tensor of ten thousand, and NumPy knows.
        return len(self.data) if isinstance(self.data, bytes) else self.data.array.nbytes


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one named tensor's elements lie in the plain bytes: [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The plain bytes of one file.

    `trailer`, if given, is called with the CRC-32 (zlib's) of all plain bytes and returns what follows them.
    Its result must have `trailer_size` bytes.
    """

    segments: tuple[Segment, ...]
    trailer: Callable[[int], bytes] | None = None
    trailer_size: int = 0
    _starts: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        starts = accumulate((segment.nbytes for segment in self.segments), initial=0)
        object.__setattr__(self, "_starts", tuple(starts))

    @classmethod
    def of(cls, segments: Iterable[Segment], **options: object) -> Layout:
        """Collect segments, dropping empty ones."""
        return cls(tuple(s for s in segments if s.nbytes), **options)  # type: ignore[arg-type]

    @property
    def body_size(self) -> int:
        """Bytes before the trailer."""
        return self._starts[-1]

    @property
    def size(self) -> int:
        """All plain bytes, the trailer included."""
        return self.body_size + self.trailer_size

    def extents(self) -> list[Extent]:
        """Named runs in file order; a tensor that was cut into slices appears once per slice."""
        return [
            Extent(segment.name, start, stop)
            for segment, (start, stop) in zip(self.segments, pairwise(self._starts), strict=True)
            if segment.name is not None
        ]

    def fill(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Copy body bytes [offset, offset + len(out)) into `out`; long runs release the interpreter lock."""
        index = bisect_right(self._starts, offset) - 1
        at, end = offset, offset + len(out)
        while at < end:
            stop = min(self._starts[index + 1], end)
            _copy(self.segments[index].data, at - self._starts[index], out[at - offset : stop - offset])
            at = stop
            index += 1


def _copy(data: bytes | HostTensor, skip: int, out: NDArray[np.uint8]) -> None:
    if isinstance(data, bytes):
        np.copyto(out, np.frombuffer(data, np.uint8, len(out), skip))
    elif data.contiguous:
        np.copyto(out, data.bytes_view()[skip : skip + len(out)])
    else:
        # Only the elements asked for are brought together, so that a huge transposed tensor costs no
        # second copy of itself. An element may straddle a piece's edge, hence the rounding outwards.
        item = data.dtype.itemsize
        first, last = skip // item, -(-(skip + len(out)) // item)
        run = np.ascontiguousarray(data.array.flat[first:last]).view(np.uint8)
        np.copyto(out, run[skip - first * item : skip - first * item + len(out)])
