"""Which checkpoints of a series stay: by real commits in real directories, beside whatever else is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store_support import (
    CONTAINERS,
    FakeClock,
    Watched,
    commit,
    flip,
    named,
    overwrite,
    tensors,
    tree,
    visible,
)
from swansong.policy.keep import KeepAll, KeepLast, KeepPerMinutes
from swansong.store.catalog import find, scan, sidecars
from swansong.store.checkpoint import Saved
from swansong.store.opening import open_checkpoint
from swansong.store.series import Series


def again(series: Series, name: str = "run") -> Series:
    """A run that begins afresh in the same directory."""
    return Series.fresh(series.directory, name, Watched())


def resumed(series: Series, name: str) -> Series:
    """A run that continues from checkpoint `name`."""
    return Series.resumed(find(series.directory / name), Watched())


def commit_and_prune(series: Series, name: str, keep: Any, **how: Any) -> list[str]:
    saved = commit(series, name, container="ckpt", **how)
    return [path.name for path in series.prune(keep, saved.id)]


def control(series: Series) -> set[str]:
    return {path.name for path in series.space.control.iterdir() if path.suffix != ".lock"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_last_ones_stay_and_everything_of_the_others_goes(series: Series, container: str) -> None:
    rest = {} if container == "directory" else {"rest": tensors(moment=(5,))}
    for number in range(1, 6):
        saved = commit(series, named(container, number), container=container, **rest)
        series.prune(KeepLast(2), saved.id)
        assert len(visible(series.directory)) == min(number, 2)
    assert visible(series.directory) == {named(container, n) for n in (4, 5)}
    series.sweep()
    beside = 0 if container == "directory" else 2 * 2
    assert len(control(series)) == beside + 1
    assert list(series.space.temporary.iterdir()) == []


def test_pruning_tells_what_it_removed(series: Series) -> None:
    assert commit_and_prune(series, named("ckpt", 1), KeepLast(1)) == []
    assert commit_and_prune(series, named("ckpt", 2), KeepLast(1)) == [named("ckpt", 1)]


def test_a_fresh_run_leaves_the_earlier_runs_alone_and_a_resumed_one_thins_them_out(series: Series) -> None:
    for number in (1, 2, 3):
        commit_and_prune(series, named("ckpt", number), KeepLast(3))
    second = again(series)
    assert commit_and_prune(second, named("ckpt", 1, "run_1"), KeepLast(1)) == []
    back = resumed(series, named("ckpt", 2))
    assert commit_and_prune(back, named("ckpt", 9), KeepLast(2)) == [named("ckpt", 1), named("ckpt", 2)]
    assert visible(series.directory) == {named("ckpt", 3), named("ckpt", 9), named("ckpt", 1, "run_1")}


def test_after_going_back_the_stale_later_step_is_what_goes(series: Series) -> None:
    for step in (50, 100):
        commit(series, named("ckpt", step), container="ckpt", step=step)
    back = resumed(series, named("ckpt", 50))
    commit_and_prune(back, named("ckpt", 60), KeepLast(2), step=60)
    assert visible(series.directory) == {named("ckpt", 100), named("ckpt", 60)}
    commit_and_prune(back, named("ckpt", 70), KeepLast(2), step=70)
    assert visible(series.directory) == {named("ckpt", 60), named("ckpt", 70)}


def test_by_time_the_manifests_clock_decides(series: Series) -> None:
    clock = FakeClock()
    for number in range(1, 8):
        commit_and_prune(series, named("ckpt", number), KeepPerMinutes(1), time=clock)
        clock.now += 20
    assert visible(series.directory) == {named("ckpt", n) for n in (1, 3, 5, 7)}


def test_a_faults_checkpoint_stays_until_runs_from_it_have_their_own(series: Series) -> None:
    commit_and_prune(series, named("ckpt", 1), KeepLast(1))
    commit_and_prune(series, named("ckpt", 2), KeepLast(1), kind="fault")
    assert visible(series.directory) == {named("ckpt", 1), named("ckpt", 2)}
    child = resumed(series, named("ckpt", 2))
    assert set(commit_and_prune(child, named("ckpt", 3), KeepLast(1))) == {named("ckpt", 1), named("ckpt", 2)}


def test_a_series_touches_neither_another_of_a_longer_name_nor_a_persons_files(series: Series) -> None:
    other = again(series, "run-1")
    for number in (1, 2):
        commit(other, f"run-1-{number}_1.ckpt", container="ckpt")
    mine = series.directory / "run-2023.ckpt"
    mine.write_bytes(b"mine")
    before = tree(series.directory)
    for number in (1, 2, 3):
        commit_and_prune(series, named("ckpt", number), KeepLast(1))
    series.sweep()
    after = tree(series.directory)
    assert {name: after[name] for name in before if name != ".swansong/run.lock"} == {
        name: data for name, data in before.items() if name != ".swansong/run.lock"
    }
    assert [f.name for f in scan(series.directory, series="run")] == [named("ckpt", 3)]
    assert [f.name for f in other.found()] == ["run-1-2_1.ckpt", "run-1-1_1.ckpt"]


def test_names_of_a_persons_choice_are_one_series_and_may_be_used_again(series: Series) -> None:
    for round_ in range(3):
        for name in ("latest.ckpt", f"best of {round_}.ckpt"):
            commit_and_prune(series, name, KeepLast(2), seed=round_)
    assert visible(series.directory) == {"latest.ckpt", "best of 2.ckpt"}
    with open_checkpoint(series.directory / "latest.ckpt") as checkpoint:
        assert (checkpoint.read("weight").array == tensors(2)["weight"].array).all()


def test_nothing_goes_if_the_newest_is_not_there(series: Series) -> None:
    saved = [commit(series, named("ckpt", n), container="ckpt") for n in (1, 2, 3)]
    saved[2].path.unlink()
    assert series.prune(KeepLast(1), saved[2].id) == []
    assert visible(series.directory) == {named("ckpt", 1), named("ckpt", 2)}


def _other_size(saved: Saved) -> Path:
    overwrite(saved.path, b"another tool's")
    return saved.path


def _same_size(saved: Saved) -> Path:
    flip(saved.path)
    return saved.path


def _same_beginning(saved: Saved) -> Path:
    flip(saved.path, saved.nbytes - 1)
    return saved.path


def _replaced(saved: Saved) -> Path:
    content = bytearray(saved.path.read_bytes())
    content[-1] ^= 1
    saved.path.unlink()
    saved.path.write_bytes(content)
    return saved.path


def _linked(saved: Saved) -> Path:
    moved = saved.path.rename(saved.path.parent.parent / "archive")
    saved.path.symlink_to(moved)
    return saved.path


def _copied(saved: Saved) -> Path:
    copy = saved.path.with_name("my favourite")
    shutil.copytree(saved.path, copy)
    return copy


@pytest.mark.parametrize(
    ("change", "container"),
    [
        (_other_size, "ckpt"),
        (_same_size, "ckpt"),
        (_same_beginning, "ckpt"),
        (_replaced, "safetensors"),
        (_linked, "ckpt"),
        (_linked, "directory"),
        (_copied, "directory"),
    ],
    ids=["size", "bytes", "bytes beyond the first piece", "new file", "link", "link to a directory", "copy"],
)
def test_what_somebody_else_put_there_is_never_pruned(
    series: Series, change: Callable[[Saved], Path], container: str
) -> None:
    large = {"tensors": tensors(w=(4_200_000,))} if change is _same_beginning else {}
    theirs = change(commit(series, named(container), container=container, **large))
    before = tree(series.directory.parent)
    for number in (2, 3):
        saved = commit(series, named(container, number), container=container)
        series.prune(KeepLast(1), saved.id)
    series.sweep()
    after = tree(series.directory.parent)
    kept = [name for name in before if (series.directory.parent / name).is_relative_to(theirs)]
    assert kept
    assert all(after[name] == before[name] for name in kept)
    assert named(container, 2) not in visible(series.directory)
    assert os.path.lexists(theirs)


def test_what_its_owner_deleted_is_gone_and_its_manifest_is_swept(series: Series) -> None:
    for number in (1, 2):
        commit(series, named("ckpt", number), container="ckpt", rest=tensors(moment=(3,)))
    (series.directory / named("ckpt", 1)).unlink()
    commit_and_prune(series, named("ckpt", 3), KeepAll())
    assert set(sidecars(series.directory)) == {named("ckpt", 2), named("ckpt", 3)}
    assert sum("rest" in name for name in control(series)) == 1


def test_a_sweep_keeps_the_only_manifest_of_a_file_that_does_not_fit_it(series: Series) -> None:
    saved = commit(series, named("ckpt"), container="ckpt")
    overwrite(saved.path, b"another tool's")
    series.sweep()
    assert find(saved.path).state == "damaged"


def test_a_sweep_removes_from_a_directory_what_its_manifest_does_not_list(series: Series) -> None:
    saved = commit(series, named("directory"))
    ours = ["c0-00001-deadbeef.safetensors", "c7-00000-deadbeef.safetensors.sealed", "part-1-1-1.json"]
    ours.append("g1-a1-r1-00000.safetensors")
    theirs = ["notes.txt", "c0.safetensors", "manifest.json.bak"]
    for name in ours + theirs:
        (saved.path / name).touch()
    series.sweep()
    left = {path.name for path in saved.path.iterdir()}
    assert left - set(theirs) == {f"c0-00000-{saved.id[:8]}.safetensors", "manifest.json"}
    assert left > set(theirs)


@pytest.mark.parametrize("call", ["unlink", "rename"])
def test_what_cannot_be_removed_is_told(series: Series, files: Watched, call: str) -> None:
    container = "ckpt" if call == "unlink" else "directory"
    saved = [commit(series, named(container, n), container=container) for n in (1, 2)]
    files.fail(call, PermissionError(1, "Operation not permitted"))
    with pytest.raises(PermissionError):
        series.prune(KeepLast(1), saved[1].id)
    assert visible(series.directory) == {named(container, n) for n in (1, 2)}


def test_one_that_cannot_be_removed_keeps_none_of_the_others(series: Series, files: Watched) -> None:
    saved = [commit(series, named("ckpt", n), container="ckpt") for n in (1, 2, 3)]
    files.fail("unlink", PermissionError(1, "immutable"), lambda path: path == saved[0].path)
    with pytest.raises(PermissionError):
        series.prune(KeepLast(1), saved[2].id)
    assert visible(series.directory) == {named("ckpt", 1), named("ckpt", 3)}
