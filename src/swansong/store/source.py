"""Where a container's bytes come from when it is read: plain files, verified pieces, decrypted blocks.

A container parser sees a Source and nothing else, so it neither knows nor cares how the bytes are kept.
Sources stack: a decrypting one reads from a verifying one, which reads from a file.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from swansong.errors import MalformedError
from swansong.state.dtypes import DType
from swansong.state.tensors import HostTensor
from swansong.store.pieces import PIECE


class Source(Protocol):
    """Bytes by offset."""

    @property
    def path(self) -> str:
        """The file, for messages."""
        ...

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` (1-dim, contiguous) from `offset`.

        Raises DamagedError where the bytes are not the committed ones, MalformedError if the range does not
        lie inside the file.
        """
        ...


@runtime_checkable
class PieceSource(Source, Protocol):
    """A Source whose pieces several threads may read at once, each into a buffer of its own."""

    @property
    def piece(self) -> int:
        """Bytes in every piece but the last: what is checked as a whole. At most PIECE."""
        ...

    def read_piece(self, index: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Read piece `index` by way of `buffer`, which has PIECE bytes; return its bytes, a view of `buffer`.

        Errors as `read_into`. What `buffer` holds then is not to be used.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a container says that a tensor lies: `ranges` of bytes [start, stop), to be joined in order.

    Whoever builds one has checked that the ranges lie inside the source and that their lengths add up to
    product(shape) x itemsize.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return sum(stop - start for start, stop in self.ranges)


def read(source: Source, offset: int, length: int) -> bytes:
    """Return `length` bytes at `offset`; for the small things (headers, tags). Errors as `read_into`."""
    check_range(source, offset, length)
    out = np.empty(length, np.uint8)
    source.read_into(offset, out)
    return out.tobytes()


def read_tensor(source: Source, entry: TensorEntry) -> HostTensor:
    """Read one tensor into fresh memory. Errors as `read_into`."""
    array = np.empty(entry.shape, entry.dtype.carrier)
    flat = array.reshape(-1).view(np.uint8)
    done = 0
    for start, stop in entry.ranges:
        source.read_into(start, flat[done : done + stop - start])
        done += stop - start
    return HostTensor(entry.dtype, array)


def check_range(source: Source, offset: int, length: int) -> None:
    """Raise MalformedError unless [offset, offset + length) lies inside the source."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise MalformedError(
            f"{source.path}: wanted bytes {offset} to {offset + length}, the file has {source.size}",
            path=source.path,
            file=source.path,
            offset=min(max(offset, 0), source.size),
        )


def open_regular(path: Path) -> int:
    """Open a file for reading; links are followed, and nothing else is waited for or set going.

    Raises OSError, MalformedError for what is no regular file (a pipe would never end, a device may act).
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise MalformedError(
            f"{path}: wanted a regular file, found one of mode {stat.filemode(mode)}",
            path=str(path),
            file=str(path),
        )
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


class PlainFile:
    """An open file's bytes, unchecked. Does not own the descriptor."""

    piece = PIECE

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor = descriptor
        self.path = path
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See Source."""
        check_range(self, offset, len(out))
        done = 0
        while done < len(out):
            count = os.preadv(self.descriptor, [out[done : done + (1 << 30)].data], offset + done)
            if count == 0:
                raise MalformedError(
                    f"{self.path}: ended at byte {offset + done}, but had {self.size} when it was opened",
                    path=self.path,
                    file=self.path,
                    offset=offset + done,
                )
            done += count

    def read_piece(self, index: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See PieceSource."""
        target = buffer[: min(PIECE, self.size - index * PIECE)]
        self.read_into(index * PIECE, target)
        return target
