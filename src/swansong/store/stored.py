"""A tensor of an open checkpoint: where its parts stand, and how they come together again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swansong.state.boxes import Box
from swansong.state.dtypes import DType
from swansong.state.tensors import HostTensor
from swansong.store.pieces import PIECE
from swansong.store.reading import Run, read_runs
from swansong.store.source import Source, TensorEntry, read_tensor

_WORTH_THREADS: Final = 4 * PIECE
"""Bytes from which a tensor by itself is read by several threads."""
_SCATTERED: Final = PIECE
"""Bytes of boxes that are brought together before they are put where they belong, row by row."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One chunk of a tensor."""

    entry: TensorEntry
    source: Source
    box: Box | None
    """Where it belongs; None: it is the whole tensor."""

    def target(self, whole: NDArray[np.generic]) -> NDArray[np.generic]:
        """Where it belongs in the memory of the whole tensor."""
        if self.box is None:
            return whole
        place: Any = (*self.box.slices, ...)  # without the dots, a box without dimensions gives no view
        target: NDArray[np.generic] = whole[place]
        return target

    def runs(self, target: NDArray[np.generic]) -> Iterator[Run]:
        """Its bytes, on their way to `target`, which is contiguous."""
        flat = target.reshape(-1).view(np.uint8)
        done = 0
        for start, stop in self.entry.ranges:
            yield Run(self.entry.name, self.source, start, flat[done : done + stop - start])
            done += stop - start


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an open checkpoint."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> HostTensor:
        """Memory for it."""
        return HostTensor(self.dtype, np.empty(self.shape, self.dtype.carrier))

    def read(self) -> HostTensor:
        """Read it into fresh memory. Errors as `Source.read_into`."""
        if self.nbytes >= _WORTH_THREADS:
            tensor = self.empty()
            fill([(self, tensor.array)])
            return tensor
        if len(self.chunks) == 1 and self.chunks[0].box is None:
            return read_tensor(self.chunks[0].source, self.chunks[0].entry)
        tensor = self.empty()
        for chunk in self.chunks:
            chunk.target(tensor.array)[...] = read_tensor(chunk.source, chunk.entry).array
        return tensor


def fill(wanted: Sequence[tuple[StoredTensor, NDArray[np.generic]]], *, threads: int | None = None) -> None:
    """Read tensors into memory of their carrier type and shape, each piece checked before it is copied.

    Memory is that of the buffers (see `reading`); where rows are not contiguous, it is some more, up to that
    of a chunk. Errors as `reading.read_runs`.
    """
    runs: list[Run] = []
    scattered: list[tuple[Placed, NDArray[np.generic]]] = []
    for stored, whole in wanted:
        for chunk in stored.chunks:
            target = chunk.target(whole)
            if target.flags.c_contiguous:
                runs += chunk.runs(target)
            else:
                scattered.append((chunk, target))
    read_runs(runs, threads=threads)
    for group in _groups(scattered):
        parts = [np.empty(target.shape, target.dtype) for _, target in group]
        read_runs([run for (c, _), part in zip(group, parts, strict=True) for run in c.runs(part)])
        for (_, target), part in zip(group, parts, strict=True):
            target[...] = part


def _groups(
    scattered: Iterable[tuple[Placed, NDArray[np.generic]]],
) -> Iterator[list[tuple[Placed, NDArray[np.generic]]]]:
    group: list[tuple[Placed, NDArray[np.generic]]] = []
    size = 0
    for chunk, target in scattered:
        if group and size + target.nbytes > _SCATTERED:
            yield group
            group, size = [], 0
        group.append((chunk, target))
        size += target.nbytes
    if group:
        yield group
