"""Files and locks: modes, durability of names, links that are not followed, children that keep no locks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from store_support import Watched
from swansong.store import files as module
from swansong.store.files import FileLock, Files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@contextmanager
def living_child() -> Iterator[None]:
    """Fork a child that lives, doing nothing, until the block ends."""
    ready, started = os.pipe()
    over, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(started, b"x")
        os.read(over, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield
    finally:
        for descriptor in (ready, started, over, end):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_a_new_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    files = Files()
    with umask(0):
        files.close(files.create(tmp_path / "new"))
    assert mode(tmp_path / "new") == 0o600


def test_create_never_takes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            Files().create(tmp_path / name)
    assert (tmp_path / "there").read_bytes() == b"precious"
    assert not (tmp_path / "elsewhere").exists()


def test_write_goes_on_after_a_short_write(tmp_path: Path) -> None:
    files, data = Files(), np.arange(10_000, dtype=np.uint8)
    descriptor = files.create(tmp_path / "f")
    real = os.pwrite
    with mock.patch.object(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:999], offset)):
        files.write(descriptor, data, 5)
    files.close(descriptor)
    assert (tmp_path / "f").read_bytes() == bytes(5) + data.tobytes()


def test_directories_are_made_durable_from_the_top_and_only_the_last_is_private(
    tmp_path: Path, files: Watched
) -> None:
    with umask(0o022):
        files.ensure_directory(tmp_path / "a" / "b" / "c", 0o700)
    assert [mode(tmp_path / d) for d in ("a", "a/b", "a/b/c")] == [0o755, 0o755, 0o700]
    assert files.calls == [
        ("make_directory", (tmp_path / "a", 0o777)),
        ("sync_directory", (tmp_path,)),
        ("make_directory", (tmp_path / "a/b", 0o777)),
        ("sync_directory", (tmp_path / "a",)),
        ("make_directory", (tmp_path / "a/b/c", 0o700)),
        ("sync_directory", (tmp_path / "a/b",)),
    ]


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path, files: Watched) -> None:
    tmp_path.chmod(0o750)
    files.ensure_directory(tmp_path, 0o700)
    assert (mode(tmp_path), files.calls) == (0o750, [])


def test_a_directory_that_another_process_makes_first_is_fine(tmp_path: Path, files: Watched) -> None:
    files.before = lambda call, arguments: arguments[0].mkdir() if call == "make_directory" else None
    files.ensure_directory(tmp_path / "d")
    assert (tmp_path / "d").is_dir()


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is there, and is not a directory"):
        Files().ensure_directory(tmp_path / "file")


def test_write_small_syncs_before_it_returns(tmp_path: Path, files: Watched) -> None:
    files.write_small(tmp_path / "f", b"content")
    assert [call for call, _ in files.calls] == ["create", "write", "sync", "close"]
    assert (tmp_path / "f").read_bytes() == b"content"


@pytest.mark.parametrize("call", ["write", "sync"])
def test_write_small_leaves_nothing_of_what_failed(tmp_path: Path, files: Watched, call: str) -> None:
    files.fail(call, OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        files.write_small(tmp_path / "f", b"content")
    assert list(tmp_path.iterdir()) == []
    assert files.calls[-1][0] == "unlink"


def test_remove_tree_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    doomed = tmp_path / "doomed"
    (doomed / "inner").mkdir(parents=True)
    (doomed / "inner" / "file").touch()
    (doomed / "link").symlink_to(outside)
    (tmp_path / "link").symlink_to(outside)
    for name in ("doomed", "link", "missing"):
        Files().remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["outside", "precious"]


# -- locks -----------------------------------------------------------------------------------------------


def test_a_held_lock_is_refused_to_others_and_free_once_released(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path, wait=False) as lock:
        assert lock.held
        with pytest.raises(BlockingIOError):
            FileLock(path, wait=False)
    assert not lock.held
    lock.release()  # a second time
    FileLock(path, wait=False).release()


def test_a_refused_lock_leaves_no_open_file(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock", wait=False):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(BlockingIOError):
            FileLock(tmp_path / "lock", wait=False)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(tmp_path / "link", wait=False)
    assert not (tmp_path / "target").exists()


def test_a_lock_files_content_is_replaced_as_a_whole(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock", wait=False) as lock:
        lock.write(b"a long text")
        lock.write(b"short")
        assert lock.read() == b"short"
    assert (tmp_path / "lock").read_bytes() == b"short"


@pytest.mark.parametrize("how", ["there", "unlinked", "replaced"])
def test_still_named_tells_whether_the_locked_file_has_its_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "lock"
    with FileLock(path, wait=False) as lock:
        if how != "there":
            path.unlink()
        if how == "replaced":
            path.touch()
        assert lock.still_named() is (how == "there")


def test_a_forked_child_does_not_keep_a_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", wait=False)
    with living_child():
        lock.release()
        FileLock(tmp_path / "lock", wait=False).release()


def test_a_child_forked_while_a_lock_is_waited_for_does_not_keep_it(tmp_path: Path) -> None:
    real = module.fcntl.flock
    children = []

    def fork_and_lock(descriptor: int, operation: int) -> None:
        # As another thread may do while this one waits here.
        children.append(child := living_child())
        child.__enter__()
        real(descriptor, operation)

    with mock.patch.object(module.fcntl, "flock", fork_and_lock):
        lock = FileLock(tmp_path / "lock", wait=True)
    try:
        lock.release()
        FileLock(tmp_path / "lock", wait=False).release()
    finally:
        children[0].__exit__(None, None, None)
