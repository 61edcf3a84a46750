"""The limits: what the disk, the memory and the processor can do, without any of our code."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from benchmarks.states import State
from benchmarks.turns import Candidate, make_durable
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

_RUN = 4 << 20
_CIPHER_PIECE = 16 << 20


def raw_writes(size: int) -> list[Candidate]:
    """O_DIRECT writes of `size` bytes that lie ready in aligned memory; the best of them is the limit."""
    return [
        Candidate(f"raw O_DIRECT, {threads} x {piece} MiB", _raw(size, threads, piece << 20))
        for threads in (1, 2, 4)
        for piece in (4, 16)
    ]


def cached_write(arrays: State) -> Candidate:
    """One file through the page cache, and fsync."""

    def prepare(directory: Path) -> Callable[[], None]:
        def run() -> None:
            with (directory / "cached").open("wb", buffering=0) as file:
                for array in arrays.values():
                    file.write(array.data)
                os.fsync(file.fileno())
            make_durable(directory)

        return run

    return Candidate("write through the page cache + fsync", prepare)


@contextmanager
def plain_copies(arrays: State, threads: int) -> Iterator[Candidate]:
    """Copying into memory that has been touched, by so many threads that wait for it."""
    copies = {name: np.zeros_like(array) for name, array in arrays.items()}
    runs = [pair for name, array in arrays.items() for pair in _runs(copies[name], array)]
    with ThreadPoolExecutor(threads) as pool:

        def work(first: int) -> None:
            for target, source in runs[first::threads]:
                np.copyto(target, source)

        def run() -> None:
            list(pool.map(work, range(threads)))

        yield Candidate(f"plain copy, {threads} threads", lambda _: run)


@contextmanager
def plain_ciphers(size: int, threads: int) -> Iterator[Candidate]:
    """AES-256-GCM of `size` bytes, piece by piece into one buffer a thread, nothing written."""
    buffers = [np.ones((2, _CIPHER_PIECE + 16), np.uint8) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def work(first: int) -> None:
            plain, out = buffers[first]
            cipher = AESGCM(bytes(32))
            for number, start in enumerate(range(first * _CIPHER_PIECE, size, threads * _CIPHER_PIECE)):
                length = min(_CIPHER_PIECE, size - start)
                nonce = number.to_bytes(12, "big")
                cipher.encrypt_into(nonce, plain[:length].data, None, out[: length + 16].data)

        def run() -> None:
            list(pool.map(work, range(threads)))

        yield Candidate(f"AES-256-GCM alone, {threads} threads", lambda _: run)


def _runs(
    target: NDArray[np.float32], source: NDArray[np.float32]
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    target, source = target.reshape(-1), source.reshape(-1)
    step = _RUN // source.itemsize
    return [(target[at : at + step], source[at : at + step]) for at in range(0, source.size, step)]


def _raw(size: int, threads: int, piece: int) -> Callable[[Path], Callable[[], None]]:
    def prepare(directory: Path) -> Callable[[], None]:
        buffers = [mmap.mmap(-1, piece) for _ in range(threads)]
        for buffer in buffers:
            buffer.write(b"\xa5" * piece)
        return lambda: _write(directory / "raw", size, buffers, piece)

    return prepare


def _write(path: Path, size: int, buffers: list[mmap.mmap], piece: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    os.posix_fallocate(descriptor, 0, whole)

    def work(first: int) -> None:
        for offset in range(first * piece, whole, len(buffers) * piece):
            os.pwrite(descriptor, memoryview(buffers[first])[: min(piece, whole - offset)], offset)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(buffers))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    make_durable(path, path.parent)
