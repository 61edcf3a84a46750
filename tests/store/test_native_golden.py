"""Bytes that must not change: with all randomness held still, what is written is what lies in tests/golden.

A change of the format changes these files on purpose: `write_all(GOLDEN)` makes them anew.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from store_support import KEY, FakeClock, buffered, same, tree
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import checkpoint, crypt, saving
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, commit_parts, read_parts, staged, write_part
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.verify import verify

GOLDEN = Path(__file__).parents[1] / "golden"
PLACES = ("native_plain", "native_sealed", "native_parts", "native_single")
T = HostTensor.of
W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
TENSORS = {
    "w": T(W),
    "half": T(np.arange(5, dtype=np.uint16), dtype="bfloat16"),
    "z": T(np.array([1 + 2j, -0.0], np.complex128)),
    "step": T(np.array(7, np.int64)),
    "empty": T(np.zeros((0, 3), np.float64)),
    "mask": T(np.array([True, False])),
}
SINGLE = {name: TENSORS[name] for name in ("w", "half", "step", "mask")}


@contextmanager
def nothing_random() -> Iterator[None]:
    """Ids count up; salts and nonces are made of them; the release is called 0."""
    numbers = itertools.count(1)
    with (
        mock.patch.object(checkpoint.secrets, "token_hex", lambda size: f"{next(numbers):08x}" * (size // 4)),
        mock.patch.object(crypt.os, "urandom", lambda size: bytes([next(numbers)]) * size),
        mock.patch.object(saving, "VERSION", "0"),
    ):
        yield


def content(tensors: dict[str, HostTensor], **more: object) -> Content:
    return Content(
        tensors=tensors,
        aliases={"tied": "w"},
        objects={"seed": 1, "history": [0.1, float("inf"), None], "by step": {7: (b"\0\xff", "é")}},
        inexact=({"what": "dropout", "reason": "not reproducible"},),
        **more,  # type: ignore[arg-type]
    )


def write(place: str, directory: Path) -> Path:
    """Write one of PLACES below `directory`; return the checkpoint."""
    files = Files()
    series = Series.fresh(directory / place, "run", files)
    point = Point(step=107, epoch=3, step_in_epoch=7, boundary_step=105, world_size=2)
    if place == "native_parts":
        with staged(series, "run-3_7") as staging:
            for rank, rows in enumerate((slice(0, 2), slice(2, 3))):
                box = Box((rows.start, 0), W[rows].shape)
                part = Content(tensors={"w": T(W[rows])}, boxes={"w": (W.shape, box)}, objects={"rank": rank})
                write_part(staging.place, staging.id, buffered(files), part, PartId(1, 0, rank))
            ids = dict.fromkeys(PartId(1, 0, rank) for rank in range(2))
            taken = read_parts(staging, ids)
            return commit_parts(staging, taken, point, kind="fault", seq=series.draw(), time=FakeClock()).path
    single = place == "native_single"
    if single:
        what = content(SINGLE, rest={"moment": T(-W)}, append_info={"epoch_num": 3, "lr": 0.1, "note": "x"})
    else:
        what = content(TENSORS, skeleton={"dict": [["w", {"tensor": "w"}]]})
    options = SaveOptions(
        container="ckpt" if single else "directory", key=KEY if place == "native_sealed" else None, crc=single
    )
    name = "run-3_7.ckpt" if single else "run-3_7"
    return save(
        series,
        buffered(files),
        name,
        what,
        point,
        kind="requested",
        seq=series.draw(),
        options=options,
        time=FakeClock(),
    ).path


def write_all(directory: Path) -> None:
    """Make the golden files anew."""
    for place in PLACES:
        shutil.rmtree(directory / place, ignore_errors=True)
        with nothing_random():
            write(place, directory)
        control = directory / place / ".swansong"
        (control / "run.lock").unlink()
        (control / "tmp").rmdir()
        if place != "native_single":
            control.rmdir()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_is_the_golden_file_to_the_byte(place: str, tmp_path: Path) -> None:
    with nothing_random():
        write(place, tmp_path)
    written = {name: data for name, data in tree(tmp_path / place).items() if data is not None}
    del written[".swansong/run.lock"]
    golden = {name: data for name, data in tree(GOLDEN / place).items() if data is not None}
    assert written.keys() == golden.keys()
    for name, data in golden.items():
        assert written[name] == data, name


@pytest.mark.parametrize("place", PLACES)
def test_the_golden_file_is_read_and_verifies(place: str) -> None:
    key = KEY if place == "native_sealed" else None
    single = place == "native_single"
    path = GOLDEN / place / ("run-3_7.ckpt" if single else "run-3_7")
    assert verify(path, key=key).ok
    with open_checkpoint(path, key=key) as got:
        if place == "native_parts":
            assert same({"w": got.read("w")}, {"w": T(W)})
            assert got.objects == {"rank": 0}
            return
        want = SINGLE if single else TENSORS
        assert same({name: got.read(name) for name in want}, want)
        assert same({"x": got.read("tied")}, {"x": T(W)})
        assert got.objects == content({}).objects
        if single:
            assert same({"moment": got.read("moment")}, {"moment": T(-W)})
            assert got.append_info == {"epoch_num": 3, "lr": 0.1, "note": "x"}
