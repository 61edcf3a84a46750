"""Which of several manifests vouches for a file, and what is said if none does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from store_support import commit, flip, named, overwrite, tensors
from swansong.errors import DigestMismatchError, MalformedError, NotSupportedError
from swansong.store import manifest as manifests
from swansong.store import naming
from swansong.store.catalog import Found, find, match, same_content, scan, sidecars
from swansong.store.manifest import attach_tail, detach_tail
from swansong.store.series import Series
from swansong.store.source import PlainFile, open_regular


def sidecar(path: Path) -> Path:
    (found,) = sidecars(path.parent)[path.name]
    return found


def raw_manifest(path: Path) -> Path:
    return path / "manifest.json" if path.is_dir() else sidecar(path)


def make_newer(path: Path) -> None:
    record = raw_manifest(path)
    body, _ = detach_tail(record.read_bytes(), "m")
    record.write_bytes(attach_tail(body.replace(b"swansong/1", b"swansong/9"), None))


def matched(path: Path, candidates: list[Path]) -> tuple[Any, Any]:
    descriptor = open_regular(path)
    try:
        return match(PlainFile(descriptor, str(path)), candidates)
    finally:
        os.close(descriptor)


def test_of_several_manifests_of_one_size_the_content_decides(series: Series) -> None:
    name = named("ckpt")
    older = commit(series, name, seed=1, container="ckpt")
    kept = sidecar(older.path).read_bytes()
    newer = commit(series, name, seed=2, container="ckpt")
    assert older.nbytes == newer.nbytes
    for id8 in ("00000000", "ffffffff"):
        (series.directory / ".swansong" / naming.sidecar(name, id8)).write_bytes(kept)
    assert len(sidecars(series.directory)[name]) == 3
    (found,) = scan(series.directory)
    assert found.manifest is not None
    assert found.manifest.id == newer.id


@pytest.mark.parametrize("id8", ["00000000", "ffffffff"])
def test_the_manifest_of_a_later_save_that_came_to_nothing_does_not_count(series: Series, id8: str) -> None:
    name = named("ckpt")
    newer = commit(series, name, seed=2, container="ckpt", step=2)
    leftover = sidecar(newer.path).read_bytes()
    newer.path.unlink()
    series.sweep()
    older = commit(series, name, seed=1, container="ckpt", step=1)
    body, _ = detach_tail(leftover, "m")
    later = attach_tail(body.replace(b'"seq":1,', b'"seq":9,'), None)
    (series.directory / ".swansong" / naming.sidecar(name, id8)).write_bytes(later)
    found = find(older.path)
    assert found.manifest is not None
    assert (found.manifest.id, found.manifest.step) == (older.id, 1)


@pytest.mark.parametrize("id8", ["00000000", "ffffffff"])
def test_of_several_manifests_of_one_content_the_latest_counts(series: Series, id8: str) -> None:
    name = named("ckpt")
    older = commit(series, name, container="ckpt")
    kept = sidecar(older.path).read_bytes()
    newer = commit(series, name, container="ckpt")
    (series.directory / ".swansong" / naming.sidecar(name, id8)).write_bytes(kept)
    found = find(newer.path)
    assert found.manifest is not None
    assert found.manifest.id == newer.id


def test_no_manifest_is_no_problem_but_one_that_has_gone_is(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    assert matched(path, []) == (None, None)
    claim, problem = matched(path, [series.directory / ".swansong" / naming.sidecar(path.name, "00000000")])
    assert claim is None
    assert isinstance(problem, MalformedError)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (flip, DigestMismatchError),
        (lambda path: path.write_bytes(b""), MalformedError),
        (lambda path: make_newer(path.parents[1] / named("ckpt")), NotSupportedError),
    ],
    ids=["bit flipped", "emptied", "newer format"],
)
def test_the_only_manifests_own_error_is_passed_on(
    series: Series, spoil: Any, error: type[Exception]
) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    record = sidecar(path)
    spoil(record)
    claim, problem = matched(path, [record])
    assert claim is None
    assert type(problem) is error
    assert str(record) in str(problem)


def test_of_several_problems_all_are_told(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    record = sidecar(path)
    other = record.with_name(naming.sidecar(path.name, "00000000"))
    other.write_bytes(b"nonsense")
    overwrite(path, b"other content")
    _, problem = matched(path, [other, record])
    assert isinstance(problem, MalformedError)
    assert "'nonsense'" in str(problem)
    assert "it has 13 bytes" in str(problem)


def test_a_manifest_of_a_directory_vouches_for_no_file(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    record = commit(series, named("directory")).path / "manifest.json"
    _, problem = matched(path, [record])
    assert "vouches for no single file" in str(problem)


@pytest.mark.parametrize(
    ("at", "whole", "sample"),
    [(0, False, False), (1 << 24, False, True), (-1, False, False), (None, True, True)],
    ids=["first piece", "a piece in the middle", "last piece", "nothing"],
)
def test_content_is_compared_whole_or_at_both_ends(
    series: Series, at: int | None, whole: bool, sample: bool
) -> None:
    saved = commit(series, named("ckpt"), container="ckpt", tensors=tensors(w=(9_000_000,)))
    record = manifests.decode(sidecar(saved.path).read_bytes(), "m").files[0]
    if at is not None:
        flip(saved.path, at % saved.nbytes)
    descriptor = open_regular(saved.path)
    try:
        data = PlainFile(descriptor, "f")
        assert len(record.digests) == 3
        assert same_content(data, record) is whole
        assert same_content(data, record, sample=True) is sample
    finally:
        os.close(descriptor)


def test_a_found_shows_its_name(tmp_path: Path) -> None:
    assert Found(path=tmp_path / "x.ckpt", state="unverified", nbytes=0, modified=0.0).name == "x.ckpt"
