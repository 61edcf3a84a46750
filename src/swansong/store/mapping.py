"""Files shown in memory instead of being read into it, every piece checked before anybody sees a byte.

What is verified: the pages that the mapping shows when it is made. They are the page cache's own, so nothing
is copied, and the kernel may drop them and read them again later, unchecked. That is sound as long as the
file is not changed; a committed file never is (it is read-only, and replaced only by a rename, which a
mapping survives), but a hand that cuts it short takes the process down with SIGBUS. What is written to the
mapping stays in the process: it is private.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swansong.store.pieces import PIECE
from swansong.store.reading import default_threads, in_parallel
from swansong.store.source import PlainFile, Source
from swansong.store.verified import Verified

_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of Linux 5.14: read and map pages now, with an error instead of SIGBUS."""
_MOST_THREADS: Final = 4
"""It takes no buffers; what is waited for is the disk."""


def mapped(source: Source, *, threads: int | None = None) -> NDArray[np.uint8] | None:
    """All bytes of `source`, mapped, each piece checked if `source` checks; None if it cannot be mapped.

    It cannot if it is encrypted, empty, or the kernel is older than Linux 5.14. The array is writable, and
    keeps a descriptor open as long as a view of it is left. Errors as `Source.read_into`.
    """
    file = source.stored if isinstance(source, Verified) else source
    if not isinstance(file, PlainFile) or not file.size:
        return None
    try:
        memory = mmap.mmap(
            file.descriptor, file.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
        memory.madvise(_POPULATE_READ, 0, min(file.size, mmap.PAGESIZE))
    except (OSError, ValueError):  # ValueError: the file is shorter by now
        return None
    content = np.frombuffer(memory, np.uint8)
    step = source.piece if isinstance(source, Verified) else PIECE

    def show(index: int, _: NDArray[np.uint8]) -> None:
        start, stop = index * step, min((index + 1) * step, len(content))
        first = start - start % mmap.PAGESIZE
        try:
            memory.madvise(_POPULATE_READ, first, stop - first)
        except OSError:
            source.read_into(start, np.empty(stop - start, np.uint8))  # says what is wrong
            raise
        if isinstance(source, Verified):
            source.check_bytes(index, content[start:stop])

    pieces = range(-(-file.size // step))
    in_parallel(pieces, show, threads=default_threads(_MOST_THREADS) if threads is None else threads)
    return content
