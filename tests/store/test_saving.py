"""Saving: what goes in comes out, and what cannot be held is refused by name."""

from __future__ import annotations

import math
import stat
from typing import Any

import numpy as np
import pytest

from store_support import (
    CONTAINERS,
    KEY,
    FakeClock,
    commit,
    named,
    same,
    tensors,
    tree,
    visible,
)
from swansong.errors import ConfigError, SaveError, UnrepresentableError
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import safetensors
from swansong.store.catalog import find
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.saving import save
from swansong.store.series import Series
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


def test_a_directory_with_somebody_elses_manifest_is_not_replaced(series: Series) -> None:
    target = series.directory / "run-1_1"
    target.mkdir()
    (target / "manifest.json").write_text('{"name": "a web application"}')

    with pytest.raises(SaveError, match=r"manifest\.json is no checkpoint's"):
        commit(series, "run-1_1", container="directory")

    assert [path.name for path in target.iterdir()] == ["manifest.json"]
