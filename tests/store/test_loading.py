"""Every way to load gives the same values, and none of them a byte of a damaged piece."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_support import KEY, commit, named, overwrite, same, tensors
from swansong.errors import ConfigError, DamagedError, LoadError, MalformedError
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content, Point
from swansong.store.files import Files
from swansong.store.opening import Checkpoint, open_checkpoint
from swansong.store.parts import PartId, commit_parts, read_parts, staged, write_part
from swansong.store.pieces import PIECE
from swansong.store.series import Series
from swansong.store.source import PlainFile
from swansong.store.stored import Placed
from swansong.store.writer import Writer

FORMS: dict[str, dict[str, Any]] = {
    "directory": {"container": "directory"},
    "directory, sealed": {"container": "directory", "key": KEY},
    "safetensors": {"container": "safetensors"},
    "ckpt": {"container": "ckpt"},
    "ckpt, AES-GCM": {"container": "ckpt", "key": KEY},
    "ckpt, AES-CBC": {"container": "ckpt", "key": KEY, "mode": "AES-CBC"},
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)

CONTENT = {
    "a": HostTensor.of(np.random.default_rng(1).integers(0, 255, 9_000_000, np.uint8)),
    "b": HostTensor.of(np.random.default_rng(2).normal(size=(3, 1_000_001)).astype(np.float32)),
    "c": HostTensor.of(np.array(7.5)),
    "d": HostTensor.of(np.zeros((0, 5), np.int16)),
    "e": HostTensor.of(np.random.default_rng(3).normal(size=(2_300_000,))),
}
"""39 MB: three pieces."""


def filled(checkpoint: Checkpoint, threads: int | None = None) -> dict[str, HostTensor]:
    targets = {name: tensor.empty() for name, tensor in checkpoint.entries.items()}
    checkpoint.fill(targets, threads=threads)
    return targets


WAYS: dict[str, Callable[[Checkpoint], dict[str, HostTensor]]] = {
    "read": lambda checkpoint: {name: checkpoint.read(name) for name in checkpoint.entries},
    "read_all": Checkpoint.read_all,
    "read_all, 1 thread": lambda checkpoint: checkpoint.read_all(threads=1),
    "read_all, 5 threads": lambda checkpoint: checkpoint.read_all(threads=5),
    "fill": filled,
    "fill, 1 thread": lambda checkpoint: filled(checkpoint, 1),
    "map_all": Checkpoint.map_all,
    "map_all, 1 thread": lambda checkpoint: checkpoint.map_all(threads=1),
    "each": lambda checkpoint: dict(checkpoint.each(checkpoint.entries)),
}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint of CONTENT."""

    path: Path
    key: Any

    @property
    def data(self) -> Path:
        return self.path if self.path.is_file() else next(self.path.glob("c*"))

    def open(self) -> Checkpoint:
        return open_checkpoint(self.path, key=self.key)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    made = {}
    for form, how in FORMS.items():
        series = Series.fresh(tmp_path_factory.mktemp("samples") / "saved", "run", Files())
        path = commit(series, named(how["container"]), **how, tensors=CONTENT).path
        made[form] = Sample(path, how.get("key"))
    return made


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if "swansong" in thread.name]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class flipped:
    """A bit of a file is another one meanwhile."""

    def __init__(self, path: Path, at: int) -> None:
        self._path, self._at = path, at

    def __enter__(self) -> None:
        self._path.chmod(0o600)
        self._change()

    def __exit__(self, *exception: object) -> None:
        self._change()

    def _change(self) -> None:
        with self._path.open("r+b") as file:
            file.seek(self._at)
            (byte,) = file.read(1)
            file.seek(self._at)
            file.write(bytes([byte ^ 16]))


# -- the same values ---------------------------------------------------------------------------------------


@EACH_FORM
@EACH_WAY
def test_every_way_gives_what_was_saved(samples: dict[str, Sample], form: str, way: str) -> None:
    with samples[form].open() as checkpoint:
        got = WAYS[way](checkpoint)
    assert same(got, CONTENT)


@pytest.mark.parametrize("way", ["read_all", "fill", "map_all"])
def test_without_verification_and_without_manifest_too(
    samples: dict[str, Sample], way: str, tmp_path: Path
) -> None:
    with open_checkpoint(samples["ckpt"].path, verify=False) as checkpoint:
        assert same(WAYS[way](checkpoint), CONTENT)
    for form in ("ckpt", "safetensors"):
        alone = Path(shutil.copy(samples[form].path, tmp_path))
        with open_checkpoint(alone) as checkpoint:
            assert same(WAYS[way](checkpoint), CONTENT)


def test_memory_of_any_strides_is_filled_and_what_lies_between_stays(samples: dict[str, Sample]) -> None:
    spread = np.full((3, 2_000_002), -1, np.float32)
    turned = np.empty((1_000_001, 3), np.float32).T
    with samples["directory, sealed"].open() as checkpoint:
        checkpoint.fill({"b": HostTensor.of(spread[:, ::2])})
        checkpoint.fill({"b": HostTensor.of(turned)})
    assert np.array_equal(spread[:, ::2], CONTENT["b"].array)
    assert np.all(spread[:, 1::2] == -1)
    assert np.array_equal(turned, CONTENT["b"].array)


@pytest.mark.parametrize("way", ["read", "read_all", "fill", "map_all", "each"])
def test_boxes_come_together_in_every_way(series: Series, way: str) -> None:
    whole = np.arange(3500, dtype=np.int16).reshape(50, 70)
    boxes = [Box((0, 0), (50, 30)), Box((0, 30), (20, 40)), Box((20, 30), (30, 40))]
    ids = [PartId(0, 0, rank) for rank in range(3)]
    with staged(series, named("directory")) as staging:
        for part, box in zip(ids, boxes, strict=True):
            content = Content(
                tensors={"w": HostTensor.of(whole[box.slices])}, boxes={"w": (whole.shape, box)}
            )
            write_part(staging.place, staging.id, Writer(Files()), content, part)
        path = commit_parts(
            staging, read_parts(staging, dict.fromkeys(ids)), Point(step=1), kind="fault", seq=1
        ).path
    with open_checkpoint(path) as checkpoint:
        assert np.array_equal(WAYS[way](checkpoint)["w"].array, whole)


def test_a_box_without_dimensions_goes_where_it_belongs() -> None:
    whole = np.array(0.0)
    placed = Placed(None, None, Box((), ()))  # type: ignore[arg-type]
    placed.target(whole)[...] = 3.0
    assert whole == 3.0


def test_what_is_mapped_can_be_written_without_the_file_noticing(samples: dict[str, Sample]) -> None:
    before = samples["directory"].data.read_bytes()
    with samples["directory"].open() as checkpoint:
        mapped = checkpoint.map_all()
        assert checkpoint.map_all()["a"].array is mapped["a"].array
    mapped["a"].array[...] = 0
    assert not mapped["a"].array.any()
    assert samples["directory"].data.read_bytes() == before


def test_what_is_mapped_stays_when_the_checkpoint_is_replaced(series: Series) -> None:
    path = commit(series, named("directory"), seed=1).path
    with open_checkpoint(path) as checkpoint:
        mapped = checkpoint.map_all()
    commit(series, named("directory"), seed=2)
    assert same(mapped, tensors(1))


def test_the_mapping_is_let_go_with_its_last_tensor(samples: dict[str, Sample]) -> None:
    before = descriptors()
    with samples["directory"].open() as checkpoint:
        mapped = checkpoint.map_all()
    assert descriptors() == before + 1
    del mapped
    assert descriptors() == before


# -- damage ------------------------------------------------------------------------------------------------


@EACH_FORM
@EACH_WAY
def test_a_flipped_bit_in_any_piece_is_named_and_nothing_is_returned(
    samples: dict[str, Sample], form: str, way: str
) -> None:
    sample = samples[form]
    size = sample.data.stat().st_size
    assert size > 2 * PIECE
    for at in (PIECE - 1000, PIECE, 2 * PIECE - 1, size - 3000):
        with (
            flipped(sample.data, at),
            pytest.raises(DamagedError) as damage,
            sample.open() as checkpoint,
        ):
            WAYS[way](checkpoint)
        error = damage.value
        assert (error.file, error.offset) == (str(sample.data), at // PIECE * PIECE)
        assert error.tensor in CONTENT


@EACH_FORM
def test_nothing_is_written_into_live_memory_if_anything_is_damaged(
    samples: dict[str, Sample], form: str
) -> None:
    sample = samples[form]
    live = {name: HostTensor(tensor.dtype, tensor.array.copy()) for name, tensor in CONTENT.items()}
    for tensor in live.values():
        tensor.array[...] = 1
    with flipped(sample.data, 2 * PIECE + 7), pytest.raises(DamagedError), sample.open() as checkpoint:
        checkpoint.fill(live)
    assert all(np.all(tensor.array == 1) for tensor in live.values())


@pytest.mark.parametrize("form", ["directory", "directory, sealed", "ckpt, AES-GCM"])
def test_what_changes_after_it_was_verified_is_not_copied_and_the_error_says_what_may_have_been(
    samples: dict[str, Sample], form: str
) -> None:
    sample = samples[form]
    with sample.open() as checkpoint:
        checkpoint.verify()
        target = CONTENT["e"].array * 0
        with flipped(sample.data, PIECE + 7), pytest.raises(DamagedError) as damage:
            checkpoint.fill({"e": HostTensor.of(target)}, threads=1)
    assert "has been changed while it was being loaded" in damage.value.__notes__[0]
    assert all(value in (0.0, want) for value, want in zip(target, CONTENT["e"].array, strict=True))
    assert not target.all()


def test_of_several_damaged_pieces_the_first_is_told(samples: dict[str, Sample]) -> None:
    sample = samples["directory"]
    with flipped(sample.data, PIECE + 7), flipped(sample.data, 2 * PIECE + 7):
        for way in ("read_all", "read_all, 5 threads", "map_all", "fill"):
            with sample.open() as checkpoint, pytest.raises(DamagedError) as damage:
                WAYS[way](checkpoint)
            assert damage.value.offset == PIECE


@pytest.mark.parametrize("way", ["read_all", "map_all", "fill", "each"])
@pytest.mark.parametrize("form", ["directory", "directory, sealed"])
def test_a_file_cut_short_after_it_was_opened_is_an_error(series: Series, form: str, way: str) -> None:
    content = {"w": HostTensor.of(np.arange(9_000_000, dtype=np.float32))}
    sample = Sample(
        commit(series, named("directory"), **FORMS[form], tensors=content).path, FORMS[form].get("key")
    )
    with sample.open() as checkpoint:
        overwrite(sample.data, sample.data.read_bytes()[: PIECE + 5000])
        with pytest.raises(MalformedError, match="ended at byte"):
            WAYS[way](checkpoint)


# -- wrong use -----------------------------------------------------------------------------------------------


def test_live_memory_that_does_not_fit_is_refused_before_anything_is_written(
    samples: dict[str, Sample],
) -> None:
    live = {"a": HostTensor.of(np.ones(9_000_000, np.uint8))}
    fixed = np.empty(())
    fixed.flags.writeable = False
    with samples["directory"].open() as checkpoint:
        for name, tensor, error, what in (
            ("x", live["a"], LoadError, "holds no tensor 'x'"),
            ("b", live["a"], LoadError, r"wanted uint8 \[9000000\], found float32 \[3, 1000001\]"),
            ("c", HostTensor.of(fixed), ConfigError, "memory that can be written"),
        ):
            with pytest.raises(error, match=what):
                checkpoint.fill(live | {name: tensor})
    assert np.all(live["a"].array == 1)


# -- errors of the system, and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "^C"])
@pytest.mark.parametrize("way", ["read_all", "fill"])
def test_an_error_in_one_thread_ends_them_all(
    samples: dict[str, Sample], way: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlainFile.read_into

    def read_into(self: PlainFile, offset: int, out: Any) -> None:
        if offset == PIECE:
            raise error
        real(self, offset, out)

    with samples["directory"].open() as checkpoint:
        monkeypatch.setattr(PlainFile, "read_into", read_into)
        with pytest.raises(type(error)):
            WAYS[way](checkpoint)


_PEAK = """
import sys
from pathlib import Path
import numpy as np
from swansong.state.tensors import HostTensor
from swansong.store.crypt import Key
from swansong.store.opening import open_checkpoint

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024

path, key = Path(sys.argv[1]), sys.argv[2]
live = {f"w{n}": HostTensor.of(np.ones(1 << 22, np.float32)) for n in range(16)}
with open_checkpoint(path, key=Key(bytes.fromhex(key)) if key else None) as checkpoint:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    checkpoint.fill(live)
    print(memory("VmHWM") - before, live["w15"].array[5])
"""


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_filling_live_memory_takes_64_mib_more_at_most_whatever_the_size(series: Series, key: Any) -> None:
    content = {f"w{n}": HostTensor.of(np.full(1 << 22, n, np.float32)) for n in range(16)}
    path = commit(series, named("directory"), container="directory", key=key, tensors=content).path
    assert sum(tensor.nbytes for tensor in content.values()) == 256 << 20
    text = key.material.hex() if key is not None else ""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path), text], capture_output=True, text=True, check=True
    )
    extra, value = done.stdout.split()
    assert float(value) == 15.0
    assert int(extra) <= 64 << 20
