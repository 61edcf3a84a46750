"""Copying state aside, so that training can go on while it is written.

The staging memory is taken and touched once and used again: the first touch of fresh memory costs several
times the copy itself. Two generations, so that one capture can be written while the next is taken.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content

_ALIGNMENT = 64
_PLAIN = ("skeleton", "objects", "extra", "rank_objects", "inexact")
_RUN = 16 * 1024 * 1024
GENERATIONS = 2


class Staging:
    """Memory for captures. One capture at a time; up to two may be in use."""

    def __init__(self, threads: int, *, allocate: Callable[[int], NDArray[np.uint8]] | None = None) -> None:
        """`allocate` takes that many bytes of memory, freed with their last array; None: of this process."""
        self._threads, self._allocate = threads, allocate or private_memory
        self._idle: list[NDArray[np.uint8]] = []
        self._free = threading.Semaphore(GENERATIONS)

    def capture(self, content: Content) -> tuple[Content, Callable[[], None]]:
        """Copy every tensor of `content`, and all else that could change; return the copy, and what to call
        when it is no longer needed.

        Waits while two earlier captures are still in use. Tensors that share memory are copied once each.
        """
        self._free.acquire()
        try:
            memory = self._memory(
                _needed(content.tensors) + _needed(content.rest) + _needed(content.append_info)
            )
            jobs: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
            at = 0
            tensors, at = _place(content.tensors, memory, at, jobs)
            rest, at = _place(content.rest, memory, at, jobs)
            appended, at = _place(content.appended, memory, at, jobs)
            others = {name: deepcopy(getattr(content, name)) for name in _PLAIN}
            self._copy(jobs)
        except BaseException:
            self._free.release()
            raise
        append_info = {**content.append_info, **appended}
        copied = replace(content, tensors=tensors, rest=rest, append_info=append_info, **others)
        return copied, _once(lambda: self._give_back(memory))

    def close(self) -> None:
        """Let go of idle memory. The Staging can be used again."""
        self._idle.clear()

    def _memory(self, size: int) -> NDArray[np.uint8]:
        memory = self._idle.pop() if self._idle else None
        if memory is None or len(memory) < size:
            memory = None  # before there is more
            memory = self._allocate(max(size, mmap.PAGESIZE))
        return memory

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        self._idle.append(memory)
        self._free.release()

    def _copy(self, jobs: list[tuple[NDArray[np.generic], NDArray[np.generic]]]) -> None:
        large = [job for job in jobs if job[0].nbytes >= _RUN]
        for target, source in jobs:
            if source.nbytes < _RUN:
                np.copyto(target, source)
        if not large:
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="swansong-capture") as pool:
            # Results are taken, so that an error in a copy is the capture's.
            list(
                pool.map(lambda job: np.copyto(job[0], job[1]), [run for job in large for run in _runs(*job)])
            )


def private_memory(size: int) -> NDArray[np.uint8]:
    """Fresh memory of this process; its pages are taken when they are first touched."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _needed(values: Mapping[str, object]) -> int:
    return sum(_padded(v.nbytes) for v in values.values() if isinstance(v, HostTensor))


def _place(
    tensors: Mapping[str, HostTensor],
    memory: NDArray[np.uint8],
    at: int,
    jobs: list[tuple[NDArray[np.generic], NDArray[np.generic]]],
) -> tuple[dict[str, HostTensor], int]:
    placed = {}
    for name, tensor in tensors.items():
        target = memory[at : at + tensor.nbytes].view(tensor.array.dtype).reshape(tensor.shape)
        jobs.append((target, tensor.array))
        placed[name] = HostTensor(tensor.dtype, target)
        at += _padded(tensor.nbytes)
    return placed, at


def _runs(
    target: NDArray[np.generic], source: NDArray[np.generic]
) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
    if not source.flags.c_contiguous:
        return [(target, source)]
    flat_target, flat_source = target.reshape(-1), source.reshape(-1)
    step = max(1, _RUN // source.itemsize)
    return [(flat_target[i : i + step], flat_source[i : i + step]) for i in range(0, source.size, step)]


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _once(action: Callable[[], None]) -> Callable[[], None]:
    left = [action]

    def run() -> None:
        if left:
            left.pop()()

    return run
