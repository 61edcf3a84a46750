"""A series: its stem and numbers, and which of its checkpoints stay, by real commits in real directories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
from swansong.errors import ConfigError
from swansong.policy.keep import KeepAll, KeepLast, KeepPerMinutes
from swansong.store.catalog import find, scan, sidecars
from swansong.store.checkpoint import Saved
from swansong.store.files import Files
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


# -- stems -------------------------------------------------------------------------------------------------


def test_a_run_in_an_empty_directory_has_its_prefix_for_stem(series: Series) -> None:
    assert (series.name, series.stem, series.parent, series.floor) == ("run", "run", None, 0)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_run_in_an_occupied_directory_gets_a_number(series: Series, container: str) -> None:
    commit(series, named(container), container=container)
    second = again(series)
    assert (second.name, second.stem, second.floor) == ("run", "run_1", 1)
    commit(second, named(container, stem="run_1"), container=container)
    assert (again(series).stem, again(series).floor) == ("run_2", 2)
    assert again(series, "ru").stem == "ru"


@pytest.mark.parametrize(
    ("names", "stem"),
    [
        (["run-1_3_breakpoint.ckpt"], "run"),
        (["run-1_3.txt", "run-notes"], "run"),
        (["run-2023.ckpt"], "run_1"),
        (["run_4-1_1.safetensors"], "run_5"),
    ],
    ids=["saved on an exception", "no checkpoints", "a person's", "another's"],
)
def test_what_occupies_a_directory_is_what_mindspore_looks_at(
    directory: Path, names: list[str], stem: str
) -> None:
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    assert Series.fresh(directory, "run", Watched()).stem == stem


def test_what_cannot_be_looked_at_occupies_nothing(directory: Path) -> None:
    directory.mkdir()
    (directory / "run-1_1.ckpt").symlink_to("run-1_1.ckpt")
    (directory / "run-1_2").mkdir()
    assert Series.fresh(directory, "run", Watched()).stem == "run"


def test_a_prefix_that_cannot_be_one_makes_no_directory(directory: Path) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        Series.fresh(directory, "a/b", Watched())
    assert not directory.exists()


def test_a_resumed_run_continues_stem_and_series(series: Series) -> None:
    commit(series, named("ckpt"), container="ckpt")
    second = again(series)
    saved = commit(second, named("ckpt", stem="run_1"), container="ckpt")
    third = resumed(series, saved.path.name)
    assert (third.name, third.stem, third.parent, third.floor) == ("run", "run_1", saved.id, 2)
    assert third.run not in {series.run, second.run}
    child = find(commit(third, named("ckpt", 2, stem="run_1"), container="ckpt").path).manifest
    assert child is not None
    assert (child.parent, child.run, child.stem, child.series) == (saved.id, third.run, "run_1", "run")


def test_a_resumed_run_can_save_elsewhere(series: Series, tmp_path: Path) -> None:
    saved = commit(series, named("ckpt"), container="ckpt")
    moved = Series.resumed(find(saved.path), Watched(), directory=tmp_path / "elsewhere")
    assert commit(moved, named("ckpt", 2), container="ckpt").seq == 2
    assert visible(tmp_path / "elsewhere") == {named("ckpt", 2)}


def test_what_is_not_committed_cannot_be_continued(series: Series) -> None:
    (series.directory / "x.ckpt").touch()
    with pytest.raises(ValueError, match="not committed"):
        resumed(series, "x.ckpt")


# -- numbers -----------------------------------------------------------------------------------------------


def test_numbers_rise_by_one_across_runs(series: Series) -> None:
    assert [series.draw() for _ in range(3)] == [1, 2, 3]
    assert again(series).draw() == 4
    assert series.draw() == 5
    assert again(series, "other").draw() == 1


def test_after_going_back_to_an_older_step_numbers_still_rise(series: Series) -> None:
    for step in (50, 100):
        commit(series, named("ckpt", step), container="ckpt", step=step)
    back = resumed(series, named("ckpt", 50))
    saved = commit(back, named("ckpt", 60), container="ckpt", step=60)
    assert saved.seq == 3
    assert scan(series.directory)[0].path == saved.path


@pytest.mark.parametrize(
    "spoil",
    [
        lambda lock: lock.unlink(),
        lambda lock: lock.write_bytes(b""),
        lambda lock: lock.write_bytes(b"1"),
        lambda lock: lock.write_bytes(b"\0\0"),
        lambda lock: lock.write_bytes(b"-5\n"),
        lambda lock: lock.write_bytes(b"9" * 30 + b"\n"),
        lambda lock: lock.write_bytes("٣\n".encode()),
        lambda lock: lock.write_bytes(b"1 2\n"),
    ],
    ids=["lost", "emptied", "torn", "zeros", "negative", "endless", "other digits", "two"],
)
@pytest.mark.parametrize("who", ["the same run", "a fresh run", "a resumed run"])
def test_a_lost_or_torn_lock_file_does_not_turn_numbers_back(
    series: Series, spoil: Callable[[Path], None], who: str
) -> None:
    for number in range(1, 13):
        commit(series, named("ckpt", number), container="ckpt")
    spoil(series.space.control / "run.lock")
    run = {
        "the same run": lambda: series,
        "a fresh run": lambda: again(series),
        "a resumed run": lambda: resumed(series, named("ckpt", 3)),
    }[who]()
    assert [run.draw(), run.draw()] == [13, 14]


def test_a_number_that_was_drawn_but_never_committed_is_not_drawn_again(series: Series) -> None:
    commit(series, named("ckpt"), container="ckpt")
    assert series.draw() == 2
    assert again(series).draw() == 3


def test_two_processes_draw_at_once_and_never_the_same(series: Series) -> None:
    script = (
        "import sys; from pathlib import Path; from swansong.store.files import Files;"
        "from swansong.store.series import Series; s = Series.fresh(Path(sys.argv[1]), 'run', Files());"
        "print('ready', flush=True); sys.stdin.readline();"
        "print(*[s.draw() for _ in range(300)])"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(series.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    drawn = [[int(word) for word in process.communicate()[0].split()] for process in processes]
    assert all(numbers == sorted(numbers) for numbers in drawn)
    assert sorted(drawn[0] + drawn[1]) == list(range(1, 601))


def test_a_child_forked_while_a_number_is_drawn_does_not_keep_the_series_locked(
    series: Series, files: Watched
) -> None:
    ready, started = os.pipe()
    over, end = os.pipe()
    children: list[int] = []

    def fork(call: str, _: tuple[Any, ...]) -> None:
        if call == "write_hint" and not children:
            child = os.fork()
            if child == 0:
                os.close(end)
                os.write(started, b"x")
                os.read(over, 1)
                os._exit(0)
            children.append(child)
            os.read(ready, 1)

    files.before = fork
    try:
        assert series.draw() == 1
        Files().lock(series.space.control / "run.lock", wait=False).release()
        assert series.draw() == 2
    finally:
        for descriptor in (ready, started, over, end):
            os.close(descriptor)
        os.waitpid(children[0], 0)


# -- retention ---------------------------------------------------------------------------------------------


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
