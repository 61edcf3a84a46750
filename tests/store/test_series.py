"""A series: its stem and its numbers, across runs, processes and lost lock files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store_support import (
    CONTAINERS,
    Watched,
    commit,
    named,
    visible,
)
from swansong.errors import ConfigError
from swansong.store.catalog import find, scan
from swansong.store.files import Files
from swansong.store.series import Series


def again(series: Series, name: str = "run") -> Series:
    """A run that begins afresh in the same directory."""
    return Series.fresh(series.directory, name, Watched())


def resumed(series: Series, name: str) -> Series:
    """A run that continues from checkpoint `name`."""
    return Series.resumed(find(series.directory / name), Watched())


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
