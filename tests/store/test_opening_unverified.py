"""Opening what no manifest vouches for, and clear words for whatever else a path may be."""

from __future__ import annotations

import os
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store_support import (
    CONTAINERS,
    KEY,
    OTHER_KEY,
    commit,
    named,
    overwrite,
    same,
    tensors,
)
from swansong.errors import (
    CheckpointNotFoundError,
    DamagedError,
    KeyNeededError,
    LoadError,
    MalformedError,
    NotCommittedError,
    NotSupportedError,
    SwansongWarning,
    WrongKeyError,
)
from swansong.store import catalog
from swansong.store.manifest import attach_tail, detach_tail
from swansong.store.opening import open_checkpoint
from swansong.store.series import Series


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def data_of(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("c*"))


@pytest.mark.parametrize("container", ["ckpt", "safetensors"])
def test_a_file_copied_elsewhere_alone_is_read_unverified(
    series: Series, container: str, tmp_path: Path
) -> None:
    path = commit(series, named(container), container=container, objects={"lost": 1}).path
    alone = Path(shutil.copy(path, tmp_path))
    with open_checkpoint(alone) as got:
        assert got.manifest is None
        assert same(got.read_all(), tensors())
        assert same(got.state(), tensors())
        assert got.objects == {}


def test_an_encrypted_file_copied_elsewhere_is_read_with_a_warning_to_the_caller(
    series: Series, tmp_path: Path
) -> None:
    alone = Path(shutil.copy(commit(series, named("ckpt"), container="ckpt", key=KEY).path, tmp_path))
    with (
        pytest.warns(SwansongWarning, match="no manifest vouches for it") as caught,
        open_checkpoint(alone, key=KEY) as got,
    ):
        assert same(got.read_all(), tensors())
    assert [record.filename for record in caught] == [__file__]
    with pytest.raises(KeyNeededError):
        open_checkpoint(alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WrongKeyError, match="wrong, or the file is damaged"):
            open_checkpoint(alone, key=OTHER_KEY)


@pytest.mark.parametrize("container", ["ckpt", "safetensors"])
def test_a_file_that_another_tool_has_written_over_is_not_the_committed_content(
    series: Series, container: str
) -> None:
    path = commit(series, named(container), container=container).path
    other = commit(series, named(container, 2), container=container, tensors=tensors(x=(3,))).path
    overwrite(path, other.read_bytes())
    with pytest.raises(MalformedError, match=r"not the committed content: it has [\d,]+ bytes") as caught:
        open_checkpoint(path)
    assert caught.value.path == str(path)


def test_a_directory_without_manifest_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").mkdir()
    with pytest.raises(
        NotCommittedError, match=r"x\.ckpt: not a committed checkpoint: there is no manifest\.json"
    ):
        open_checkpoint(tmp_path / "x.ckpt")


def test_a_file_that_a_manifest_lists_and_that_is_missing_is_named(series: Series) -> None:
    path = commit(series, named("directory")).path
    gone = data_of(path)
    gone.unlink()
    with pytest.raises(MalformedError, match=f"{gone}: missing, though the manifest lists it") as caught:
        open_checkpoint(path)
    assert caught.value.file == str(gone)


@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_a_newer_format_is_refused_as_that(series: Series, container: str) -> None:
    path = commit(series, named(container), container=container).path
    record = path / "manifest.json" if path.is_dir() else catalog.sidecars(path.parent)[path.name][0]
    body, _ = detach_tail(record.read_bytes(), "m")
    record.write_bytes(attach_tail(body.replace(b"swansong/1", b"swansong/2"), None))
    with pytest.raises(NotSupportedError, match="written in format swansong/2"):
        open_checkpoint(path)


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def _loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


def _dangling(path: Path) -> Path:
    path.symlink_to(path.with_name("nowhere"))
    return path


def _empty(path: Path) -> Path:
    path.touch()
    return path


def _text(path: Path) -> Path:
    path.write_bytes(b"no checkpoint at all\n" * 1000)
    return path


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors", ""], ids=["ckpt", "safetensors", "none"])
@pytest.mark.parametrize("key", [None, KEY], ids=["no key", "key"])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: path, CheckpointNotFoundError, "there is no such file or directory"),
        (lambda path: _empty(path) / "below", CheckpointNotFoundError, "there is no such file or directory"),
        (_dangling, CheckpointNotFoundError, "there is no such file or directory"),
        (_loop, LoadError, "cannot be read: Too many levels of symbolic links"),
        (lambda path: path.with_name("x" * 300), LoadError, "cannot be read: File name too long"),
        (_pipe, MalformedError, "wanted a regular file, found one of mode prw"),
        (_socket, MalformedError, "wanted a regular file, found one of mode srw"),
        (lambda path: Path("/dev/zero"), MalformedError, "wanted a regular file, found one of mode crw"),
        (_empty, LoadError, "ends without|has 0 bytes|not encrypted"),
        (_text, LoadError, "byte|claims|not encrypted"),
    ],
    ids=["missing", "below a file", "dangling", "loop", "long", "pipe", "socket", "device", "empty", "text"],
)
def test_whatever_else_a_path_may_be_gets_a_clear_error_at_once(
    tmp_path: Path,
    make: Callable[[Path], Path],
    error: type[Exception],
    message: str,
    suffix: str,
    key: Any,
) -> None:
    path = make(tmp_path / f"x{suffix}")
    before = descriptors()
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path, key=key)
    assert str(path) in str(caught.value)
    assert descriptors() == before


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_fails_to_open_leaves_no_open_file(series: Series, container: str) -> None:
    path = commit(series, named(container), container=container).path
    overwrite(data_of(path), b"x")
    before = descriptors()
    for _ in range(3):
        with pytest.raises(DamagedError):
            open_checkpoint(path)
    assert descriptors() == before
