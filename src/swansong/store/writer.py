"""The parallel aligned writer: a Layout in, a durable file and its digests out.

Each worker thread takes the next piece, gathers it from the tensors' own memory into an aligned buffer of its
own, encodes it, digests the stored bytes and writes them past the page cache. What needs no encoding goes in
runs that the processor's cache still holds when they are digested. Memory is bounded by the buffers whatever
the size of the state. Copying, encrypting, digesting and writing all release the interpreter lock.

Where direct I/O is refused, the same bytes go through the page cache, and the result says so.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from swansong.errors import DiskFullError, SaveError
from swansong.store import crc32
from swansong.store.files import BLOCK, Files
from swansong.store.layout import Layout
from swansong.store.pieces import PIECE, Encoding, piece_count

RUN = 4 * 1024 * 1024
"""Bytes that are gathered, digested and written at once where nothing is encoded; a part of PIECE."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

PieceMacFunction = Callable[[int, bool, NDArray[np.uint8]], str]


def _default_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How files are written. None of it changes what is written."""

    threads: int = field(default_factory=_default_threads)
    """Workers per file. Each has a buffer of 4 MiB; of 16 MiB if the file is encrypted, and as much again is
    between two of them. Default: the cores at hand, at most 4."""
    direct: bool = True
    """Write past the page cache where the file system can."""
    direct_from_bytes: int = 1 << 20
    """Smaller files go through the page cache: one write and one fsync, with nothing to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One durable file (its name is durable once its directory is synced)."""

    size: int
    """Stored bytes."""
    digests: list[str]
    """xxh3_128 of each stored piece."""
    macs: list[str] | None
    """What the MAC function returned for each stored piece, if one was given."""
    direct: bool
    """True if the file was written past the page cache."""


class Writer:
    """Writes files, reusing its buffers from one to the next. One file at a time per Writer."""

    def __init__(self, files: Files, options: WriterOptions | None = None) -> None:
        self.files = files
        self.options = options or WriterOptions()
        self._buffers = _Buffers()

    def write(
        self,
        path: Path,
        layout: Layout,
        encoding: Encoding,
        *,
        mode: int = 0o400,
        mac: PieceMacFunction | None = None,
    ) -> Written:
        """Create `path` with what `layout` shows, and make its content durable.

        The file has mode 0600 while it is written and `mode` when done. On failure nothing is left of it.
        Raises DiskFullError or SaveError; an interrupt passes through after cleaning up.
        """
        stored_size = encoding.stored_size(layout.size)
        try:
            descriptor = self.files.create(path)
        except OSError as error:
            raise save_error(error, path, stored_size) from error
        direct = None
        try:
            if stored_size:
                self.files.preallocate(descriptor, _round_up(stored_size))
            if self.options.direct and stored_size >= self.options.direct_from_bytes:
                direct = self.files.open_direct(path)
            job = _Job(self.files, layout, encoding, mac, descriptor, direct, self._buffers)
            job.run(self.options.threads)
            self.files.truncate(descriptor, stored_size)
            self.files.set_mode(descriptor, mode)
            self.files.sync(descriptor)
        except BaseException as error:
            with suppress(OSError):
                self.files.unlink(path)
            if isinstance(error, OSError):
                raise save_error(error, path, stored_size) from error
            raise
        finally:
            if direct is not None:
                self.files.close(direct)
            self.files.close(descriptor)
        return Written(size=stored_size, digests=job.digests, macs=job.macs, direct=job.direct)

    def close(self) -> None:
        """Give the buffers back. The Writer can be used again."""
        self._buffers.clear()


def save_error(error: OSError, path: Path, needed: int) -> SaveError:
    """The error that a user should see for one of the operating system."""
    if isinstance(error, SaveError):
        return error
    reason = error.strerror or str(error)
    if error.filename and Path(str(error.filename)).name != path.name:
        reason += f" ({error.filename})"
    if error.errno not in _NO_SPACE:
        return SaveError(f"{path}: not saved: {reason}", path=str(path))
    free = free_bytes(path.parent)
    return DiskFullError(
        f"{path}: not saved: {reason}; {needed:,} bytes were needed, {free:,} are free there. "
        "Free some space, or keep fewer checkpoints",
        path=str(path),
        needed=needed,
        free=free,
    )


def free_bytes(directory: Path) -> int:
    """Bytes that an unprivileged user can still write there; 0 if that cannot be told."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


class _Job:
    """One file being written."""

    def __init__(
        self,
        files: Files,
        layout: Layout,
        encoding: Encoding,
        mac: PieceMacFunction | None,
        descriptor: int,
        direct: int | None,
        buffers: _Buffers,
    ) -> None:
        self._files, self._layout, self._encoding, self._mac = files, layout, encoding, mac
        self._descriptor, self._direct, self._buffers = descriptor, direct, buffers
        self._count = piece_count(encoding.stored_size(layout.size))
        # Unencrypted pieces are gathered straight into the buffer that is written.
        self._in_place = encoding.scheme == "none"
        # Pieces that hold trailer bytes wait for the CRC of everything before them.
        self._body_pieces = layout.body_size // encoding.plain_piece if layout.trailer else self._count
        self._crcs = [(0, 0)] * self._count
        self._streamed = self._in_place and mac is None
        self._gathering = threading.Semaphore(1)
        self._failed = threading.Event()
        self.digests = [""] * self._count
        self.macs = [""] * self._count if mac is not None else None

    @property
    def direct(self) -> bool:
        return self._direct is not None

    def run(self, threads: int) -> None:
        """Write every piece. The first error of any thread is raised once all have stopped."""
        todo = iter(range(self._body_pieces))
        guard = threading.Lock()
        workers = min(threads, self._body_pieces)
        # Encoding takes a fraction of the time of writing: half as many plain buffers do.
        self._gathering = threading.Semaphore(max(1, workers // 2))
        if workers <= 1:
            self._work(todo, guard)
        else:
            with ThreadPoolExecutor(workers, thread_name_prefix="swansong-writer") as pool:
                tasks = [pool.submit(self._work, todo, guard) for _ in range(workers)]
                try:
                    for task in tasks:
                        task.result()
                except BaseException:
                    self._failed.set()
                    raise
        if self._layout.trailer is not None:
            self._finish_with_trailer(self._layout.trailer)

    def _work(self, todo: Iterator[int], guard: threading.Lock) -> None:
        try:
            with self._buffers.lent(self._run_size() if self._streamed else self._buffer_size()) as stored:
                while not self._failed.is_set():
                    with guard:
                        index = next(todo, None)
                    if index is None:
                        return
                    if self._streamed:
                        self._stream(index, stored[: self._run_size()])
                    else:
                        self._finish(index, stored, self._encoded(index, stored))
        except BaseException:
            self._failed.set()
            raise

    def _stream(self, index: int, run: NDArray[np.uint8]) -> None:
        """Gather, digest and write a piece that is stored as it is, run by run."""
        start = index * PIECE
        size = min(PIECE, self._layout.body_size - start)
        digest, crc = xxhash.xxh3_128(), 0
        for offset in range(0, size, len(run)):
            part = run[: min(len(run), size - offset)]
            self._layout.fill(start + offset, part)
            if self._layout.trailer is not None:
                crc = zlib.crc32(part.data, crc)
            digest.update(part.data)
            self._write(start + offset, run, len(part))
        self.digests[index] = digest.hexdigest()
        self._crcs[index] = crc, size

    def _encoded(self, index: int, stored: NDArray[np.uint8]) -> int:
        """Fill `stored` with a piece; return its length."""
        if self._in_place:
            return self._gather(index, stored)
        with self._gathering, self._buffers.lent(self._buffer_size()) as plain:
            length = self._gather(index, plain)
            return self._encoding.encode(index, index == self._count - 1, plain[:length], stored)

    def _finish_with_trailer(self, trailer: Callable[[int], bytes]) -> None:
        pieces = range(self._body_pieces, self._count)
        with self._buffers.lent(self._buffer_size()) as stored, self._plain_buffer(stored) as plain:
            for index in pieces:
                self._gather(index, plain)
            crc = 0
            for part, length in self._crcs:
                crc = crc32.combine(crc, part, length)
            tail = np.frombuffer(trailer(crc), np.uint8)
            for index in pieces:
                length = self._gather(index, plain)
                taken = max(0, index * self._encoding.plain_piece - self._layout.body_size)
                more = min(len(tail) - taken, self._encoding.plain_piece - length)
                plain[length : length + more] = tail[taken : taken + more]
                self._put(index, plain[: length + more], stored)

    def _gather(self, index: int, plain: NDArray[np.uint8]) -> int:
        """Bring the body bytes of a piece together; return how many there are."""
        start = index * self._encoding.plain_piece
        length = max(0, min(self._encoding.plain_piece, self._layout.body_size - start))
        if length:
            self._layout.fill(start, plain[:length])
        if self._layout.trailer is not None:
            self._crcs[index] = zlib.crc32(plain[:length].data), length
        return length

    def _put(self, index: int, plain: NDArray[np.uint8], stored: NDArray[np.uint8]) -> None:
        length = len(plain)
        if not self._in_place:
            length = self._encoding.encode(index, index == self._count - 1, plain, stored)
        self._finish(index, stored, length)

    def _finish(self, index: int, stored: NDArray[np.uint8], length: int) -> None:
        """Digest and write a piece that is encoded."""
        piece = stored[:length]
        self.digests[index] = xxhash.xxh3_128_hexdigest(piece.data)
        if self._mac is not None and self.macs is not None:
            self.macs[index] = self._mac(index, index == self._count - 1, piece)
        self._write(index * PIECE, stored, length)

    def _write(self, offset: int, stored: NDArray[np.uint8], length: int) -> None:
        """Write the first `length` bytes of a buffer that is whole blocks."""
        if not self._written_directly(offset, stored, length):
            self._files.write(self._descriptor, stored[:length], offset)

    def _written_directly(self, offset: int, stored: NDArray[np.uint8], length: int) -> bool:
        """Write past the page cache; False if that is not wanted, or refused."""
        direct = self._direct
        if direct is None:
            return False
        stored[length : _round_up(length)] = 0
        try:
            self._files.write(direct, stored[: _round_up(length)], offset)
        except OSError as error:
            # Some file systems let a file be opened so, and refuse the first write.
            if error.errno != errno.EINVAL:
                raise
            self._direct = None
            return False
        return True

    def _run_size(self) -> int:
        return min(RUN, self._buffer_size())

    def _buffer_size(self) -> int:
        return min(PIECE, _round_up(self._encoding.stored_size(self._layout.size)))

    @contextmanager
    def _plain_buffer(self, stored: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        if self._in_place:
            yield stored
        else:
            with self._buffers.lent(self._buffer_size()) as plain:
                yield plain


class _Buffers:
    """Page-aligned memory, kept from save to save: touching fresh pages costs more than writing them."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._guard = threading.Lock()

    @contextmanager
    def lent(self, size: int) -> Iterator[NDArray[np.uint8]]:
        """A buffer of at least `size` bytes (at least one block), for the length of a `with` block."""
        with self._guard:
            fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= size]
            buffer = self._free.pop(fitting[0]) if fitting else None
        if buffer is None:
            buffer = np.frombuffer(mmap.mmap(-1, max(size, BLOCK)), np.uint8)
        try:
            yield buffer
        finally:
            with self._guard:
                self._free = [b for b in self._free if len(b) >= size]
                self._free.append(buffer)

    def clear(self) -> None:
        with self._guard:
            self._free.clear()


def _round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
