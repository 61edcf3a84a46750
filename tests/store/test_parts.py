"""Several writers, one checkpoint: everything exactly once, or nothing at all."""

from __future__ import annotations

import errno
import itertools
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from store_support import (
    KEY,
    OTHER_KEY,
    FakeClock,
    Watched,
    buffered,
    commit,
    flip,
    same,
    tree,
    visible,
)
from swansong.errors import ConfigError, DiskFullError, SaveError, SwansongError, UnrepresentableError
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import naming
from swansong.store.catalog import find
from swansong.store.checkpoint import Content, Point, Saved
from swansong.store.files import Files
from swansong.store.manifest import decode_part, encode
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, Staged, await_parts, commit_parts, staged, write_part
from swansong.store.series import Series
from swansong.store.verify import verify

T = HostTensor.of
NAME = "run-1_1"
WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)
IDS = [PartId(0, 0, 0), PartId(0, 0, 1)]


def share(rank: int, box: Box | None = None, **more: Any) -> Content:
    """Half of WHOLE (or `box` of it) and a tensor of one's own."""
    box = box or Box((3 * rank, 0), (3, 4))
    return Content(
        tensors={"w": T(WHOLE[box.slices]), f"own{rank}": T(np.full(2, rank, np.int64))},
        boxes={"w": (WHOLE.shape, box)},
        objects={"rank": rank},
        **more,
    )


def write(staging: Staged, content: Content, part: PartId, key: Any = None) -> None:
    write_part(staging.place, staging.id, buffered(Files()), content, part, key=key)


def write_both(staging: Staged, key: Any = None) -> None:
    for part in IDS:
        write(staging, share(part.rank), part, key)


def publish(staging: Staged, wanted: list[PartId] = IDS, **how: Any) -> Saved:
    return commit_parts(staging, wanted, Point(step=9, world_size=2), kind="fault", seq=5, **how)


def record_of(staging: Staged, part: PartId) -> Path:
    return staging.place / naming.part(*part)


def data_of(staging: Staged, part: PartId) -> Path:
    return staging.place / naming.staged_data_file(*part, 0, sealed=False)


def rewrite(staging: Staged, part: PartId, **fields: Any) -> None:
    """Change fields of a part, with a tail that fits."""
    path = record_of(staging, part)
    path.write_bytes(encode(msgspec.structs.replace(decode_part(path.read_bytes(), "p"), **fields), None))


# -- what comes out ----------------------------------------------------------------------------------------


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


# -- what is refused ---------------------------------------------------------------------------------------


def _missing(staging: Staged) -> None:
    record_of(staging, IDS[1]).unlink()


def _flipped(staging: Staged) -> None:
    flip(record_of(staging, IDS[1]))


def _cut(staging: Staged) -> None:
    data = data_of(staging, IDS[1])
    data.chmod(0o600)
    data.write_bytes(data.read_bytes()[:-1])


def _data_missing(staging: Staged) -> None:
    data_of(staging, IDS[1]).unlink()


def _of_another(staging: Staged) -> None:
    rewrite(staging, IDS[1], id="f" * 32)


def _of_another_rank(staging: Staged) -> None:
    rewrite(staging, IDS[1], rank=0)


def _anothers_file(staging: Staged) -> None:
    first = decode_part(record_of(staging, IDS[0]).read_bytes(), "p")
    rewrite(staging, IDS[1], files=first.files)


def _other_boxes(*boxes: Box) -> Any:
    def change(staging: Staged) -> None:
        for part, box in zip(IDS, boxes, strict=True):
            for path in (record_of(staging, part), data_of(staging, part)):
                path.unlink()
            write(staging, share(part.rank, box), part)

    return change


def _other_tensor(array: np.ndarray) -> Any:
    def change(staging: Staged) -> None:
        record_of(staging, IDS[1]).unlink()
        data_of(staging, IDS[1]).unlink()
        write(staging, Content(tensors={"w": T(array)}), IDS[1])

    return change


def _sealed(staging: Staged) -> None:
    shutil.rmtree(staging.place)
    staging.place.mkdir()
    write_both(staging, KEY)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_missing, "the part of rank 1: .*No such file"),
        (_flipped, "the part of rank 1: .*the manifest's own digest"),
        (_cut, r"rank 1: g0-a0-r1-00000\.safetensors has [\d,]+ bytes, its part says"),
        (_data_missing, "rank 1: .*No such file"),
        (_of_another, r"rank 1: part-0-0-1\.json is a part of something else"),
        (_of_another_rank, r"rank 1: part-0-0-1\.json is a part of something else"),
        (_anothers_file, r"rank 1: its part lists 'g0-a0-r0-00000\.safetensors', which is not its own"),
        (_other_boxes(Box((0, 0), (3, 4)), Box((4, 0), (2, 4))), r"'w': nobody holds \[3:4, 0:4\]"),
        (_other_boxes(Box((0, 0), (4, 4)), Box((3, 0), (3, 4))), r"'w': 0 and 1 both hold \[3:4, 0:4\]"),
        (_other_boxes(Box((0, 0), (3, 4)), Box((3, 0), (3, 3))), r"'w': nobody holds \[3:6, 3:4\]"),
        (_other_tensor(WHOLE.astype(np.float64)), r"'w' is float64 \[6, 4\] on rank 1, but float32 \[6, 4\]"),
        (_other_tensor(WHOLE[:5]), r"'w' is float32 \[5, 4\] on rank 1, but float32 \[6, 4\]"),
        (_other_tensor(WHOLE), "'w': 0 and 1 both hold"),
        (_sealed, "its part is encrypted; the committer needs the key"),
    ],
    ids=[
        *("missing", "bit flipped", "data cut", "data missing", "of another checkpoint", "of another rank"),
        *("another's file", "hole", "overlap", "corner", "type", "shape", "twice whole", "sealed, no key"),
    ],
)
@pytest.mark.parametrize("taken", [True, False], ids=["name taken", "new name"])
def test_parts_that_do_not_make_a_whole_make_nothing(
    series: Series, spoil: Any, message: str, taken: bool
) -> None:
    if taken:
        commit(series, NAME, container="directory")
    before = tree(series.directory)
    with staged(series, NAME) as staging:
        write_both(staging)
        spoil(staging)
        with pytest.raises(SaveError, match=f"{NAME}: not saved: .*{message}") as caught:
            publish(staging)
    assert caught.value.path == str(series.directory / NAME)
    assert tree(series.directory) == before


@pytest.mark.parametrize(
    ("wrote", "commits", "message"),
    [(None, KEY, "nothing proves who wrote it"), (KEY, OTHER_KEY, "another key than the one given")],
    ids=["not sealed", "another key"],
)
def test_parts_that_the_committers_key_does_not_open_make_nothing(
    series: Series, wrote: Any, commits: Any, message: str
) -> None:
    with staged(series, NAME) as staging:
        write_both(staging, wrote)
        with pytest.raises(SaveError, match=message):
            publish(staging, key=commits)
    assert visible(series.directory) == set()


@pytest.mark.parametrize("wanted", [[], [PartId(0, 0, 0), PartId(0, 1, 0)]], ids=["none", "two of one rank"])
def test_there_is_one_part_of_each_rank(series: Series, wanted: list[PartId]) -> None:
    with staged(series, NAME) as staging:
        write_both(staging)
        with pytest.raises(SaveError, match="wanted one part of each rank"):
            publish(staging, wanted)
    assert visible(series.directory) == set()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (share(0, rest={"m": T(np.ones(2))}), "neither `rest` nor `append_info`"),
        (share(0, append_info={"n": 1}), "neither `rest` nor `append_info`"),
        (Content(tensors={"w": T(WHOLE)}, boxes={"w": ((12, 4), Box((0, 0), (3, 4)))}), "cannot fill"),
        (Content(tensors={}, objects={"f": print}), "objects|print|builtin"),
    ],
    ids=["rest", "append_info", "box of another shape", "object"],
)
def test_what_a_part_cannot_hold_is_refused_by_its_writer(
    series: Series, content: Content, message: str
) -> None:
    with staged(series, NAME) as staging:
        with pytest.raises(UnrepresentableError, match=message):
            write(staging, content, IDS[0])
        assert not record_of(staging, IDS[0]).exists()


def test_a_part_is_written_once(series: Series) -> None:
    with staged(series, NAME) as staging:
        write(staging, share(0), IDS[0])
        before = tree(staging.place)
        with pytest.raises(SaveError, match="File exists"):
            write(staging, share(1), IDS[0])
        assert tree(staging.place) == before


@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_directory"])
def test_a_part_whose_writer_failed_is_not_there_or_not_relied_on(series: Series, call: str) -> None:
    files = Watched()
    files.fail(call, OSError(errno.ENOSPC, "No space left on device"))
    with staged(series, NAME) as staging:
        with pytest.raises(DiskFullError):
            write_part(staging.place, staging.id, buffered(files), share(0), IDS[0])
        assert record_of(staging, IDS[0]).exists() == (call == "sync_directory")


@pytest.mark.parametrize("call", ["lock", "make_directory"])
def test_a_shared_directory_that_cannot_be_opened_is_a_save_error(
    series: Series, files: Watched, call: str
) -> None:
    files.fail(call, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DiskFullError, match=NAME), staged(series, NAME):
        pass


def test_a_name_that_cannot_be_one_is_refused(series: Series) -> None:
    with pytest.raises(ConfigError), staged(series, "a/b"):
        pass


@pytest.mark.parametrize("taken", [True, False], ids=["name taken", "new name"])
def test_a_commit_that_fails_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, taken: bool
) -> None:
    def run(number: int) -> tuple[int, bool]:
        """Fail at the call of that number; return how many there were, and whether it was committed."""
        files = Watched()
        series = Series.fresh(tmp_path / f"{number}", "run", files)
        if taken:
            commit(series, NAME, container="directory")
        before = tree(series.directory)

        def fail(call: str, arguments: tuple[Any, ...]) -> None:
            if len(files.calls) == number + 1:
                raise OSError(errno.EIO, "Input/output error")

        with staged(series, NAME) as staging:
            write_both(staging)
            files.calls.clear()
            files.before = fail
            with suppress(SaveError):
                publish(staging)
            count = len(files.calls)
        new = (series.directory / NAME / "manifest.json").exists() and find(series.directory / NAME).manifest
        committed = bool(new) and new.seq == 5
        assert verify(series.directory / NAME).ok if committed else tree(series.directory) == before, number
        return count, committed

    whole, committed = run(1000)
    assert committed
    outcomes = [run(number)[1] for number in range(whole)]
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]
    assert whole > 8


def test_the_block_removes_what_was_not_committed(series: Series) -> None:
    with staged(series, NAME) as staging:
        write_both(staging)
        place = staging.place
        assert series.space.in_progress(NAME, staging.id[:8])
    assert not place.exists()
    assert list(series.space.temporary.iterdir()) == []
    assert visible(series.directory) == set()


def test_a_sweeper_leaves_a_shared_directory_alone_while_its_committer_lives(series: Series) -> None:
    with staged(series, NAME) as staging:
        write_both(staging)
        Series.fresh(series.directory, "run", Files()).sweep()
        saved = publish(staging)
    assert verify(saved.path).ok


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
