"""Boxes in global coordinates: which part of a tensor somebody holds, and whether the parts make a whole.

A box is an offset and a shape inside a tensor's global shape, one number per axis. The only element of a
0-dimensional tensor is the box with empty offset and shape; a box with a 0 in its shape has no elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from swansong.errors import ConfigError, NotSupportedError

REPORTED: Final = 8
"""At most so many overlaps and so many missing boxes are named in one Coverage."""

_END: Final = 2**63 - 1
_CELLS: Final = 2**22
_WORK: Final = 2**29

H = TypeVar("H", bound=Hashable)
_Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `offset` (inclusive) to `offset + shape` (exclusive), axis by axis.

    Raises ConfigError unless both have the same length and hold integers >= 0 whose sums fit int64.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            offset, shape = tuple(map(operator.index, self.offset)), tuple(map(operator.index, self.shape))
        except TypeError:
            raise ConfigError(
                f"box: wanted sequences of integers, found offset {self.offset!r}, shape {self.shape!r}"
            ) from None
        if len(offset) != len(shape):
            raise ConfigError(f"box: offset {offset} and shape {shape} differ in their number of axes")
        for start, size in zip(offset, shape, strict=True):
            if start < 0 or size < 0 or start + size > _END:
                raise ConfigError(
                    f"box: offset {offset}, shape {shape}: wanted 0 <= offset, shape, sum < 2^63"
                )
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "shape", shape)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor of that global shape."""
        return cls((0,) * len(shape), tuple(shape))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop, strict=True)) + "]"

    @property
    def stop(self) -> tuple[int, ...]:
        """The first coordinates behind the box, per axis."""
        return tuple(map(operator.add, self.offset, self.shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from an array of the global shape."""
        return tuple(map(slice, self.offset, self.stop))

    def nbytes(self, itemsize: int) -> int:
        """Size in bytes of the elements, each of `itemsize` bytes."""
        return self.size * itemsize

    def contains(self, other: Box) -> bool:
        """True if `other` lies within this box's bounds; an empty one has bounds, too."""
        return len(self.shape) == len(other.shape) and all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        """The elements in both, or None where there are none. ConfigError if the axes differ in number."""
        if len(self.shape) != len(other.shape):
            raise ConfigError(f"boxes {self} and {other} differ in their number of axes")
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.stop, other.stop), offset))
        return None if any(size <= 0 for size in shape) else Box(offset, shape)

    def relative_to(self, outer: Box) -> Box:
        """The same elements in the coordinates of `outer`. ConfigError unless `outer` contains this box."""
        if not outer.contains(self):
            raise ConfigError(f"box {self} does not lie inside {outer}")
        return Box(tuple(map(operator.sub, self.offset, outer.offset)), self.shape)

    def split(self, itemsize: int, limit: int) -> Iterator[Box]:
        """Cut along axis 0 into boxes of at most `limit` bytes, in order; one row is never cut.

        A box without axes or elements comes back whole. ConfigError for a limit or item size below 1.
        """
        if limit < 1 or itemsize < 1:
            raise ConfigError(f"split: limit {limit} and itemsize {itemsize} must be at least 1")
        if self.size == 0 or not self.shape:
            yield self
            return
        rows = max(1, limit // (self.nbytes(itemsize) // self.shape[0]))
        for start in range(0, self.shape[0], rows):
            yield Box(
                (self.offset[0] + start, *self.offset[1:]),
                (min(rows, self.shape[0] - start), *self.shape[1:]),
            )


@dataclass(frozen=True, slots=True)
class Overlap(Generic[H]):
    """Two holders of the same elements."""

    first: H
    second: H
    box: Box


@dataclass(frozen=True, slots=True)
class Coverage(Generic[H]):
    """What boxes make of a tensor: whole, or why not.

    Each list names at most REPORTED cases. All three are empty only if the tensor is whole; where something
    is wrong and the boxes are cut very irregularly, the search may end before it has looked for everything.
    """

    global_shape: tuple[int, ...]
    outside: tuple[H, ...]
    """Holders whose box has other axes than the tensor or leaves it; they count for nothing else."""
    overlaps: tuple[Overlap[H], ...]
    missing: tuple[Box, ...]
    """Disjoint boxes that nobody holds; together, if fewer than REPORTED, all that is missing."""

    @property
    def complete(self) -> bool:
        """True if every element is held exactly once."""
        return not (self.outside or self.overlaps or self.missing)

    def describe(self) -> str:
        """One line for a message: what is wrong first, or that nothing is."""
        shape = list(self.global_shape)
        if self.outside:
            return f"the box of {self.outside[0]!r} does not lie inside the shape {shape}"
        if self.overlaps:
            overlap = self.overlaps[0]
            return f"{overlap.first!r} and {overlap.second!r} both hold {overlap.box} of the shape {shape}"
        if self.missing:
            return f"nobody holds {self.missing[0]} of the shape {shape}"
        return f"every element of the shape {shape} is held exactly once"


def coverage(global_shape: Sequence[int], boxes: Mapping[H, Box] | Sequence[Box]) -> Coverage[Any]:
    """Say whether `boxes` hold every element of a tensor of `global_shape` exactly once.

    Holders are a mapping's keys or a sequence's indices. Time and memory are about linear in the number of
    boxes where they form a grid. NotSupportedError where boxes are cut so irregularly that some 2^29 steps
    have found nothing wrong and not seen everything; ConfigError for an impossible shape.
    """
    whole = Box.whole(global_shape)
    pairs = boxes.items() if isinstance(boxes, Mapping) else enumerate(boxes)
    outside, held = [], []
    for holder, box in pairs:
        if not whole.contains(box):
            outside.append(holder)
        elif 0 not in box.shape:
            held.append((holder, box))
    search = _Search(held, len(whole.shape))
    if whole.size:
        search.run(whole)
    return Coverage(
        whole.shape, tuple(outside[:REPORTED]), tuple(search.overlaps.values()), tuple(search.missing)
    )


@dataclass(slots=True)
class _Search:
    """Counts holders per cell, a cell being what no box's edge cuts.

    Where the edges give too many cells for one array, the region is halved at an edge and each half sees
    only the boxes that reach into it.
    """

    held: list[tuple[Any, Box]]
    rank: int
    overlaps: dict[tuple[int, int], Overlap[Any]] = field(default_factory=dict)
    missing: list[Box] = field(default_factory=list)
    work: int = 0

    def run(self, whole: Box) -> None:
        count = len(self.held)
        starts = np.array([box.offset for _, box in self.held], np.int64).reshape(count, self.rank)
        stops = starts + np.array([box.shape for _, box in self.held], np.int64).reshape(count, self.rank)
        todo = [(np.array(whole.offset, np.int64), np.array(whole.stop, np.int64), np.arange(count))]
        while todo and not (len(self.overlaps) == len(self.missing) == REPORTED):
            low, high, members = todo.pop()
            if not len(members):
                self._miss(low, high)
                continue
            region = _Region(
                members, np.maximum(starts[members], low), np.minimum(stops[members], high), low, high
            )
            self.work += region.cost
            if self.work > _WORK:
                self._give_up()
                return
            if region.small:
                self._examine(region)
                continue
            axis, at = region.middle()
            lower, upper = high.copy(), low.copy()
            lower[axis] = upper[axis] = at
            todo.append((upper, high, members[region.stops[:, axis] > at]))
            todo.append((low, lower, members[region.starts[:, axis] < at]))

    def _give_up(self) -> None:
        if not (self.missing or self.overlaps):
            raise NotSupportedError(
                f"{len(self.held)} boxes of {self.rank} axes cut their tensor into too many pieces to be "
                "checked; wanted boxes that form a grid, or nearly so"
            )

    def _examine(self, region: _Region) -> None:
        cells = region.cells()
        counts = cells.counts()
        if (counts == 1).all():
            return
        free = np.asarray(counts == 0)
        while len(self.missing) < REPORTED and free.any():
            first, last = _grow(free)
            free[tuple(map(slice, first, last))] = False
            self._miss(*region.bounds(first, last))
        crowded = np.asarray(counts > 1)
        while len(self.overlaps) < REPORTED and crowded.any():
            here = cells.at(_first_cell(crowded))
            for one, other in combinations(here, 2):
                self._overlap(int(region.members[one]), int(region.members[other]))
            # Clearing all that the first two share leaves the next round a pair not yet seen in this region.
            crowded[cells.shared(here[0], here[1])] = False

    def _miss(self, low: _Ints, high: _Ints) -> None:
        if len(self.missing) < REPORTED:
            self.missing.append(Box(tuple(low.tolist()), tuple((high - low).tolist())))

    def _overlap(self, one: int, other: int) -> None:
        (first, box), (second, other_box) = self.held[one], self.held[other]
        shared = box.overlap(other_box)
        if shared is not None and len(self.overlaps) < REPORTED:
            self.overlaps[one, other] = Overlap(first, second, shared)


class _Region:
    """Part of a tensor and the boxes in it, clipped to it, with the edges that they have along each axis."""

    def __init__(self, members: _Ints, starts: _Ints, stops: _Ints, low: _Ints, high: _Ints) -> None:
        self.members, self.starts, self.stops, self.low, self.high = members, starts, stops, low, high
        edges = [
            np.unique(np.concatenate(([low[axis], high[axis]], starts[:, axis], stops[:, axis])))
            for axis in range(len(low))
        ]
        self.axes = [axis for axis, cuts in enumerate(edges) if len(cuts) > 2]  # the others need no counting
        self.edges = [edges[axis] for axis in self.axes]
        cells = math.prod(len(cuts) - 1 for cuts in self.edges)
        corners = len(members) << len(self.axes)
        self.small = max(cells, corners) <= _CELLS or not self.axes
        self.cost = len(members) * (len(low) + 1)
        if self.small:
            self.cost += (cells + corners) * (len(self.axes) + 1)

    def middle(self) -> tuple[int, int]:
        """The axis with the most edges, and the edge in their middle."""
        index = max(range(len(self.axes)), key=lambda i: len(self.edges[i]))
        return self.axes[index], int(self.edges[index][len(self.edges[index]) // 2])

    def cells(self) -> _Cells:
        """The same boxes in numbers of cells."""
        numbered = list(zip(self.axes, self.edges, strict=True))
        first = [np.searchsorted(cuts, self.starts[:, axis]) for axis, cuts in numbered]
        last = [np.searchsorted(cuts, self.stops[:, axis]) for axis, cuts in numbered]
        size = (len(numbered), len(self.members))
        return _Cells(
            tuple(len(cuts) - 1 for cuts in self.edges),
            np.array(first, np.int64).reshape(size),
            np.array(last, np.int64).reshape(size),
        )

    def bounds(self, first: Sequence[int], last: Sequence[int]) -> tuple[_Ints, _Ints]:
        """Global coordinates of a run of cells."""
        low, high = self.low.copy(), self.high.copy()
        for axis, cuts, start, stop in zip(self.axes, self.edges, first, last, strict=True):
            low[axis], high[axis] = cuts[start], cuts[stop]
        return low, high


@dataclass(frozen=True, slots=True)
class _Cells:
    """Boxes as runs of cells: box b fills first[axis, b] to last[axis, b] (exclusive) along each axis."""

    shape: tuple[int, ...]
    first: _Ints
    last: _Ints

    def counts(self) -> NDArray[np.int32]:
        """Boxes per cell: +1 or -1 at each box's corners, summed up along every axis."""
        if not self.shape:
            return np.array(self.first.shape[1], np.int32)
        change = np.zeros([size + 1 for size in self.shape], np.int32)
        for corner in product((False, True), repeat=len(self.shape)):
            ends = tuple(self.last[i] if far else self.first[i] for i, far in enumerate(corner))
            np.add.at(change, ends, -1 if sum(corner) % 2 else 1)
        for axis in range(change.ndim):
            np.cumsum(change, axis=axis, out=change)
        return change[(slice(-1),) * change.ndim]

    def at(self, cell: Sequence[int]) -> list[int]:
        """The boxes that fill a cell, the first REPORTED of them."""
        where = np.array(cell, np.int64).reshape(-1, 1)
        inside = np.all((self.first <= where) & (where < self.last), axis=0)
        return [int(i) for i in np.flatnonzero(inside)[:REPORTED]]

    def shared(self, one: int, other: int) -> tuple[slice, ...]:
        """The index of the cells that two boxes both fill."""
        first = np.maximum(self.first[:, one], self.first[:, other])
        last = np.minimum(self.last[:, one], self.last[:, other])
        return tuple(map(slice, first, last))


def _first_cell(mask: NDArray[np.bool_]) -> list[int]:
    return [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]


def _grow(free: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """A box of cells that are all free, from the first such cell on, grown along the last axis first."""
    first = _first_cell(free)
    last = [i + 1 for i in first]
    for axis in reversed(range(free.ndim)):
        last[axis] = free.shape[axis]
        window = free[tuple(map(slice, first, last))]
        line = np.atleast_1d(window.all(axis=tuple(i for i in range(free.ndim) if i != axis)))
        if not line.all():
            last[axis] = first[axis] + int(line.argmin())
    return first, last
