"""Parts that do not make a whole make nothing, and say why."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from parts_support import IDS, NAME, WHOLE, T, data_of, publish, record_of, rewrite, share, write, write_both
from store_support import (
    KEY,
    OTHER_KEY,
    Watched,
    buffered,
    commit,
    flip,
    tree,
    visible,
)
from swansong.errors import ConfigError, DiskFullError, SaveError, UnrepresentableError
from swansong.state.boxes import Box
from swansong.store.catalog import find
from swansong.store.checkpoint import Content
from swansong.store.files import Files
from swansong.store.manifest import decode_part
from swansong.store.parts import Staged, staged, write_part
from swansong.store.series import Series
from swansong.store.verify import verify


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


def _elsewhere(staging: Staged) -> None:
    tensors = decode_part(record_of(staging, IDS[1]).read_bytes(), "p").tensors
    tensors["w"] = replace(tensors["w"], chunks=[replace(tensors["w"].chunks[0], file=7)])
    rewrite(staging, IDS[1], tensors=tensors)


def _not_held(staging: Staged) -> None:
    rewrite(staging, IDS[1], components={"X": ["w", "moment"]})


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
        (_elsewhere, r"rank 1: its part places tensors in files that it does not list: \[7\]"),
        (_not_held, "rank 1: its part counts 'moment' to a component, but does not hold it"),
        (_sealed, "its part is encrypted; the committer needs the key"),
    ],
    ids=[
        *("missing", "bit flipped", "data cut", "data missing", "of another checkpoint", "of another rank"),
        *("another's file", "hole", "overlap", "corner", "type", "shape", "twice whole", "file unknown"),
        *("component without tensor", "sealed, no key"),
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


def test_no_parts_make_nothing(series: Series) -> None:
    with staged(series, NAME) as staging:
        write_both(staging)
        with pytest.raises(SaveError, match="no parts were wanted"):
            publish(staging, [])
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
        assert not data_of(staging, IDS[0]).exists(), "others may need the room"


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
