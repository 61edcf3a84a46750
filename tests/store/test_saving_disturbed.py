"""Saves that are ended, or met by others, at every call that they make: the old checkpoint or the new one."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_support import (
    CONTAINERS,
    Watched,
    commit,
    named,
    same,
    tensors,
    tree,
)
from swansong.errors import DiskFullError, SaveError
from swansong.policy.keep import KeepLast
from swansong.state.tensors import HostTensor
from swansong.store import catalog
from swansong.store.catalog import scan
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.sweeping import retire_others
from swansong.store.verify import verify
from swansong.store.writer import Writer

T = HostTensor.of


def calls_of(series: Series, name: str, **how: Any) -> list[str]:
    """The mutating calls of a save, as it is done under a name that is taken."""
    files = Watched()
    commit(Series.fresh(series.directory, series.name, files), name, **how)
    start = next(i for i, (call, _) in enumerate(files.calls) if call == "write_hint") + 1
    return [call for call, _ in files.calls[start:]]


def at_call(number: int, action: Callable[[], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that does `action` at the `number`th call after the sequence number was drawn."""
    counted = [-1]

    def hook(call: str, _: tuple[Any, ...]) -> None:
        if call == "write_hint":
            counted[0] = 0
        elif counted[0] >= 0:
            if counted[0] == number:
                counted[0] += 1
                action()
            else:
                counted[0] += 1

    return hook


CASES = {
    "ckpt with rest": {"container": "ckpt", "rest": tensors(moment=(3,))},
    "safetensors": {"container": "safetensors"},
    "directory": {"container": "directory"},
}


def content_of(path: Path) -> bytes:
    """Which of the two saves a whole checkpoint is of; raises if it is none or both."""
    with open_checkpoint(path) as got:
        read = {**got.read_all(), **{name: got.read(name) for name in got.rest}}
        seed = (got.objects or {})["seed"]
    want = {**tensors(seed), **({"moment": T(np.full(3, seed, np.float32))} if "moment" in read else {})}
    assert same(read, want)
    return bytes([seed])


def save_of(series: Series, name: str, seed: int, how: dict[str, Any]) -> Any:
    """A save of which every part tells the seed."""
    how = how | ({"rest": {"moment": T(np.full(3, seed, np.float32))}} if "rest" in how else {})
    return commit(series, name, seed=seed, objects={"seed": seed}, **how)


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("taken", [True, False], ids=["name taken", "new name"])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "interrupt"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_ends_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, how: dict[str, Any], taken: bool, error: BaseException, when: str
) -> None:
    name = named(how["container"])
    probe = Series.fresh(tmp_path / "probe", "run", Files())
    if taken:
        save_of(probe, name, 1, how)
    count = len(calls_of(probe, name, **how))
    assert count >= 12

    def fail() -> None:
        raise error

    # The first call takes the lock; one that was taken and lost at once is freed when the process ends.
    for number in range(when == "after", count):
        files = Watched()
        series = Series.fresh(tmp_path / f"{number}", "run", files)
        if taken:
            save_of(series, name, 1, how)
        setattr(files, when, at_call(number, fail))
        committed = False
        with suppress(SaveError if isinstance(error, OSError) else KeyboardInterrupt):
            save_of(series, name, 2, how)
            committed = True
        setattr(files, when, lambda *_: None)
        path = series.directory / name
        seen = content_of(path) if path.exists() else None
        assert seen in ([b"\2"] if committed else [b"\2", b"\1" if taken else None]), number
        assert seen is None or verify(path).ok, number
        save_of(series, name, 3, how)
        assert content_of(series.directory / name) == b"\3"
        series.sweep()
        assert len(tree(series.directory)) == len(tree(probe.directory)), number


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
def test_what_cannot_be_tidied_up_after_the_commit_does_not_fail_the_save(
    series: Series, files: Watched, how: dict[str, Any]
) -> None:
    name = named(how["container"])
    save_of(series, name, 1, how)
    files.fail("unlink", PermissionError(errno.EPERM, "Operation not permitted"))
    save_of(series, name, 2, how)
    assert content_of(series.directory / name) == b"\2"
    files.before = lambda *_: None
    left = len(tree(series.directory))
    series.sweep()
    assert content_of(series.directory / name) == b"\2"
    assert len(tree(series.directory)) < left


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("call", ["lock", "create", "preallocate", "write", "sync"])
def test_an_error_names_the_checkpoint_not_its_temporary_file(
    series: Series, files: Watched, container: str, call: str
) -> None:
    seq = series.draw()
    files.fail(call, OSError(errno.ENOSPC, "No space left on device"))
    target = series.directory / named(container)
    with pytest.raises(DiskFullError, match="No space left on device") as caught:
        save(
            series,
            Writer(files),
            target.name,
            Content(tensors=tensors()),
            Point(step=1),
            kind="periodic",
            seq=seq,
            options=SaveOptions(container=container),  # type: ignore[arg-type]
        )
    assert caught.value.path == str(target)
    assert str(caught.value).startswith(f"{target}: not saved")
    assert caught.value.needed >= Content(tensors=tensors()).nbytes


def test_memory_that_runs_out_is_the_saves_failure(series: Series, files: Watched) -> None:
    files.fail("write", MemoryError())
    with pytest.raises(SaveError, match="out of memory"):
        commit(series, named("ckpt"), container="ckpt")


# -- several at work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("taken", [True, False], ids=["name taken", "new name"])
def test_another_writer_of_the_name_may_come_and_go_at_any_call(
    tmp_path: Path, how: dict[str, Any], taken: bool
) -> None:
    name = named(how["container"])
    probe = Series.fresh(tmp_path / "probe", "run", Files())
    if taken:
        save_of(probe, name, 1, how)
    for number in range(len(calls_of(probe, name, **how))):
        files = Watched()
        series = Series.fresh(tmp_path / f"{number}", "run", files)
        other = Series.fresh(tmp_path / f"{number}", "run", Files())
        if taken:
            save_of(series, name, 1, how)
        files.before = at_call(number, lambda other=other: save_of(other, name, 3, how))
        save_of(series, name, 2, how)
        assert content_of(series.directory / name) in (b"\2", b"\3"), number
        assert verify(series.directory).ok
        assert len(scan(series.directory)) == 1
        series.sweep()
        assert content_of(series.directory / name) in (b"\2", b"\3"), number
        assert len(tree(series.directory)) == len(tree(probe.directory)), number


def test_a_writer_that_ends_while_another_tidies_up_keeps_its_manifest(series: Series) -> None:
    name, files = named("ckpt"), Watched()
    other = Series.fresh(series.directory, "run", files)
    mine = save_of(series, name, 1, CASES["ckpt with rest"])
    written = catalog.identity(mine.path)
    waiting, go_on = threading.Event(), threading.Event()

    def pause_before_the_commit(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "rename" and arguments[1] == mine.path:
            waiting.set()
            go_on.wait()

    files.before = pause_before_the_commit
    writer = threading.Thread(target=lambda: save_of(other, name, 2, CASES["ckpt with rest"]))
    writer.start()
    waiting.wait()

    def is_current() -> bool:
        still = catalog.identity(mine.path) == written
        go_on.set()
        writer.join()
        return still

    retire_others(series.space, name, mine.id[:8], is_current)
    assert content_of(mine.path) == b"\2"


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
def test_a_sweeper_or_pruner_at_any_call_removes_nothing_of_a_living_save(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    name, number, count = named(how["container"]), 0, 1
    while number < count:
        files = Watched()
        series = Series.fresh(tmp_path / f"{number}", "run", files)
        other = Series.fresh(tmp_path / f"{number}", "run", Files())
        first = save_of(series, name, 1, how)

        def sweep(other: Series = other, identity: str = first.id) -> None:
            other.sweep()
            other.prune(KeepLast(1), identity)

        files.calls.clear()
        files.before = at_call(number, sweep)
        save_of(series, name, 2, how)
        count = len(files.calls)
        assert content_of(series.directory / name) == b"\2", number
        number += 1
    assert count > 12


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
def test_a_reader_at_any_call_sees_the_old_checkpoint_or_the_new_one(
    series: Series, files: Watched, how: dict[str, Any]
) -> None:
    name = named(how["container"])
    save_of(series, name, 1, how)
    seen: list[bytes] = []

    def look(*_: Any) -> None:
        seen.append(content_of(series.directory / name))
        assert [f.state for f in scan(series.directory) if f.state != "incomplete"] == ["committed"]

    files.before = files.after = look
    save_of(series, name, 2, how)
    assert seen == sorted(seen)
    assert {seen[0], seen[-1]} == {b"\1", b"\2"}


@pytest.mark.parametrize("how", CASES.values(), ids=CASES.keys())
def test_a_reader_that_never_stops_sees_no_error_and_no_mixture(series: Series, how: dict[str, Any]) -> None:
    name, rounds, over = named(how["container"]), 40, threading.Event()
    save_of(series, name, 1, how)
    trouble: list[BaseException] = []
    seen: list[bytes] = []

    def read() -> None:
        try:
            while not over.is_set():
                seen.append(content_of(series.directory / name))
        except BaseException as error:
            trouble.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(2, rounds):
            save_of(series, name, number, how)
    finally:
        over.set()
        reader.join()
    assert trouble == []
    assert seen == sorted(seen)
    assert content_of(series.directory / name) == bytes([rounds - 1])
