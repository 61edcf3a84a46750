"""Saving: what goes in comes out, a name is replaced in one step, and failures leave what was there."""

from __future__ import annotations

import errno
import math
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_support import (
    CONTAINERS,
    KEY,
    FakeClock,
    Watched,
    commit,
    named,
    same,
    tensors,
    tree,
    visible,
)
from swansong.errors import ConfigError, DiskFullError, SaveError, UnrepresentableError
from swansong.policy.keep import KeepLast
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import catalog, safetensors
from swansong.store.catalog import find, scan
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.sweeping import retire_others
from swansong.store.verify import verify
from swansong.store.writer import Writer, WriterOptions

T = HostTensor.of
KINDS = ["periodic", "final", "exception", "fault", "preemption", "requested"]
WAYS: dict[str, dict[str, Any]] = {
    "ckpt": {"container": "ckpt"},
    "ckpt, CRC": {"container": "ckpt", "crc": True},
    "ckpt, AES-GCM": {"container": "ckpt", "key": KEY},
    "ckpt, AES-CBC": {"container": "ckpt", "key": KEY, "mode": "AES-CBC"},
    "safetensors": {"container": "safetensors"},
    "directory": {"container": "directory"},
    "directory, sealed": {"container": "directory", "key": KEY},
}


def everything() -> dict[str, HostTensor]:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    return {
        "view": T(base[:, ::2].transpose(2, 1, 0)),
        "0-dim": T(np.array(7, np.int64)),
        "empty": T(np.zeros((0, 3), np.float64)),
        "bool": T(base > 3),
        "half": T(np.arange(5, dtype=np.uint16), dtype="bfloat16"),
        "odd name\n/é%": T(np.array([1], np.uint8)),
    }


# -- round trips -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_everything_comes_back_and_the_manifest_says_what_it_is(series: Series, way: dict[str, Any]) -> None:
    name, clock = named(way["container"], 7), FakeClock(wall_offset=0.25)
    rest = {} if way["container"] == "directory" else {"moment": T(np.arange(9.0).reshape(3, 3).T)}
    content = Content(
        tensors=everything(),
        aliases={"tied": "view"},
        rest=rest,
        objects={"seed": 1, "nested": {1: (2, None)}},
        append_info={"epoch_num": 3, "lr": 0.1, "flag": True, "extra": T(np.ones(2, np.int32))},
        inexact=({"what": "dropout"},),
    )
    saved = save(
        series,
        Writer(Files()),
        name,
        content,
        Point(step=107, epoch=3, step_in_epoch=7, boundary_step=105, world_size=4),
        kind="requested",
        seq=41,
        options=SaveOptions(**way),
        time=clock,
    )
    with open_checkpoint(saved.path, key=way.get("key")) as got:
        want = {**content.tensors, **content.appended}
        assert same({n: got.read(n) for n in want}, want)
        assert same({"tied": got.read("tied")}, {"tied": content.tensors["view"]})
        assert same({n: got.read(n) for n in got.rest}, rest)
        assert got.objects == content.objects
        assert got.append_info == {"epoch_num": 3, "lr": 0.1, "flag": True}
        manifest = got.manifest
    assert manifest is not None
    told = {
        "id": saved.id,
        "name": name,
        "container": way["container"],
        "series": "run",
        "stem": "run",
        "seq": 41,
        "kind": "requested",
        "run": series.run,
        "parent": None,
        "step": 107,
        "boundary_step": 105,
        "epoch": 3,
        "step_in_epoch": 7,
        "world_size": 4,
        "created": "1970-01-12T13:46:40.250000Z",
        "inexact": [{"what": "dropout"}],
        "nbytes": saved.nbytes,
    }
    assert {field: getattr(manifest, field) for field in told} == told
    assert verify(saved.path, key=way.get("key")).ok
    assert verify(saved.path).ok


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_told(series: Series, kind: str) -> None:
    found = find(commit(series, named("ckpt"), container="ckpt", kind=kind).path)
    assert found.manifest is not None
    assert found.manifest.kind == kind


def test_without_a_boundary_the_step_is_one(series: Series) -> None:
    found = find(commit(series, named("ckpt"), container="ckpt", step=9).path)
    assert found.manifest is not None
    assert found.manifest.boundary_step == 9


@pytest.mark.parametrize("container", ["ckpt", "safetensors"])
@pytest.mark.parametrize("value", [0.1, 1e300, -0.0, math.inf, 2**62, True], ids=repr)
def test_appended_numbers_are_exact_in_the_manifest_and_quiet_in_the_file(
    series: Series, container: str, value: float, recwarn: pytest.WarningsRecorder
) -> None:
    saved = commit(series, named(container), container=container, append_info={"x": value})
    with open_checkpoint(saved.path) as got:
        assert repr(got.append_info["x"]) == repr(value)
    saved.path.rename(saved.path.parent / f"alone{saved.path.suffix}")
    with (
        np.errstate(over="ignore"),
        open_checkpoint(saved.path.parent / f"alone{saved.path.suffix}") as alone,
    ):
        stored = alone.read("x").array
        assert stored == (np.float32(value) if isinstance(value, float) else value)
    assert len(recwarn) == 0


def test_a_skeleton_gives_the_state_its_form_back(series: Series) -> None:
    skeleton = {"dict": [["a", {"tensor": "weight"}], [1, {"tuple": [{"tensor": "bias"}, None]}]]}
    saved = commit(series, named("directory"), skeleton=skeleton)
    with open_checkpoint(saved.path) as got:
        state = got.state()
    assert list(state) == ["a", 1]
    assert state[1][1] is None
    assert same({"weight": state["a"], "bias": state[1][0]}, tensors())


def test_a_directory_of_no_tensors_is_a_checkpoint(series: Series) -> None:
    saved = commit(series, named("directory"), tensors={}, objects={"only": 1})
    with open_checkpoint(saved.path) as got:
        assert (got.read_all(), got.objects) == ({}, {"only": 1})


def test_a_split_header_makes_several_files_of_one_checkpoint(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = safetensors.split
    monkeypatch.setattr(safetensors, "split", lambda shown: real(shown, limit=200))
    content = {f"t{i}": T(np.full(3, i, np.float32)) for i in range(7)}
    saved = commit(series, named("directory"), tensors=content, aliases={"tied": "t6"})
    assert len(list(saved.path.glob("c0-0000?-*.safetensors"))) > 2
    with open_checkpoint(saved.path) as got:
        assert same({n: got.read(n) for n in content}, content)
        assert same({"x": got.read("tied")}, {"x": content["t6"]})


# -- what lies on disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_single_file_has_one_manifest_and_one_rest_beside_it(series: Series, key: Any) -> None:
    for seed in (1, 2):
        saved = commit(series, named("ckpt"), seed=seed, container="ckpt", key=key, rest=tensors(m=(3,)))
    sealed = ".sealed" if key is not None else ""
    prefix = f".swansong/{named('ckpt')}.{saved.id[:8]}"
    assert set(tree(series.directory)) == {
        named("ckpt"),
        ".swansong",
        f"{prefix}.json",
        f"{prefix}.rest.safetensors{sealed}",
        ".swansong/run.lock",
        ".swansong/tmp",
    }


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_a_directory_has_its_manifest_and_the_data_it_lists(series: Series, key: Any) -> None:
    for seed in (1, 2):
        saved = commit(series, named("directory"), seed=seed, key=key)
    data = f"c0-00000-{saved.id[:8]}.safetensors{'.sealed' if key is not None else ''}"
    assert set(tree(saved.path)) == {"manifest.json", data}


def test_who_may_read_is_as_narrow_as_mindspores(series: Series) -> None:
    single = commit(series, named("ckpt"), container="ckpt").path
    directory = commit(series, named("directory")).path
    (manifest,) = (series.directory / ".swansong").glob("*.json")
    modes = {
        single: 0o400,
        manifest: 0o600,
        directory: 0o700,
        directory / "manifest.json": 0o600,
        next(directory.glob("c*")): 0o400,
    }
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes


def test_with_a_key_neither_names_nor_numbers_lie_open(series: Series) -> None:
    content = {"secret_name": T(np.full(1000, 0x5EC4E7, np.int32))}
    for container in ("ckpt", "directory"):
        commit(
            series,
            named(container),
            container=container,
            key=KEY,
            tensors=content,
            objects={"secret": 1},
            append_info={"confidential": 5},
        )
    stored = b"".join(data for data in tree(series.directory).values() if data is not None)
    for private in (b"secret", b"confidential", np.full(4, 0x5EC4E7, np.int32).tobytes(), KEY.material):
        assert private not in stored


@pytest.mark.parametrize(
    ("options", "size", "direct"),
    [
        (WriterOptions(), (600_000,), True),
        (WriterOptions(direct=False), (600_000,), False),
        (WriterOptions(), (3,), True),
    ],
    ids=["direct", "not wanted", "too small to be wanted"],
)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_save_tells_whether_it_went_past_the_page_cache(
    series: Series, container: str, options: WriterOptions, size: tuple[int, ...], direct: bool
) -> None:
    writer = Writer(Files(), options)
    saved = commit(series, named(container), container=container, tensors=tensors(w=size), writer=writer)
    assert saved.direct is direct


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "how", "message"),
    [
        ("ckpt", {"rest": tensors(weight=(1,))}, "weight: two values of one name"),
        ("ckpt", {"append_info": {"weight": 1}}, "weight: two values of one name"),
        ("directory", {"append_info": {"weight": 1}}, "weight: two values of one name"),
        ("directory", {"rest": tensors(moment=(1,))}, "only a single file leaves anything out"),
        ("ckpt", {"boxes": {"weight": ((80, 30), Box((0, 0), (40, 30)))}}, "these are split"),
        (
            "directory",
            {"boxes": {"weight": ((80, 30), Box((0, 0), (40, 30)))}},
            r"'weight': \[0:40, 0:30\] is not all",
        ),
        (
            "directory",
            {"boxes": {"weight": ((4, 3), Box((0, 0), (4, 3)))}},
            r"of shape \[40, 30\] cannot fill",
        ),
        ("safetensors", {"append_info": {"note": "text"}}, "holds no strings, got 'text'"),
        ("safetensors", {"append_info": {"n": 2**64}}, "int of 64 bits"),
        ("safetensors", {"append_info": {"n": np.int64(3)}}, "int of 64 bits"),
        ("ckpt", {"append_info": {"n": 2**64}}, "does not fit into 64 bits"),
        ("ckpt", {"tensors": {"c": T(np.zeros(2, np.complex64))}}, "complex64"),
        ("directory", {"objects": {"f": print}}, "objects|print|builtin"),
        ("directory", {"objects": {"t": np.zeros(2)}}, "objects: tensors do not belong here"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_container_cannot_hold_is_refused_by_name(
    series: Series, container: str, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnrepresentableError, match=message):
        commit(series, named(container), container=container, **how)
    assert visible(series.directory) == set()
    assert set(tree(series.directory)) == {".swansong", ".swansong/run.lock", ".swansong/tmp"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"container": "safetensors", "key": KEY}, "one safetensors file cannot be encrypted"),
        ({"container": "directory", "key": KEY, "mode": "AES-CBC"}, "AES-CBC exists only"),
        ({"container": "ckpt", "key": KEY, "crc": True}, "crc"),
        ({"container": "directory", "crc": True}, "crc"),
    ],
    ids=["encrypted safetensors", "CBC directory", "crc with key", "crc directory"],
)
def test_options_that_exclude_one_another_are_refused_when_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SaveOptions(**options)
    assert KEY.material.hex() not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a/b", "x" * 201, ".swansong", "run.lock"])
def test_a_name_that_cannot_be_one_is_refused_before_anything_is_written(series: Series, name: str) -> None:
    with pytest.raises(ConfigError):
        commit(series, name, container="ckpt")
    assert list(series.space.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("container", "obstacle", "reason"),
    [
        ("ckpt", "directory", "Is a directory"),
        ("directory", "file", "Not a directory"),
        ("directory", "full directory", "Directory not empty"),
    ],
    ids=lambda value: str(value),
)
def test_what_stands_in_the_way_of_a_name_is_left_as_it_is(
    series: Series, container: str, obstacle: str, reason: str
) -> None:
    target = series.directory / "x"
    target.write_bytes(b"precious") if obstacle == "file" else target.mkdir()
    if obstacle == "full directory":
        (target / "notes").write_bytes(b"precious")
    before = tree(series.directory)
    with pytest.raises(SaveError, match=f"x: not saved: {reason}") as caught:
        commit(series, "x", container=container)
    assert caught.value.path == str(target)
    after = tree(series.directory)
    assert after.pop(".swansong/run.lock", b"") == b"1\n"
    assert after == before


# -- failures ----------------------------------------------------------------------------------------------


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
