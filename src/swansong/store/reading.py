"""Reading at the disk's speed: pieces in parallel, each checked by the thread that reads it.

A thread has one buffer of a piece. It reads a piece into it, digests it, decrypts it in place if need be, and
only then copies what stands there to where it belongs: **no byte of a piece reaches a destination before the
whole piece was checked**. So memory is bounded by the buffers, whatever the size of the state. Reading,
digesting, decrypting and copying all release the interpreter lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from swansong.errors import DamagedError
from swansong.store.pieces import PIECE
from swansong.store.source import PieceSource, Source

MAX_THREADS: Final = 3
"""Most threads that read by way of buffers: together these stay below 64 MiB."""

Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of tensor `name` that stand together in `source`, from `offset` on, and where they are to go."""

    name: str
    source: Source
    offset: int
    target: NDArray[np.uint8]
    """1-dim, contiguous."""


@dataclass(slots=True)
class _PieceJob:
    """A piece, and what of it goes where."""

    source: PieceSource
    index: int
    parts: list[tuple[int, str, NDArray[np.uint8]]] = field(default_factory=list)
    """Offset in the piece, tensor, destination."""


def default_threads(most: int = MAX_THREADS) -> int:
    """The cores at hand, at most so many."""
    return max(1, min(most, len(os.sched_getaffinity(0))))


def read_runs(runs: Sequence[Run], *, threads: int | None = None) -> None:
    """Read every run to its destination, each piece once, in the order of files and pieces.

    Of several damaged pieces the first is told. Errors as `Source.read_into`; some destinations are filled
    then. An interrupt ends all threads before it passes.
    """
    jobs = _jobs(runs)
    in_parallel(jobs, _read, threads=threads, buffer=_buffer_size(jobs))
    for run in runs:
        if not in_pieces(run.source):
            with named(run.name):
                run.source.read_into(run.offset, run.target)


def check(sources: Iterable[Source], *, threads: int | None = None) -> None:
    """Read all of every source, and keep nothing. Errors as `read_runs`."""
    given = list(sources)
    jobs = [
        _PieceJob(source, index)
        for source in given
        if isinstance(source, PieceSource) and in_pieces(source)
        for index in range(-(-source.size // source.piece))
    ]
    in_parallel(jobs, _read, threads=threads, buffer=_buffer_size(jobs))
    for source in given:
        if not in_pieces(source):
            for start in range(0, source.size, PIECE):
                source.read_into(start, np.empty(min(PIECE, source.size - start), np.uint8))


@contextmanager
def named(tensor: str) -> Iterator[None]:
    """Damage that is found in here is that of a tensor."""
    try:
        yield
    except DamagedError as error:
        error.tensor = tensor
        raise


def in_pieces(source: Source) -> bool:
    """True if threads can share the reading of it: its pieces are alike, and fit the buffers."""
    return isinstance(source, PieceSource) and 0 < source.piece <= PIECE


def in_parallel(
    jobs: Sequence[Job],
    work: Callable[[Job, NDArray[np.uint8]], None],
    *,
    threads: int | None = None,
    buffer: int = 0,
) -> None:
    """Do every job, the first ones first, in threads with a buffer of that size each.

    No job begins after one has failed. When all threads have ended, the error of the first job among those
    that failed is raised.
    """
    crew = _Crew(enumerate(jobs), work, buffer)
    # Two pieces are read as fast by one thread as it takes to start another.
    workers = min(default_threads() if threads is None else threads, len(jobs) // 2)
    if workers <= 1:
        crew.labour()
    else:
        crew.labour_together(workers)
    if crew.failures:
        error = min(crew.failures, key=itemgetter(0))[1]
        crew.failures.clear()
        try:
            raise error
        finally:
            del error  # its traceback leads here, and to all that is mapped or open


class _Crew(Generic[Job]):
    """Threads that do jobs until there are none, or one of them fails."""

    def __init__(
        self,
        jobs: Iterator[tuple[int, Job]],
        work: Callable[[Job, NDArray[np.uint8]], None],
        buffer: int,
    ) -> None:
        self._jobs, self._work, self._buffer = jobs, work, buffer
        self._stopped, self._at_work, self._changed = False, 0, threading.Condition()
        self.failures: list[tuple[int, BaseException]] = []
        """Number of a job, and how it failed."""

    def labour(self) -> None:
        """Do jobs, in this thread."""
        memory = np.empty(self._buffer, np.uint8)
        while (numbered := self._next()) is not None:
            try:
                self._work(numbered[1], memory)
            except BaseException as error:  # noqa: BLE001 - goes to whoever waits for all of them
                self.failures.append((numbered[0], error))
                self._stopped = True

    def labour_together(self, workers: int) -> None:
        """Do jobs, in so many threads. After an interrupt none of them has a job in hand any more."""
        threads = [
            threading.Thread(target=self._labour_as_one, name=f"swansong-reader-{number}")
            for number in range(workers)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            # One that is starting at this moment cannot be joined; it will find that there is nothing to do.
            with self._changed:
                self._stopped = True
                self._changed.wait_for(lambda: not self._at_work)
            raise

    def _labour_as_one(self) -> None:
        with self._changed:
            if self._stopped:
                return
            self._at_work += 1
        try:
            self.labour()
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def _next(self) -> tuple[int, Job] | None:
        with self._changed:
            return None if self._stopped else next(self._jobs, None)


def _jobs(runs: Iterable[Run]) -> list[_PieceJob]:
    order: dict[int, int] = {}
    jobs: dict[tuple[int, int], _PieceJob] = {}
    for run in runs:
        source, target = run.source, run.target
        if not isinstance(source, PieceSource) or not in_pieces(source):
            continue
        file = order.setdefault(id(source), len(order))
        done = 0
        while done < len(target):
            index, skip = divmod(run.offset + done, source.piece)
            take = min(source.piece - skip, len(target) - done)
            job = jobs.setdefault((file, index), _PieceJob(source, index))
            job.parts.append((skip, run.name, target[done : done + take]))
            done += take
    return [jobs[place] for place in sorted(jobs)]


def _buffer_size(jobs: Sequence[_PieceJob]) -> int:
    # A sealed piece is longer than what is in it; a small file needs no whole buffer.
    return max((min(PIECE, job.source.size + (PIECE - job.source.piece)) for job in jobs), default=0)


def _read(job: _PieceJob, buffer: NDArray[np.uint8]) -> None:
    with named(min(job.parts, key=itemgetter(0))[1]) if job.parts else nullcontext():
        piece = job.source.read_piece(job.index, buffer)
    for skip, _, target in job.parts:
        np.copyto(target, piece[skip : skip + len(target)])
