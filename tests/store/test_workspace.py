"""Temporary places: what is held by a living save stays, whatever else is there goes."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from store_support import Watched
from swansong.store.files import FileLock
from swansong.store.workspace import Workspace

NAME, ID8 = "run-1_1.ckpt", "0123abcd"


@pytest.fixture
def space(directory: Path, files: Watched) -> Workspace:
    made = Workspace(directory, files)
    made.prepare()
    return made


def entries(space: Workspace) -> list[str]:
    return sorted(path.name for path in space.temporary.iterdir())


def fail_in(space: Workspace) -> None:
    """A save that leaves something and fails."""
    with space.reserve(NAME, ID8) as place:
        place.touch()
        raise RuntimeError("the save's own")


def left_behind(space: Workspace, id8: str, *, lock: bool = True, directory: bool = False) -> Path:
    """What a process that was killed leaves."""
    path = space.temporary / f"{id8}-{NAME}"
    if directory:
        path.mkdir()
        (path / "c0-00000-0123abcd.safetensors").write_bytes(b"half")
    else:
        path.write_bytes(b"half")
    if lock:
        path.with_name(path.name + ".lock").touch()
    return path


def test_the_directory_and_what_is_in_it_are_private(space: Workspace) -> None:
    made = [space.directory, space.control, space.temporary]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    assert space.temporary == space.directory / ".swansong" / "tmp"


def test_prepare_changes_nothing_where_all_is_there(space: Workspace, files: Watched) -> None:
    files.calls.clear()
    space.prepare()
    assert files.calls == []


def test_a_place_is_locked_before_it_exists_and_gone_with_its_lock_afterwards(space: Workspace) -> None:
    with space.reserve(NAME, ID8) as place:
        assert not place.exists()
        assert entries(space) == [f"{ID8}-{NAME}.lock"]
        assert space.in_progress(NAME, ID8)
        place.mkdir()
        (place / "data").touch()
    assert entries(space) == []
    assert not space.in_progress(NAME, ID8)


def test_what_a_failed_save_left_is_removed_before_its_lock_is_given_up(
    space: Workspace, files: Watched
) -> None:
    with pytest.raises(RuntimeError, match="the save's own"):
        fail_in(space)
    assert entries(space) == []
    assert [arguments[0].name for call, arguments in files.calls if call == "unlink"] == [
        f"{ID8}-{NAME}",
        f"{ID8}-{NAME}.lock",
    ]


def test_a_place_that_cannot_be_removed_does_not_hide_the_saves_own_error(
    space: Workspace, files: Watched
) -> None:
    files.fail("unlink", OSError(5, "Input/output error"))
    with pytest.raises(RuntimeError, match="the save's own"):
        fail_in(space)
    assert not space.in_progress(NAME, ID8)


def test_a_lock_swept_between_its_creation_and_our_holding_it_is_taken_anew(
    space: Workspace, files: Watched
) -> None:
    taken: list[Path] = []

    def sweep_the_first(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "lock":
            taken.append(arguments[0])
            if len(taken) == 1:
                arguments[0].unlink()

    files.after = sweep_the_first
    with space.reserve(NAME, ID8):
        assert len(taken) == 2
        with pytest.raises(BlockingIOError):
            FileLock(taken[0], wait=False)


def test_the_end_of_a_dead_save_is_noticed_and_its_lock_removed(space: Workspace) -> None:
    left_behind(space, ID8)
    assert not space.in_progress(NAME, ID8)
    assert entries(space) == [f"{ID8}-{NAME}"]


def test_a_lock_that_cannot_be_opened_counts_as_held(space: Workspace) -> None:
    (space.temporary / f"{ID8}-{NAME}.lock").mkdir()
    assert space.in_progress(NAME, ID8)


@pytest.mark.parametrize("lock", [True, False], ids=["with its lock", "without a lock"])
@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "file"])
def test_sweeping_removes_what_the_dead_left_and_nothing_that_is_held(
    space: Workspace, lock: bool, is_directory: bool
) -> None:
    with space.reserve(NAME, ID8) as place:
        place.write_bytes(b"being written")
        left_behind(space, "deadbeef", lock=lock, directory=is_directory)
        space.sweep()
        assert entries(space) == [f"{ID8}-{NAME}", f"{ID8}-{NAME}.lock"]
        assert place.read_bytes() == b"being written"


def test_sweeping_where_there_is_nothing_yet_does_nothing(directory: Path, files: Watched) -> None:
    Workspace(directory, files).sweep()
    assert files.calls == []


def test_sweeping_goes_on_after_what_it_cannot_remove(space: Workspace, files: Watched) -> None:
    left_behind(space, "aaaaaaaa")
    left_behind(space, "bbbbbbbb")
    files.fail("unlink", PermissionError(1, "Operation not permitted"), lambda path: "aaaaaaaa" in path.name)
    space.sweep()
    assert entries(space) == [f"aaaaaaaa-{NAME}", f"aaaaaaaa-{NAME}.lock"]


def test_a_child_forked_during_a_save_removes_nothing_of_it_when_it_leaves(space: Workspace) -> None:
    parent = os.getpid()
    try:
        with space.reserve(NAME, ID8) as place:
            place.touch()
            child = os.fork()
            if child == 0:
                raise SystemExit  # leaves through the block, as any exception in the child would
            os.waitpid(child, 0)
            assert place.exists()
            assert space.in_progress(NAME, ID8)
    finally:
        if os.getpid() != parent:
            os._exit(0)


def test_it_is_busy_while_something_is_put_together(space):
    assert not space.busy
    with space.reserve("net-1_1", "01234567") as place:
        place.mkdir()
        assert space.busy
    assert not space.busy
    (space.temporary / "01234567-left").mkdir()  # by a save that died
    assert not space.busy
