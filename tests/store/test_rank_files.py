"""Parts in MindSpore's container: one .ckpt of a rank, in a directory of that rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parts_support import IDS, WHOLE, T, share
from store_support import buffered
from swansong.errors import (
    DamagedError,
    KeyNeededError,
    MalformedError,
    SaveError,
    UnrepresentableError,
)
from swansong.state.dtypes import DTYPES
from swansong.store import catalog, naming
from swansong.store.checkpoint import Content, Point, Saved
from swansong.store.ckpt import CkptReader
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, commit_parts, read_parts, staged, write_part
from swansong.store.series import Series
from swansong.store.source import PlainFile, open_regular
from swansong.store.sweeping import sweep_directory
from swansong.store.verify import verify

NAME = "ttp_saved_checkpoints-2_1"
KEY = Key(bytes(range(32)))
PART = PartId(0, 1, 3)
FILE = "rank_3/iteration-2_1.ckpt"


def whole(rank: int = 3, **more) -> Content:
    return Content(
        tensors={f"w{rank}": T(WHOLE), f"b{rank}": T(np.full(2, rank, np.int64))},
        components={f"c{rank}": [f"w{rank}", f"b{rank}"]},
        append_info={"cur_rank": rank, "ratio": 0.1},
        **more,
    )


def save(series: Series, *parts: PartId, name: str = NAME, key: Key | None = None, mode="AES-GCM") -> Saved:
    with staged(series, name) as staging:
        for part in parts or (PART,):
            write_part(
                staging.place,
                staging.id,
                buffered(Files()),
                whole(part.rank),
                part,
                key=key,
                container="ckpt",
                mode=mode,
            )
        return commit_parts(
            staging,
            read_parts(staging, dict.fromkeys(parts or (PART,)), key=key),
            Point(step=7, epoch=2, step_in_epoch=1),
            kind="fault",
            seq=series.draw(),
            key=key,
            names=lambda rank, number, _: naming.rank_file(rank, number, 2, 1),
        )


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return Series.fresh(tmp_path / "faults", "net", Files())


def test_it_stands_under_the_names_that_users_of_mindspore_know(series):
    saved = save(series)
    there = {str(path.relative_to(saved.path)) for path in saved.path.rglob("*") if path.is_file()}
    assert there == {"manifest.json", FILE}
    (found,) = series.found()
    assert [found.path, found.manifest.container, found.nbytes] == [saved.path, "directory", saved.nbytes]
    assert verify(saved.path).ok
    assert verify(saved.path / FILE).ok
    assert choose([series.directory], "net").newest.path == saved.path


def test_the_file_by_itself_is_a_plain_ckpt_with_what_was_appended(series):
    saved = save(series)
    descriptor = open_regular(saved.path / FILE)
    entries = CkptReader(PlainFile(descriptor, "x")).entries
    assert {name: entry.dtype for name, entry in entries.items()} == {
        "w3": DTYPES["float32"],
        "b3": DTYPES["int64"],
        "cur_rank": DTYPES["int64"],
        "ratio": DTYPES["float32"],
    }
    with open_checkpoint(saved.path) as checkpoint:
        assert checkpoint.append_info == {"cur_rank": 3, "ratio": 0.1}


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_with_a_key_it_is_encrypted_and_authenticated(series, mode):
    saved = save(series, key=KEY, mode=mode)
    with open_checkpoint(saved.path, key=KEY) as checkpoint:
        assert np.array_equal(checkpoint.read("w3").array, WHOLE)
        assert checkpoint.manifest.files[0].scheme == f"mindspore-{mode}"
    with pytest.raises(KeyNeededError):
        open_checkpoint(saved.path)
    with open_checkpoint(saved.path / FILE, key=KEY) as one:
        assert np.array_equal(one.read("w3").array, WHOLE)


def test_one_rank_s_file_opens_by_itself_though_another_s_is_missing(series):
    saved = save(series, PartId(0, 1, 0), PartId(0, 1, 3))
    (saved.path / "rank_0/iteration-2_1.ckpt").unlink()
    with open_checkpoint(saved.path / FILE) as one:
        assert list(one.entries) == ["w3", "b3"]
        assert np.array_equal(one.read("w3").array, WHOLE)
    with pytest.raises(MalformedError, match="rank_0"):
        open_checkpoint(saved.path)


def test_a_flipped_bit_of_it_is_found_by_the_directory_s_manifest(series):
    saved = save(series)
    path = saved.path / FILE
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert not verify(saved.path).ok
    assert [problem.file for problem in verify(path).problems] == [str(path)]
    with open_checkpoint(path) as one, pytest.raises(DamagedError, match="digest"):
        one.read_all()


def test_a_file_that_the_manifest_does_not_list_is_opened_as_a_stranger(series):
    saved = save(series)
    (saved.path / "rank_4").mkdir()
    stranger = saved.path / "rank_4/iteration-2_1.ckpt"
    stranger.write_bytes((saved.path / FILE).read_bytes())
    with open_checkpoint(stranger) as one:
        assert one.manifest is None


def test_a_rank_that_wrote_two_parts_has_two_files(series):
    with staged(series, NAME) as staging:
        parts = [PartId(0, attempt, 3) for attempt in (1, 2)]
        for part, rank in zip(parts, (3, 4), strict=True):
            write_part(staging.place, staging.id, buffered(Files()), whole(rank), part, container="ckpt")
        saved = commit_parts(
            staging,
            read_parts(staging, {parts[0]: {"c3"}, parts[1]: {"c4"}}),
            Point(step=7),
            kind="fault",
            seq=1,
            names=lambda rank, number, _: naming.rank_file(rank, number, 2, 1),
        )
    assert sorted(path.name for path in (saved.path / "rank_3").iterdir()) == [
        "iteration-2_1.ckpt",
        "iteration-2_1_1.ckpt",
    ]
    assert verify(saved.path).ok


def test_different_tensors_of_one_name_keep_apart_by_their_ranks(series):
    with staged(series, NAME) as staging:
        parts = [PartId(0, 1, rank) for rank in (0, 1)]
        for part in parts:
            content = Content(
                tensors={"w": T(WHOLE + part.rank)},
                components={f"c{part.rank}": ["w"]},
                scope=f"{naming.rank_directory(part.rank)}/",
            )
            write_part(staging.place, staging.id, buffered(Files()), content, part, container="ckpt")
        saved = commit_parts(
            staging,
            read_parts(staging, {part: {f"c{part.rank}"} for part in parts}),
            Point(step=7),
            kind="fault",
            seq=1,
            names=lambda rank, number, _: naming.rank_file(rank, number, 2, 1),
        )
    with open_checkpoint(saved.path) as both:
        assert sorted(both.entries) == ["rank_0/w", "rank_1/w"]
    for rank in (0, 1):
        with open_checkpoint(saved.path / f"rank_{rank}/iteration-2_1.ckpt") as one:
            assert np.array_equal(one.read("w").array, WHOLE + rank)


def test_such_a_checkpoint_is_never_replaced(series):
    before = save(series)
    with pytest.raises(SaveError, match="there is a checkpoint of this name"):
        save(series)
    assert verify(before.path).ok
    assert series.space.unfinished() == []


def test_a_sweep_leaves_it_whole(series):
    saved = save(series)
    sweep_directory(series.space, saved.path)
    series.sweep()
    assert verify(saved.path).ok


@pytest.mark.parametrize("left", ["rank_3", "manifest.json"], ids=["no manifest", "no file"])
def test_what_is_left_of_one_is_damaged_and_named(series, left):
    saved = save(series)
    other = saved.path / ("manifest.json" if left == "rank_3" else FILE)
    other.unlink()
    (found,) = catalog.scan(series.directory)
    assert [found.name, found.state] == [NAME, "damaged"]
    choice = choose([series.directory], "net")
    assert choice.newest is None
    assert [passed.name for passed, _ in choice.passed_over] == [NAME]


@pytest.mark.parametrize(
    "content",
    [share(0), whole(rest={"r": T(WHOLE)})],
    ids=["a box", "a rest"],
)
def test_what_no_ckpt_of_a_part_can_hold_is_refused(series, content):
    with staged(series, NAME) as staging, pytest.raises(UnrepresentableError):
        write_part(staging.place, staging.id, buffered(Files()), content, IDS[0], container="ckpt")


def test_names_are_spelled_and_parsed():
    assert naming.fault_name(2, 1) == NAME
    assert naming.fault_name(2, 1, 3) == f"{NAME}_3"
    assert all(map(naming.is_fault_name, (NAME, f"{NAME}_3")))
    assert not any(map(naming.is_fault_name, ("ttp_saved_checkpoints", f"{NAME}_tmp", "net-2_1")))
    assert naming.rank_file(3, 0, 2, 1) == FILE
    assert naming.is_rank_directory("rank_3")
    assert not any(map(naming.is_rank_directory, ("rank_", "rank_3x", "rank_\u0663")))
    assert naming.is_staged(naming.staged_ckpt(*PART))
