"""One flipped bit, a cut, a missing file: wherever it is, checking and loading both say where."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_support import KEY, commit, flip, named, overwrite, same, tensors
from swansong.errors import (
    CheckpointNotFoundError,
    DamagedError,
    LoadError,
    MalformedError,
    NotCommittedError,
    SwansongWarning,
)
from swansong.state.tensors import HostTensor
from swansong.store import catalog, ckpt_messages
from swansong.store.manifest import TAIL_SIZE, Manifest
from swansong.store.opening import open_checkpoint
from swansong.store.pieces import PIECE
from swansong.store.series import Series
from swansong.store.source import PlainFile
from swansong.store.verify import verify

SEED = 271828
PLACES = 20
"""Bits that are flipped in each part of each file."""

FORMS: dict[str, dict[str, Any]] = {
    "ckpt": {"container": "ckpt", "rest": tensors(1, moment=(40, 30))},
    "ckpt with CRC": {"container": "ckpt", "crc": True},
    "ckpt, AES-GCM": {"container": "ckpt", "key": KEY, "rest": tensors(1, moment=(40, 30))},
    "ckpt, AES-CBC": {"container": "ckpt", "key": KEY, "mode": "AES-CBC"},
    "safetensors": {"container": "safetensors", "rest": tensors(1, moment=(40, 30))},
    "directory": {"container": "directory"},
    "directory, sealed": {"container": "directory", "key": KEY},
}
"""How a checkpoint may lie on disk; `rest` is a file beside it."""
EACH_FORM = pytest.mark.parametrize("form", FORMS)

PARTS = {
    "ckpt": ("header", "tensor data", "manifest", "manifest's digest", "rest header", "rest data"),
    "ckpt with CRC": ("header", "tensor data", "trailer", "manifest", "manifest's digest"),
    "ckpt, AES-GCM": (
        *("magic", "tag", "lengths", "IV", "tensor data", "manifest", "manifest's digest and MAC"),
        *("rest data", "rest tag"),
    ),
    "ckpt, AES-CBC": (
        *("magic", "lengths", "IV", "tensor data", "padding", "manifest", "manifest's digest and MAC"),
    ),
    "safetensors": ("header", "tensor data", "manifest", "manifest's digest", "rest header", "rest data"),
    "directory": ("header", "tensor data", "manifest", "manifest's digest"),
    "directory, sealed": ("tensor data", "tag", "manifest", "manifest's digest and MAC"),
}
"""The parts of each form's files. Where they lie: `spans`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A saved checkpoint and what can be done to it."""

    path: Path
    key: Any
    manifest: Manifest
    manifest_path: Path
    data: Path
    rest: Path | None

    @property
    def files(self) -> list[Path]:
        """Every file that belongs to it."""
        return [self.data, self.manifest_path, *([self.rest] if self.rest else [])]


def saved(series: Series, form: str, **content: Any) -> Sample:
    how = FORMS[form] | content
    path = commit(series, named(how["container"]), **how).path
    found = catalog.find(path)
    assert found.manifest is not None
    assert found.manifest_path is not None
    base = path if path.is_dir() else path.parent
    data, *rest = [base / record.name for record in found.manifest.files]
    return Sample(path, how.get("key"), found.manifest, found.manifest_path, data, rest[0] if rest else None)


def spans(sample: Sample, form: str, part: str) -> tuple[Path, list[tuple[int, int]]]:
    """The file that a part is in, and where: [start, stop) in stored bytes."""
    if part.startswith("manifest"):
        size = sample.manifest_path.stat().st_size
        body, tail = (0, size - TAIL_SIZE), (size - TAIL_SIZE, size)
        return sample.manifest_path, [body if part == "manifest" else tail]
    file = sample.data
    if part.startswith("rest "):
        assert sample.rest is not None
        file, part = sample.rest, part.removeprefix("rest ")
    size = file.stat().st_size
    if "AES" in form and file == sample.data:
        # magic, (tag), two lengths, initial vector, one length; then the ciphertext: see ckpt_cipher
        after_magic = 20 if "GCM" in form else 4
        places = {
            "magic": [(0, 4)],
            "tag": [(4, after_magic)],
            "lengths": [(after_magic, after_magic + 8), (after_magic + 24, after_magic + 28)],
            "IV": [(after_magic + 8, after_magic + 24)],
            "tensor data": [(after_magic + 28, size - 16)],
            "padding": [(size - 16, size)],
        }
        return file, places[part]
    if sample.key is not None:
        return file, {"tensor data": [(0, size - 16)], "data": [(0, size - 16)], "tag": [(size - 16, size)]}[
            part
        ]
    number = 0 if file == sample.data else 1
    elements = sorted(
        span
        for tensor in sample.manifest.tensors.values()
        for chunk in tensor.chunks
        for span in chunk.ranges
        if chunk.file == number
    )
    if part in ("tensor data", "data"):
        return file, elements
    if part == "trailer":
        return file, [(size - ckpt_messages.TRAILER_SIZE, size)]
    edges = [0, *(edge for span in elements for edge in span)]
    return file, list(zip(edges[::2], edges[1::2], strict=False))


def load(sample: Sample) -> dict[str, HostTensor]:
    """Read everything, the rest included."""
    with open_checkpoint(sample.path, key=sample.key) as opened:
        return opened.read_all() | {name: opened.read(name) for name in opened.rest}


@pytest.mark.parametrize(("form", "part"), [(form, part) for form, parts in PARTS.items() for part in parts])
def test_a_flipped_bit_is_named_when_checked_and_when_loaded(series: Series, form: str, part: str) -> None:
    sample = saved(series, form)
    file, where = spans(sample, form, part)
    chance = random.Random(f"{SEED} {form} {part}")
    places = [at for start, stop in where for at in range(start, stop)]
    tried = 0
    for _ in range(PLACES):
        at, bit = chance.choice(places), chance.randrange(8)
        context = f"seed {SEED}: bit {bit} of byte {at} of {file.name}"
        flip(file, at, bit)
        for key in {sample.key, None}:
            report = verify(sample.path, key=key)
            assert not report.ok, context
            assert_named(report.problems[0], file, at, part if key == sample.key else "", context)
        with pytest.raises(DamagedError) as damage:
            load(sample)
        assert_named(damage.value, file, at, part, context)
        assert str(file) in str(damage.value), context
        flip(file, at, bit)
        tried += 1
    assert tried == PLACES
    assert verify(sample.path, key=sample.key).ok
    assert load(sample).keys() >= tensors().keys()


def assert_named(what: Any, file: Path, at: int, part: str, context: str) -> None:
    """`what` has the attributes file, offset and tensor; files here have one piece, names may be sealed."""
    assert what.file == str(file), context
    assert what.offset is not None, context
    assert what.offset <= at, context
    if "data" in part:
        assert what.tensor in ({"moment"} if part.startswith("rest") else {"weight", "bias"}), context


@pytest.mark.parametrize("form", ["ckpt", "ckpt, AES-GCM", "directory", "directory, sealed"])
def test_in_a_large_file_the_piece_and_a_tensor_in_it_are_named(series: Series, form: str) -> None:
    chance = random.Random(f"{SEED} {form}")
    content = {
        name: HostTensor.of(np.random.default_rng(i).integers(0, 255, 9_000_000, np.uint8))
        for i, name in enumerate("abcde")
    }
    sample = saved(series, form, tensors=content)
    size = sample.data.stat().st_size
    assert size > 2 * PIECE
    for _ in range(8):
        at = chance.randrange(size)
        flip_in_place(sample.data, at)
        (problem,) = (
            verify(sample.path).problems if sample.key is None else verify(sample.path, key=KEY).problems
        )
        with pytest.raises(DamagedError) as damage:
            load(sample)
        flip_in_place(sample.data, at)
        start = at // PIECE * PIECE
        there = {"abcde"[min(4, i // 9_000_000)] for i in range(start, min(start + PIECE, size), 1000)}
        for found in (problem, damage.value):
            assert (found.file, found.offset) == (str(sample.data), start), f"seed {SEED}, byte {at}"
            assert found.tensor in there, f"seed {SEED}, byte {at}"


@pytest.mark.parametrize(
    ("form", "content"),
    [
        # What precedes the elements, 30 bytes here, and they fill a piece: the trailer has one of its own.
        pytest.param("ckpt with CRC", np.zeros(PIECE - 30, np.uint8), id="trailer alone in its piece"),
        pytest.param("directory", np.zeros((0, 3), np.float32), id="no elements at all"),
        pytest.param("directory, sealed", np.zeros((0, 3), np.float32), id="no elements at all, sealed"),
        pytest.param("ckpt, AES-GCM", np.zeros((0, 3), np.float32), id="no elements at all, encrypted"),
    ],
)
def test_a_piece_that_holds_no_tensor_is_checked_on_loading_too(
    series: Series, form: str, content: np.ndarray[Any, Any]
) -> None:
    sample = saved(series, form, tensors={"t": HostTensor.of(content)}, rest={})
    size = sample.data.stat().st_size
    if content.size:
        assert sample.manifest.tensors["t"].chunks[0].ranges[0][1] == PIECE
        assert size == PIECE + ckpt_messages.TRAILER_SIZE
    load(sample)
    flip_in_place(sample.data, size - 1)
    with pytest.raises(DamagedError) as damage:
        load(sample)
    assert (damage.value.file, damage.value.offset) == (str(sample.data), (size - 1) // PIECE * PIECE)


def flip_in_place(path: Path, at: int) -> None:
    """Flip the lowest bit of a byte of a large file."""
    path.chmod(0o600)
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


# -- cuts


def boundaries(sample: Sample) -> Iterator[int]:
    """Where messages of a plain .ckpt begin, and where the last one ends."""
    with sample.data.open("rb") as file:
        scan = ckpt_messages.Scan(PlainFile(file.fileno(), str(sample.data)))
        yield 0
        yield from (value.content[1] for value in scan.values())


@pytest.mark.parametrize("form", ["ckpt", "ckpt with CRC"])
def test_a_ckpt_cut_between_two_messages_is_refused_while_its_manifest_is_there(
    series: Series, form: str
) -> None:
    sample = saved(series, form, tensors=tensors(0, **{f"layer{i}": (i, 3) for i in range(1, 9)}))
    whole = sample.data.read_bytes()
    cuts = [at for at in boundaries(sample) if at < len(whole)]
    assert len(cuts) >= 8
    for at in cuts:
        overwrite(sample.data, whole[:at])
        assert_refused(sample, at)
        if at:  # MindSpore, and this library without the manifest, take it for a shorter file
            alone = sample.data.with_name("alone.ckpt")
            overwrite_new(alone, whole[:at])
            with open_checkpoint(alone) as opened:
                assert len(opened.read_all()) < 8 or form == "ckpt with CRC"


@EACH_FORM
def test_a_file_cut_at_any_byte_is_refused(series: Series, form: str) -> None:
    small = {name: HostTensor.of(np.arange(3, dtype=np.float32)) for name in ("a", "b")}
    sample = saved(series, form, tensors=small)
    whole = sample.data.read_bytes()
    step = 1 if len(whole) < 1000 else 61  # a native file begins with 4 KiB of header
    cuts = range(0, len(whole), step)
    assert len(cuts) > 60
    for at in cuts:
        overwrite(sample.data, whole[:at])
        assert_refused(sample, at)


def assert_refused(sample: Sample, at: int) -> None:
    report = verify(sample.path, key=sample.key)
    assert [problem.file for problem in report.problems] == [str(sample.data)], f"cut at byte {at}"
    with pytest.raises(MalformedError, match="not the committed content") as damage:
        load(sample)
    assert damage.value.file == str(sample.data), f"cut at byte {at}"


def overwrite_new(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# -- missing files


@EACH_FORM
def test_each_missing_file_is_named(series: Series, form: str) -> None:
    sample = saved(series, form)
    for file in sample.files:
        content = file.read_bytes()
        file.unlink()
        if file != sample.manifest_path:
            with pytest.raises(LoadError, match=str(file)):
                load(sample)
        assert_told_missing(sample, file)
        overwrite_new(file, content)
    assert same(load(sample), tensors() | FORMS[form].get("rest", {}))


def assert_told_missing(sample: Sample, file: Path) -> None:
    """What checking says, and what a file without its manifest counts as."""
    if file == sample.path:
        with pytest.raises(CheckpointNotFoundError, match=str(file)):
            verify(sample.path, key=sample.key)
    elif file != sample.manifest_path:
        problem = verify(sample.path, key=sample.key).problems[0]
        assert str(file) in problem.what
        assert problem.path == str(sample.path)
    elif sample.path.is_dir():
        for place in (sample.path, sample.path.parent):
            (problem,) = verify(place, key=sample.key).problems
            assert str(file.name) in problem.what
        with pytest.raises(NotCommittedError, match=r"manifest\.json"):
            load(sample)
    else:
        # Nothing tells such a file from one that MindSpore has written: it loads, as unverified.
        assert catalog.find(sample.path).state == "unverified"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SwansongWarning)
            with open_checkpoint(sample.path, key=sample.key) as opened:
                assert opened.manifest is None
                assert same(opened.read_all(), tensors())


def test_every_part_of_every_form_is_flipped() -> None:
    kinds: Mapping[str, str] = {part: form for form, parts in PARTS.items() for part in parts}
    assert PARTS.keys() == FORMS.keys()
    assert {"header", "manifest", "tensor data", "IV", "tag", "trailer", "rest data"} <= kinds.keys()
