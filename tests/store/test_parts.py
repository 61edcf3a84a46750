"""Several writers, one checkpoint: everything exactly once, or nothing at all."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parts_support import IDS, NAME, WHOLE, T, publish, share, write, write_both
from store_support import (
    KEY,
    FakeClock,
    Watched,
    commit,
    same,
    tree,
)
from swansong.errors import SaveError, SwansongError
from swansong.state.boxes import Box
from swansong.store.checkpoint import Content
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, Staged, await_parts, staged
from swansong.store.series import Series
from swansong.store.verify import verify


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("taken", [True, False], ids=["name taken", "new name"])
def test_parts_make_one_checkpoint_of_the_series(series: Series, key: Any, taken: bool) -> None:
    if taken:
        commit(series, NAME, container="directory")
    with staged(series, NAME) as staging:
        write_both(staging, key)
        saved = publish(staging, key=key, time=FakeClock())
    assert (saved.path, saved.id, saved.seq) == (series.directory / NAME, staging.id, 5)
    with open_checkpoint(saved.path, key=key) as got:
        assert np.array_equal(got.read("w").array, WHOLE)
        assert [got.read(f"own{rank}").array.tolist() for rank in (0, 1)] == [[0, 0], [1, 1]]
        assert got.objects == {"rank": 0}
        manifest = got.manifest
    assert manifest is not None
    assert (manifest.kind, manifest.step, manifest.world_size, manifest.created) == (
        *("fault", 9, 2),
        "1970-01-12T13:46:40.000000Z",
    )
    assert set(manifest.rank_objects) == {"0", "1"}
    assert saved.nbytes == manifest.nbytes
    sealed = ".sealed" if key is not None else ""
    assert set(tree(saved.path)) == {
        "manifest.json",
        *(f"c{rank}-00000-{staging.id[:8]}.safetensors{sealed}" for rank in (0, 1)),
    }
    assert verify(saved.path, key=key).ok
    assert list(series.space.temporary.iterdir()) == []


@st.composite
def splits(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    """A tensor, cut along one or two axes into 2 to 5 boxes, some perhaps without elements."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from([np.uint8, np.float16, np.float64, np.complex128]))
    edges = [[0, size] for size in shape]
    for axis in draw(st.permutations(range(len(shape))))[: draw(st.integers(1, 2))]:
        cuts = draw(st.lists(st.integers(0, shape[axis]), min_size=1, max_size=3))
        edges[axis] = [0, *sorted(cuts), shape[axis]]
    cells = list(itertools.product(*(itertools.pairwise(edge) for edge in edges)))
    assume(2 <= len(cells) <= 5)
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype), draw(st.permutations(boxes))


@settings(max_examples=40, deadline=None)
@given(splits())
def test_any_split_among_writers_comes_back_as_the_whole(split: tuple[np.ndarray, list[Box]]) -> None:
    whole, boxes = split
    directory = Path(tempfile.mkdtemp())
    try:
        series = Series.fresh(directory, "run", Files())
        wanted = [PartId(1, 2, rank) for rank in range(len(boxes))]
        with staged(series, NAME) as staging:
            for part, box in zip(wanted, boxes, strict=True):
                content = Content(tensors={"w": T(whole[box.slices])}, boxes={"w": (whole.shape, box)})
                write(staging, content, part)
            saved = publish(staging, wanted)
        with open_checkpoint(saved.path) as got:
            read = got.read("w")
        assert (read.dtype.name, read.shape) == (whole.dtype.name, whole.shape)
        assert read.array.tobytes() == whole.tobytes()
    finally:
        shutil.rmtree(directory)


def test_aliases_and_what_is_inexact_are_gathered_from_all_parts(series: Series) -> None:
    with staged(series, NAME) as staging:
        for part in IDS:
            more = {"aliases": {f"tied{part.rank}": f"own{part.rank}"}, "inexact": ({"rank": part.rank},)}
            write(staging, share(part.rank, **more), part)
        saved = publish(staging)
    with open_checkpoint(saved.path) as got:
        assert same({"x": got.read("tied1")}, {"x": got.read("own1")})
        assert got.manifest is not None
        assert got.manifest.inexact == [{"rank": 0}, {"rank": 1}]


def test_the_part_that_is_asked_for_wins_over_that_of_a_replaced_writer(series: Series) -> None:
    with staged(series, NAME) as staging:
        write(staging, share(0), IDS[0])
        write(staging, Content(tensors={"w": T(-WHOLE)}), IDS[1])
        second = PartId(0, 1, 1)
        write(staging, share(1), second)
        saved = publish(staging, [IDS[0], second])
    with open_checkpoint(saved.path) as got:
        assert np.array_equal(got.read("w").array, WHOLE)
    assert len(tree(saved.path)) == 3


def test_what_no_part_lists_is_not_in_the_checkpoint(series: Series, files: Watched) -> None:
    stray = ["g7-a0-r3-00000.safetensors", "part-7-0-3.json", "notes"]
    late = "g7-a0-r4-00000.safetensors"

    def come_late(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "rename" and arguments[0] == staging.place:
            (staging.place / late).touch()

    with staged(series, NAME) as staging:
        write_both(staging)
        for name in stray:
            (staging.place / name).touch()
        files.before = come_late
        saved = publish(staging)
    assert len(tree(saved.path)) == 3


def test_a_late_writer_fails_and_hurts_nobody(series: Series) -> None:
    with staged(series, NAME) as staging:
        write_both(staging)
        saved = publish(staging)
        before = tree(saved.path)
        with pytest.raises(SaveError, match="No such file or directory"):
            write(staging, share(1), PartId(0, 1, 1))
    assert tree(saved.path) == before


# -- waiting -----------------------------------------------------------------------------------------------


class Slow:
    """A clock whose `sleep` lets something happen: `then[seconds since the start]`."""

    def __init__(self, then: Mapping[int, Any]) -> None:
        self.clock, self.then = FakeClock(), dict(then)
        self.start = self.clock.now

    def sleep(self, seconds: float) -> None:
        self.clock.now += 1
        self.then.pop(round(self.clock.now - self.start), lambda: None)()


def wait(staging: Staged, slow: Slow, idle_s: float = 5) -> None:
    await_parts(staging, IDS, idle_s=idle_s, sleep=slow.sleep, time=slow.clock)


def test_parts_that_are_there_are_not_waited_for(series: Series) -> None:
    with staged(series, NAME) as staging:
        write_both(staging)
        slow = Slow({})
        wait(staging, slow)
    assert slow.clock.now == slow.start


def test_a_missing_part_is_named_after_the_time_without_progress(series: Series) -> None:
    with staged(series, NAME) as staging:
        write(staging, share(0), IDS[0])
        slow = Slow({})
        with pytest.raises(
            SaveError, match=r"no progress for 5 s while waiting for rank 1 \(generation 0, attempt 0\)$"
        ):
            wait(staging, slow)
    assert slow.clock.now - slow.start == 5


def test_the_deadline_moves_while_files_grow_or_are_written_in_place(series: Series) -> None:
    with staged(series, NAME) as staging:
        data = staging.place / "g0-a0-r1-00000.safetensors"
        files = Files()
        descriptor = files.create(data)

        def preallocate() -> None:
            files.preallocate(descriptor, 1 << 20)

        def write_some(offset: int) -> Any:
            # As the writer does it: the size does not change any more.
            return lambda: files.write(descriptor, np.ones(4096, np.uint8), offset)

        steps = {4: preallocate, 8: write_some(0), 12: write_some(1 << 16), 16: write_some(1 << 17)}
        slow = Slow(steps | {20: lambda: (data.unlink(), write_both(staging))})
        wait(staging, slow)
        files.close(descriptor)
        assert slow.clock.now - slow.start == 20
        publish(staging)


def test_a_shared_directory_that_was_taken_away_ends_the_wait(series: Series) -> None:
    with staged(series, NAME) as staging:
        slow = Slow({2: lambda: shutil.rmtree(staging.place)})
        with pytest.raises(SwansongError, match=r"waiting for rank 0 .*, rank 1"):
            wait(staging, slow)
