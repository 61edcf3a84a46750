"""Opening: what is read, in which order, with which key, and whoever else is at work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_support import (
    CONTAINERS,
    KEY,
    OTHER_KEY,
    Watched,
    commit,
    flip,
    named,
    overwrite,
    same,
    tensors,
)
from swansong.errors import (
    CheckpointNotFoundError,
    DamagedError,
    DigestMismatchError,
    KeyNeededError,
    LoadError,
    MalformedError,
    UnauthenticatedError,
    WrongKeyError,
)
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import catalog, opening
from swansong.store.checkpoint import Content, Point
from swansong.store.manifest import attach_tail, detach_tail
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, commit_parts, read_parts, staged, write_part
from swansong.store.series import Series
from swansong.store.source import PlainFile
from swansong.store.writer import Writer

T = HostTensor.of


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def data_of(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("c*"))


# -- reading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
def test_reading_all_in_order_reads_each_byte_of_the_data_once(
    series: Series, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = commit(
        series, named(container), container=container, tensors=tensors(w=(5_000_000,), b=(7,), c=(9,))
    )
    reads: list[tuple[int, int]] = []

    class Recording(PlainFile):
        def read_into(self, offset: int, out: Any) -> None:
            reads.append((offset, len(out)))
            super().read_into(offset, out)

    monkeypatch.setattr(opening, "PlainFile", Recording)
    with open_checkpoint(saved.path) as got:
        got.read_all()
    assert sum(length for _, length in reads) == saved.nbytes
    assert sorted(reads) == reads


def test_tensors_stay_when_the_checkpoint_is_closed_and_files_do_not(series: Series) -> None:
    path = commit(series, named("directory")).path
    before = descriptors()
    with open_checkpoint(path) as got:
        assert descriptors() > before
        read = got.read_all()
    assert descriptors() == before
    assert same(read, tensors())


def test_an_unknown_name_is_a_key_error(series: Series) -> None:
    with (
        open_checkpoint(commit(series, named("directory")).path) as got,
        pytest.raises(KeyError, match="nobody"),
    ):
        got.read("nobody")


@pytest.mark.parametrize("container", CONTAINERS)
def test_damage_is_told_by_file_offset_and_tensor_when_that_is_read(series: Series, container: str) -> None:
    path = commit(series, named(container), container=container, tensors=tensors(w=(5_000_000,), b=(7,))).path
    flip(data_of(path), (1 << 24) + 5)
    with open_checkpoint(path) as got, pytest.raises(DigestMismatchError) as caught:
        got.read("w")
    error = caught.value
    assert (error.file, error.offset, error.tensor) == (str(data_of(path)), 1 << 24, "w")
    assert error.want != error.got


@pytest.mark.parametrize("container", CONTAINERS)
def test_without_verification_a_flipped_bit_is_read_as_it_is(series: Series, container: str) -> None:
    path = commit(series, named(container), container=container).path
    data = data_of(path)
    flip(data, data.stat().st_size - 1)
    with open_checkpoint(path, verify=False) as got:
        assert not same(got.read_all(), tensors())
    with open_checkpoint(path) as got, pytest.raises(DigestMismatchError):
        got.read_all()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_cut_file_is_not_opened_verified_or_not(series: Series, container: str, verify: bool) -> None:
    path = commit(series, named(container), container=container).path
    overwrite(data_of(path), data_of(path).read_bytes()[:-1])
    with pytest.raises(MalformedError):
        open_checkpoint(path, verify=verify)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_the_rest_is_verified_too(series: Series, key: Any) -> None:
    path = commit(series, named("ckpt"), container="ckpt", key=key, rest=tensors(moment=(5,))).path
    (rest,) = (series.directory / ".swansong").glob("*.rest.*")
    flip(rest, rest.stat().st_size - 1)
    with open_checkpoint(path, key=key) as got:
        got.read_all()
        with pytest.raises(DamagedError) as caught:
            got.read("moment")
    assert (caught.value.file, caught.value.tensor) == (str(rest), "moment")


def test_a_name_in_both_names_what_the_file_has(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt", rest=tensors(moment=(5,))).path
    with open_checkpoint(path) as got:
        assert set(got.entries) == {"weight", "bias"}
        assert set(got.rest) == {"moment"}
        assert same({"moment": got.read("moment")}, tensors(moment=(5,)))


def test_an_open_checkpoint_is_read_whole_although_it_was_replaced(series: Series) -> None:
    for container in CONTAINERS:
        path = commit(series, named(container), seed=1, container=container).path
        with open_checkpoint(path) as got:
            commit(series, named(container), seed=2, container=container)
            assert same(got.read_all(), tensors(1))
        with open_checkpoint(path) as got:
            assert same(got.read_all(), tensors(2))


# -- keys --------------------------------------------------------------------------------------------------

ENCRYPTED = [
    {"container": "ckpt", "key": KEY},
    {"container": "ckpt", "key": KEY, "mode": "AES-CBC"},
    {"container": "directory", "key": KEY},
]


@pytest.mark.parametrize("how", ENCRYPTED, ids=["GCM", "CBC", "directory"])
def test_what_is_encrypted_asks_for_its_key(series: Series, how: dict[str, Any]) -> None:
    path = commit(series, named(how["container"]), **how).path
    with pytest.raises(KeyNeededError, match="encrypted; give the key"):
        open_checkpoint(path)
    with pytest.raises(WrongKeyError, match="another key than the one given"):
        open_checkpoint(path, key=OTHER_KEY)
    with open_checkpoint(path, key=KEY) as got:
        assert same(got.read_all(), tensors())


@pytest.mark.parametrize("how", ENCRYPTED, ids=["GCM", "CBC", "directory"])
@pytest.mark.parametrize("what", ["data", "manifest"])
def test_damage_is_damage_with_the_right_key(series: Series, how: dict[str, Any], what: str) -> None:
    path = commit(series, named(how["container"]), **how).path
    record = path / "manifest.json" if path.is_dir() else catalog.sidecars(path.parent)[path.name][0]
    flip(record if what == "manifest" else data_of(path))
    with pytest.raises(DamagedError), open_checkpoint(path, key=KEY) as got:
        got.read_all()


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_key_and_a_checkpoint_saved_without_one_are_refused(series: Series, container: str) -> None:
    path = commit(series, named(container), container=container).path
    with pytest.raises(UnauthenticatedError, match="a key was given, but this was saved without one"):
        open_checkpoint(path, key=KEY)
    if container != "directory":
        alone = shutil.copy(path, path.with_name(f"alone{path.suffix}"))
        with pytest.raises(UnauthenticatedError, match="a key was given, but this file is not encrypted"):
            open_checkpoint(Path(alone), key=KEY)


def test_files_of_two_checkpoints_under_one_key_cannot_be_exchanged(series: Series) -> None:
    one, other = (commit(series, named("ckpt", n), seed=n, container="ckpt", key=KEY).path for n in (1, 2))
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    overwrite(one, second)
    with pytest.raises(DigestMismatchError):
        open_checkpoint(one, key=KEY)


def test_nobody_without_the_key_can_make_a_manifest_fit_other_bytes(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt", key=KEY).path
    (record,) = catalog.sidecars(path.parent)[path.name]
    body, _ = detach_tail(record.read_bytes(), "m")
    record.write_bytes(attach_tail(body, None))
    with pytest.raises(UnauthenticatedError):
        open_checkpoint(path, key=KEY)


# -- somebody else at work ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["replaced", "removed", "pruned and swept"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_one_that_goes_while_it_is_opened_is_the_next_one_or_none(
    series: Series, container: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = named(container)
    path = commit(series, name, seed=1, container=container).path
    real, looks = opening._open, []

    def change(*arguments: Any) -> Any:
        result = real(*arguments)
        looks.append(result)
        if len(looks) == 1:
            if how == "replaced":
                commit(series, name, seed=2, container=container)
            else:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if how == "pruned and swept":
                series.sweep()
        return result

    monkeypatch.setattr(opening, "_open", change)
    before = descriptors()
    if how == "replaced":
        with open_checkpoint(path) as got:
            assert same(got.read_all(), tensors(2))
    else:
        with pytest.raises(CheckpointNotFoundError):
            open_checkpoint(path)
    assert descriptors() == before


def test_one_that_is_replaced_again_and_again_is_given_up_in_the_end(
    series: Series, files: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    real = opening._open

    def change(*arguments: Any) -> Any:
        os.utime(path)
        return real(*arguments)

    monkeypatch.setattr(opening, "_open", change)
    with pytest.raises(LoadError, match="replaced 100 times while it was being opened"):
        open_checkpoint(path)


def test_a_damaged_one_is_looked_at_three_times(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    overwrite(path, b"other")
    looks = []
    real = opening._open
    monkeypatch.setattr(opening, "_open", lambda *arguments: looks.append(1) or real(*arguments))
    with pytest.raises(MalformedError):
        open_checkpoint(path)
    assert len(looks) == 3


# -- boxes -------------------------------------------------------------------------------------------------


def test_a_tensor_in_boxes_is_put_together_where_each_belongs(series: Series) -> None:
    whole = np.arange(35, dtype=np.int16).reshape(5, 7)
    boxes = [Box((0, 0), (5, 3)), Box((0, 3), (2, 4)), Box((2, 3), (3, 4))]
    ids = [PartId(0, 0, rank) for rank in range(3)]
    with staged(series, named("directory")) as staging:
        for part, box in zip(ids, boxes, strict=True):
            content = Content(tensors={"w": T(whole[box.slices])}, boxes={"w": (whole.shape, box)})
            write_part(staging.place, staging.id, Writer(Watched()), content, part)
        taken = read_parts(staging, dict.fromkeys(ids))
        path = commit_parts(staging, taken, Point(step=1), kind="fault", seq=1).path
    with open_checkpoint(path) as got:
        assert np.array_equal(got.read("w").array, whole)
        assert got.entries["w"].nbytes == 70
