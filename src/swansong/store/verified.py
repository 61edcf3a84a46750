"""Stored bytes that are checked against their digests before anybody sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from swansong.errors import DamagedError, DigestMismatchError, MalformedError
from swansong.store import crypt
from swansong.store.manifest import FileRecord
from swansong.store.pieces import piece_count
from swansong.store.source import Source, check_range

PieceMacFunction = Callable[[int, bool, NDArray[np.uint8]], str]


class Verified:
    """A PieceSource of stored bytes, each piece digested when first read.

    Reads that cover whole pieces go straight to their destination; for others, one piece is kept.
    `names_at(start, stop)` tells which tensors stand in a range of stored bytes, for messages.
    """

    def __init__(
        self,
        stored: Source,
        record: FileRecord,
        names_at: Callable[[int, int], list[str]],
        mac: PieceMacFunction | None = None,
    ) -> None:
        """Raises MalformedError if the file's size is not the recorded one."""
        self.stored = stored
        """The same bytes, unchecked."""
        self._record, self._names_at, self._mac = record, names_at, mac
        self.path, self.size, self.piece = stored.path, stored.size, record.piece
        self._guard = threading.Lock()
        self._cached = -1
        self._piece = np.empty(0, np.uint8)
        if self.size != record.size or record.piece <= 0 or len(record.digests) != self.pieces:
            raise MalformedError(
                f"{self.path}: not the committed content: it has {self.size:,} bytes, the manifest says "
                f"{record.size:,} in {len(record.digests)} pieces",
                path=self.path,
                file=self.path,
                offset=min(self.size, record.size),
            )

    @property
    def pieces(self) -> int:
        """Number of pieces that have a digest."""
        return -(-self.size // self._record.piece) if self._record.piece > 0 else piece_count(self.size)

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See Source. Raises DigestMismatchError (or DamagedError for the MAC) naming the damaged piece."""
        check_range(self, offset, len(out))
        done = 0
        while done < len(out):
            index, skip = divmod(offset + done, self._record.piece)
            length = self._length(index)
            take = min(length - skip, len(out) - done)
            target = out[done : done + take]
            if take == length:
                self._read_piece(index, target)
            else:
                with self._guard:
                    if index != self._cached:
                        piece = np.empty(length, np.uint8)
                        self._read_piece(index, piece)
                        self._piece, self._cached = piece, index
                    np.copyto(target, self._piece[skip : skip + take])
            done += take

    def read_piece(self, index: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See PieceSource."""
        target = buffer[: self._length(index)]
        self._read_piece(index, target)
        return target

    def check(self, index: int, buffer: NDArray[np.uint8]) -> int:
        """Read one piece into `buffer` (of at least a piece's length) and check it; return its length."""
        return len(self.read_piece(index, buffer))

    def _length(self, index: int) -> int:
        return min(self._record.piece, self.size - index * self._record.piece)

    def _read_piece(self, index: int, target: NDArray[np.uint8]) -> None:
        self.stored.read_into(index * self._record.piece, target)
        self.check_bytes(index, target)

    def check_bytes(self, index: int, target: NDArray[np.uint8]) -> None:
        """Check the bytes of a piece that were read in another way. Errors as `read_into`."""
        start = index * self._record.piece
        want, got = self._record.digests[index], xxhash.xxh3_128_hexdigest(target.data)
        if want != got:
            names = self._names_at(start, start + len(target))
            raise DigestMismatchError(
                f"{self.path}: damaged: the {len(target):,} bytes at byte {start:,} have digest {got}, "
                f"committed was {want}{_standing_there(names)}",
                path=self.path,
                file=self.path,
                offset=start,
                tensor=names[0] if names else None,
                want=want,
                got=got,
            )
        if self._mac is not None:
            self._check_mac(self._mac, index, target)

    def _check_mac(self, mac: PieceMacFunction, index: int, piece: NDArray[np.uint8]) -> None:
        macs = self._record.macs or []
        got = mac(index, index == self.pieces - 1, piece)
        if index >= len(macs) or not crypt.same_mac(macs[index], got):
            start = index * self._record.piece
            names = self._names_at(start, start + len(piece))
            raise DamagedError(
                f"{self.path}: the {len(piece):,} bytes at byte {start:,} do not authenticate; file and "
                f"manifest were changed by somebody without the key{_standing_there(names)}",
                path=self.path,
                file=self.path,
                offset=start,
                tensor=names[0] if names else None,
            )


def _standing_there(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; tensors standing there: {', '.join(names[:3])}{more}"
