"""Manifests made to hurt: every one costs little and ends in an error of ours."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store_support import KEY, Watched, commit
from swansong.errors import DamagedError, LoadError, NotSupportedError, SwansongError
from swansong.store import catalog
from swansong.store import manifest as module
from swansong.store.catalog import read_manifest
from swansong.store.manifest import SIZE_LIMIT, attach_tail, decode, decode_part
from swansong.store.opening import open_checkpoint
from swansong.store.series import Series
from swansong.store.verify import verify

FIELDS = {
    "format": "swansong/1",
    "id": "0" * 32,
    "name": "run-1_1.ckpt",
    "container": "ckpt",
    "series": "run",
    "stem": "run",
    "seq": 1,
    "kind": "periodic",
    "run": "r",
    "step": 1,
    "created": "2026-01-02T03:04:05.000000Z",
    "files": [],
}


def sealed_off(text: bytes) -> bytes:
    """JSON with a tail that fits: all that somebody without the key can make."""
    return attach_tail(text, None)


def with_field(name: str, value: bytes) -> bytes:
    body = json.dumps({k: v for k, v in FIELDS.items() if k != name}).encode()
    return sealed_off(body[:-1] + b"," + json.dumps(name).encode() + b":" + value + b"}")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 500,
        b"\xff" * 500,
        b"{" * 500,
        sealed_off(b"{}"),
        sealed_off(b"[]"),
        sealed_off(b'"text"'),
        sealed_off(b'{"format": "swansong/1"'),
        sealed_off(b'{"format": 1}'),
        sealed_off(b'{"format": null}'),
        sealed_off(b'{"format": "\xff\xfe"}'),
        sealed_off(b'{"format": "\\ud800"}'),
        sealed_off(b"\xef\xbb\xbf" + json.dumps(FIELDS).encode()),
    ],
    ids=[
        *("nothing", "zeros", "ones", "braces", "empty object", "list", "text", "open object", "number"),
        *("null", "no UTF-8", "lone surrogate", "byte order mark"),
    ],
)
@pytest.mark.parametrize("read", [decode, decode_part], ids=["manifest", "part"])
def test_what_is_no_manifest_is_damaged(raw: bytes, read: Any) -> None:
    for key in (None, KEY):
        with pytest.raises(DamagedError, match=r"^m: "):
            read(raw, "m", key)


@pytest.mark.parametrize(
    "field", ["objects", "append_info", "software", "invented", "tensors", "files", "format"]
)
@pytest.mark.parametrize(
    "deep",
    [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000],
    ids=["lists", "objects"],
)
def test_nesting_without_end_is_an_error_not_a_crash(field: str, deep: bytes) -> None:
    with pytest.raises(DamagedError):
        decode(with_field(field, deep), "m")


@pytest.mark.parametrize("field", ["seq", "step", "epoch", "world_size"])
@pytest.mark.parametrize(
    "number",
    [b"1" + b"0" * 400, b"1e400", b"-1e400", b"1.5", b"1" + b"0" * 100_000, b"-", b"0x10", b"NaN", b"1e5"],
    ids=len,
)
def test_a_number_that_is_no_number_of_ours_is_refused_or_read_as_what_it_is(
    field: str, number: bytes
) -> None:
    try:
        read = getattr(decode(with_field(field, number), "m"), field)
    except DamagedError:
        return
    assert isinstance(read, int)
    assert read == float(number) or str(read).encode() == number


def test_of_a_key_that_comes_twice_the_last_counts() -> None:
    assert decode(with_field("seq", b'1,"seq":2,"seq":3'), "m").seq == 3


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(
        [*FIELDS, "tensors", "objects", "append_info", "aliases", "key", "sealed", "rank_objects", "inexact"]
    ),
)
def test_any_json_in_any_field_is_read_or_refused(value: Any, field: str) -> None:
    raw = with_field(field, json.dumps(value).encode())
    for key in (None, KEY):
        try:
            decode(raw, "m", key)
        except (DamagedError, LoadError, NotSupportedError):
            continue


def test_a_file_beyond_the_size_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with path.open("wb") as file:
        file.truncate(SIZE_LIMIT + 1)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match=r"at most 536,870,912 bytes, found 536,870,913"):
            read_manifest(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- a committed checkpoint whose manifest was rewritten -------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return commit(Series.fresh(tmp_path, "run", Watched()), "run-1_1.ckpt", container="ckpt").path


def rewrite(path: Path, change: dict[str, Any]) -> None:
    """Change fields of a single file's manifest; dotted names lead into lists and objects."""
    (record,) = (path.parent / ".swansong").glob("*.json")
    body = json.loads(module.detach_tail(record.read_bytes(), "m")[0])
    for name, value in change.items():
        *way, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        inner = body
        for part in way:
            inner = inner[part]
        inner[last] = value
    record.write_bytes(attach_tail(json.dumps(body).encode(), None))


HUGE = 1 << 45


@pytest.mark.parametrize(
    "change",
    [
        {"tensors.weight.shape": [HUGE], "tensors.weight.chunks": []},
        {"tensors.weight.shape": [HUGE]},
        {"tensors.weight.shape": [1200 * 1000], "tensors.weight.chunks.0.ranges": [[200, 5000]] * 1000},
        {"tensors.weight.chunks.0.ranges": [[0, HUGE]]},
        {"tensors.weight.chunks.0.file": 7},
        {"tensors.weight.chunks.0.offset": [0, 0], "tensors.weight.chunks.0.shape": [1, 1]},
        {"tensors.weight.dtype": "object"},
        {"objects": [1]},
        {"objects": {"extra": [[[]]]}},
        {"objects": {"extra": {"dict": 7}}},
        {"append_info": {"dict": [[{"tuple": [[]]}, 1]]}},
        {"append_info": 7},
        {"files.0.name": "../../../etc/passwd"},
        {"files.0.scheme": "rot13"},
        {"files.0.scheme": "sealed"},
        {"files.0.scheme": "mindspore-AES-GCM"},
        {"files.0.piece": 1},
        {"files.0.digests": []},
        {"files.0.salt": "zz"},
        {"files": []},
        {"container": "directory"},
        {"key": {"salt": "00" * 16, "check": "é"}, "sealed": "AAAA"},
    ],
    ids=lambda change: " ".join(f"{name}={value}" for name, value in change.items())[:60],
)
def test_a_rewritten_manifest_costs_little_and_ends_in_an_error_of_ours(
    path: Path, change: dict[str, Any]
) -> None:
    rewrite(path, change)
    tracemalloc.start()
    try:
        for key in (None, KEY):
            with pytest.raises(SwansongError), open_checkpoint(path, key=key) as checkpoint:
                checkpoint.read_all()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    catalog.scan(path.parent)
    for key in (None, KEY):
        verify(path.parent, key=key)


def test_data_outside_the_directory_is_never_read(path: Path, tmp_path: Path) -> None:
    secret = tmp_path.parent / "secret.bin"
    secret.write_bytes(b"x" * 4920)
    rewrite(path, {"files.0.name": "../secret.bin", "files.0.size": 4920})
    with pytest.raises(DamagedError, match="name"), open_checkpoint(path, verify=False):
        pass


def test_a_pipe_in_a_manifests_place_is_not_waited_for(path: Path) -> None:
    (record,) = (path.parent / ".swansong").glob("*.json")
    record.unlink()
    os.mkfifo(record)
    assert [found.state for found in catalog.scan(path.parent)] == ["damaged"]
    with pytest.raises(DamagedError, match="wanted a regular file"):
        open_checkpoint(path)
