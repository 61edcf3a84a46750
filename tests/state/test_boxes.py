"""Boxes in global coordinates, judged by counting elements with NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swansong.errors import ConfigError, NotSupportedError
from swansong.state import boxes
from swansong.state.boxes import Box, coverage


def counted(shape: tuple[int, ...], parts: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, int)
    for part in parts:
        counts[part.slices] += 1
    return counts


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(
        offset, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True))
    )


@st.composite
def cut_up(draw: st.DrawFn, box: Box, cuts: int = 6) -> list[Box]:
    """A box cut apart at random places: each element in exactly one part."""
    parts = [box]
    for _ in range(draw(st.integers(0, cuts)) if box.shape else 0):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(box.shape) - 1))
        at = draw(st.integers(0, part.shape[axis]))
        for start, size in ((0, at), (at, part.shape[axis] - at)):
            offset, shape = list(part.offset), list(part.shape)
            offset[axis] += start
            shape[axis] = size
            parts.append(Box(tuple(offset), tuple(shape)))
    return draw(st.permutations(parts))


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
arrangements = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), cut_up(Box.whole(shape)), st.lists(boxes_in(shape), max_size=2))
)


@pytest.mark.parametrize("cells", [2**22, 6], ids=["counted at once", "halved"])
@settings(max_examples=250, deadline=None)
@given(arrangements, st.integers(0, 2))
def test_coverage_agrees_with_counting_every_element(cells: int, arrangement, dropped: int) -> None:
    shape, parts, more = arrangement
    held = parts[dropped:] + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_CELLS", cells)
        got = coverage(shape, held)
    counts = counted(shape, held)
    assert got.complete == bool((counts == 1).all())
    assert bool(got.missing) == bool((counts == 0).any())
    assert bool(got.overlaps) == bool((counts > 1).any())
    missing = counted(shape, list(got.missing))
    assert not missing[counts > 0].any()
    assert (missing <= 1).all()
    if len(got.missing) < boxes.REPORTED:
        assert (missing[counts == 0] == 1).all()
    for overlap in got.overlaps:
        assert overlap.first < overlap.second
        assert overlap.box == held[overlap.first].overlap(held[overlap.second])
        assert overlap.box.size > 0
    assert len({(overlap.first, overlap.second) for overlap in got.overlaps}) == len(got.overlaps)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape), boxes_in(shape))))
def test_overlap_and_contains_agree_with_counting(case) -> None:
    shape, one, other = case
    both = counted(shape, [one]) * counted(shape, [other])
    shared = one.overlap(other)
    assert shared == other.overlap(one)
    assert np.array_equal(both, counted(shape, [shared] if shared else []))
    if other.size:
        assert one.contains(other) == (shared == other)
    assert not one.contains(other) or one.relative_to(one) == Box((0,) * len(shape), one.shape)


@given(shapes.flatmap(boxes_in), st.integers(1, 8), st.integers(1, 300))
def test_split_pieces_make_the_box_and_keep_to_the_limit(box: Box, itemsize: int, limit: int) -> None:
    pieces = list(box.split(itemsize, limit))
    whole = counted(box.stop, [box])
    assert np.array_equal(counted(box.stop, pieces), whole)
    for piece in pieces:
        assert piece.nbytes(itemsize) <= limit or piece.size == 0 or piece.shape[:1] in ((1,), ())
    if box.size and box.shape:
        sizes = [piece.shape[0] for piece in pieces]
        assert len(set(sizes[:-1])) <= 1
        assert sizes[-1] <= sizes[0]


def test_split_takes_as_many_rows_as_fit() -> None:
    pieces = list(Box((4, 1), (7, 5)).split(4, 3 * 20 + 19))
    assert pieces == [Box((4, 1), (3, 5)), Box((7, 1), (3, 5)), Box((10, 1), (1, 5))]


def test_box_says_what_it_is() -> None:
    box = Box((2, 0), (3, 4))
    assert str(box) == "[2:5, 0:4]"
    assert (box.stop, box.size, box.nbytes(2)) == ((5, 4), 12, 24)
    assert box.relative_to(Box((1, 0), (9, 9))) == Box((1, 0), (3, 4))
    assert str(Box((), ())) == "[]"
    assert (Box((), ()).size, Box.whole((3, 0)).size) == (1, 0)
    assert Box(np.array([1, 2]), np.array([3, 4])) == Box((1, 2), (3, 4))
    assert hash(Box(np.array([1]), [3])) == hash(Box((1,), (3,)))


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        ((0,), ()),
        ((-1,), (2,)),
        ((0,), (-2,)),
        ((1.0,), (2,)),
        (("0",), (2,)),
        (None, (2,)),
        ((2**62,), (2**62,)),
    ],
    ids=["axes", "negative offset", "negative shape", "float", "string", "none", "beyond int64"],
)
def test_impossible_box_is_refused(offset, shape) -> None:
    with pytest.raises(ConfigError, match="box"):
        Box(offset, shape)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Box((0,), (2,)).overlap(Box((0, 0), (2, 2))), "number of axes"),
        (lambda: Box((0,), (2,)).relative_to(Box((1,), (2,))), "does not lie inside"),
        (lambda: list(Box((0,), (2,)).split(4, 0)), "limit 0"),
        (lambda: list(Box((0,), (2,)).split(0, 4)), "itemsize 0"),
        (lambda: coverage((-1,), []), "shape"),
    ],
    ids=["overlap", "relative", "limit", "itemsize", "global shape"],
)
def test_wrong_use_is_refused(act, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        act()


@pytest.mark.parametrize(
    ("shape", "held", "said"),
    [
        ((), {3: Box((), ())}, "held exactly once"),
        ((), {}, "nobody holds [] of the shape []"),
        ((), {3: Box((), ()), 5: Box((), ())}, "3 and 5 both hold [] of the shape []"),
        ((0, 4), {}, "held exactly once"),
        ((0, 4), {1: Box((0, 0), (0, 4)), 2: Box((0, 0), (0, 4))}, "held exactly once"),
        ((0, 4), {1: Box((0, 0), (1, 4))}, "the box of 1 does not lie inside the shape [0, 4]"),
        ((4,), {"a": Box((0,), (4,)), "b": Box((4,), (0,))}, "held exactly once"),
        ((4,), {"a": Box((0, 0), (4, 1))}, "the box of 'a' does not lie inside"),
        ((4,), {0: Box((0,), (2,)), 2: Box((3,), (1,))}, "nobody holds [2:3] of the shape [4]"),
        ((8, 6), {0: Box((0, 0), (4, 6)), 1: Box((3, 2), (5, 4))}, "0 and 1 both hold [3:4, 2:6]"),
    ],
    ids=[
        "scalar", "scalar missing", "scalar twice", "empty without holders", "empty twice", "outside",
        "empty box", "other axes", "hole", "overlap",
    ],
)  # fmt: skip
def test_coverage_says_what_is_wrong(shape, held, said: str) -> None:
    got = coverage(shape, held)
    assert said in got.describe()
    assert got.complete == ("exactly once" in said)


def test_a_dead_ranks_rows_are_missing_as_one_box() -> None:
    held = {rank: Box((10 * rank, 0), (10, 7)) for rank in range(8) if rank != 3}
    assert coverage((80, 7), held).missing == (Box((30, 0), (10, 7)),)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((1_000_000, 8), [Box((10 * i, 0), (10, 8)) for i in range(100_000)]),
        ((948, 1580), [Box((3 * i, 5 * j), (3, 5)) for i in range(316) for j in range(316)]),
        ((300, 40_000), [Box((i, (i + 100 * j) * (j > 0)), (1, 100 + i * (j == 0) - i * (j == 399)))
                         for i in range(100) for j in range(400)]),
    ],
    ids=["rows", "grid", "bricks"],
)  # fmt: skip
def test_many_boxes_are_counted_and_one_lost_is_found(shape, parts: list[Box]) -> None:
    shape = (parts[-1].stop[0], shape[1])
    assert coverage(shape, parts).complete
    lost = parts[len(parts) // 3]
    assert coverage(shape, [part for part in parts if part is not lost]).missing == (lost,)
    doubled = coverage(shape, [*parts, lost])
    assert [(o.first, o.second, o.box) for o in doubled.overlaps] == [(len(parts) // 3, len(parts), lost)]


def test_hopelessly_cut_boxes_end_with_a_problem_found_or_an_error(monkeypatch) -> None:
    diagonal = [Box((i, i, i), (1, 1, 1)) for i in range(2000)]
    monkeypatch.setattr(boxes, "_WORK", 10**6)
    monkeypatch.setattr(boxes, "_CELLS", 2**10)
    assert not coverage((2000, 2000, 2000), diagonal).complete
    whole = [Box((i, j), (1, 1)) for i in range(100) for j in range(100)]
    monkeypatch.setattr(boxes, "_WORK", 1000)
    with pytest.raises(NotSupportedError, match="10000 boxes of 2 axes"):
        coverage((100, 100), whole)
