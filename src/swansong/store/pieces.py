"""Files as sequences of pieces: how plain bytes become stored bytes, piece by piece, in any order.

Every stored piece but the last has exactly PIECE bytes, whatever the encoding, so that pieces can be
written, digested and verified independently and at aligned offsets. Reading back is a Source's work.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

PIECE: Final = 16 * 1024 * 1024
"""Bytes of a stored piece; a multiple of every direct-I/O block size in use."""


class Encoding(Protocol):
    """Turns plain pieces into stored ones. Holds no state between pieces: threads share one."""

    @property
    def scheme(self) -> str:
        """How the manifest calls it: "none", "sealed", "mindspore-AES-GCM", "mindspore-AES-CBC"."""
        ...

    @property
    def plain_piece(self) -> int:
        """Plain bytes in every piece but the last."""
        ...

    def stored_size(self, plain_size: int) -> int:
        """Stored size of a file of `plain_size` plain bytes."""
        ...

    def encode(self, index: int, last: bool, plain: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """Encode piece `index` into `out`, which has room for PIECE bytes; return the stored length.

        `plain` and `out` are 1-dim, contiguous and do not overlap.
        """
        ...


class Plain:
    """Stored bytes are the plain bytes."""

    scheme = "none"
    plain_piece = PIECE

    def stored_size(self, plain_size: int) -> int:
        """See Encoding."""
        return plain_size

    def encode(self, index: int, last: bool, plain: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """See Encoding."""
        np.copyto(out[: len(plain)], plain)
        return len(plain)


def piece_count(stored_size: int) -> int:
    """Number of pieces of a file of that stored size; an empty file has none."""
    return -(-stored_size // PIECE)
