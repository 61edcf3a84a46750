"""Loading, each byte verified, against safetensors, which verifies nothing: cold, mapped, into live tensors.

Both sides take turns, in one order and then in the other. "Cold" means that the kernel was told to drop the
file's pages before the clock starts. When it stops, ours has read and checked all of the file; theirs has
mapped it. Where every byte is touched, it is by a sum over 64-bit words, the same on both sides.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from benchmarks.bars import Bar, Finding
from safetensors.torch import load_file

from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer

TITLE = "Loading, every byte verified, against safetensors"
_TENSORS = 64
_KEY = Key(bytes(range(32)))


def findings(
    mebibytes: int, rounds: int, progress: Callable[[str], None], directory: Path | None = None
) -> list[Finding]:
    """Measure with so many MiB in 64 tensors. The ratios are of speeds: theirs / ours, in seconds."""
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=directory) as folder:
        subject = _Subject(Path(folder), mebibytes << 20)
        times = _alternate(subject, rounds, progress)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}

    def ratio(what: str, theirs: str, ours: str, bar: float | None = None) -> Finding:
        limit = Bar(bar, at_least=True) if bar is not None else None
        return Finding(what=what, value=median[theirs] / median[ours], bar=limit)

    size = f"{mebibytes} MiB"
    return [
        ratio(f"{size}, cold / load_file", "load_file, cold", "mapped, cold", 1.1),
        ratio(
            f"{size}, mapped, warm, touched / load_file",
            "load_file, warm, touched",
            "mapped, warm, touched",
            0.4,
        ),
        ratio(f"{size}, into existing, warm / load_file + copy_", "load_file + copy_", "into existing", 0.5),
        ratio("  into existing, encrypted", "load_file + copy_", "into existing, encrypted"),
        ratio("  cold, touched", "load_file, cold, touched", "mapped, cold, touched"),
        ratio("  cold, into fresh memory / load_file, touched", "load_file, cold, touched", "fresh, cold"),
        *(
            Finding(what=f"  {name}", value=median[name], unit="s", samples=tuple(seconds))
            for name, seconds in times.items()
        ),
    ]


class _Subject:
    """The same tensors, saved plain and encrypted, and live ones to be filled."""

    def __init__(self, place: Path, nbytes: int) -> None:
        chance = np.random.default_rng(0)
        count = nbytes // _TENSORS // 4
        tensors = {
            f"layer{n}.weight": HostTensor.of(chance.random(count, np.float32)) for n in range(_TENSORS)
        }
        self.plain, self.sealed = (
            _saved(place, "plain", tensors, None),
            _saved(place, "sealed", tensors, _KEY),
        )
        self.file = next(self.plain.glob("*.safetensors"))
        self.live = {name: torch.zeros(count) for name in tensors}
        self.shown = {name: HostTensor.of(tensor.numpy()) for name, tensor in self.live.items()}

    def load_file(self) -> object:
        """Theirs: views of a mapping."""
        return load_file(self.file)

    def load_file_touched(self) -> object:
        """Theirs, and every byte is had."""
        return _touched(load_file(self.file).values())

    def load_file_copied(self) -> object:
        """Theirs, into tensors that are there."""
        for name, tensor in load_file(self.file).items():
            self.live[name].copy_(tensor)
        return None

    def mapped(self) -> object:
        """Ours: views of a mapping, verified."""
        with open_checkpoint(self.plain) as checkpoint:
            return [torch.from_numpy(tensor.array) for tensor in checkpoint.map_all().values()]

    def mapped_touched(self) -> object:
        """Ours, and every byte is had."""
        with open_checkpoint(self.plain) as checkpoint:
            return _touched(torch.from_numpy(tensor.array) for tensor in checkpoint.map_all().values())

    def fresh(self) -> object:
        """Ours, in memory of its own."""
        with open_checkpoint(self.plain) as checkpoint:
            return checkpoint.read_all()

    def into(self) -> object:
        """Ours, into tensors that are there."""
        with open_checkpoint(self.plain) as checkpoint:
            checkpoint.fill(self.shown)
        return None

    def into_sealed(self) -> object:
        """Ours, into tensors that are there, decrypted."""
        with open_checkpoint(self.sealed, key=_KEY) as checkpoint:
            checkpoint.fill(self.shown)
        return None


def _alternate(subject: _Subject, rounds: int, progress: Callable[[str], None]) -> dict[str, list[float]]:
    cold: dict[str, Callable[[], object]] = {
        "load_file, cold": subject.load_file,
        "mapped, cold": subject.mapped,
        "load_file, cold, touched": subject.load_file_touched,
        "mapped, cold, touched": subject.mapped_touched,
        "fresh, cold": subject.fresh,
    }
    warm: dict[str, Callable[[], object]] = {
        "load_file, warm, touched": subject.load_file_touched,
        "mapped, warm, touched": subject.mapped_touched,
        "load_file + copy_": subject.load_file_copied,
        "into existing": subject.into,
        "into existing, encrypted": subject.into_sealed,
    }
    for load in warm.values():  # into the page cache
        load()
    times: dict[str, list[float]] = {name: [] for name in cold | warm}
    for number in range(rounds):
        progress(f"loading, round {number + 1} of {rounds}")
        order = 1 if number % 2 == 0 else -1  # whose memory was given back last matters
        for name, load in list(warm.items())[::order]:
            times[name].append(_seconds(load))
        for name, load in list(cold.items())[::order]:
            _drop(subject.file)
            times[name].append(_seconds(load))
        subject.load_file_touched()
    return times


def _seconds(load: Callable[[], object]) -> float:
    before = time.perf_counter()
    loaded = load()
    after = time.perf_counter()
    del loaded  # nobody's clock runs while memory is given back
    return after - before


def _touched(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    # By NumPy, in one thread: PyTorch's threads wait by spinning, which the next candidate would pay for.
    kept = list(tensors)
    return kept, sum(int(tensor.numpy().view(np.int64).sum()) for tensor in kept)


def _drop(path: Path) -> None:
    """Have the kernel forget a file's pages, which are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _saved(place: Path, name: str, tensors: dict[str, HostTensor], key: Key | None) -> Path:
    series = Series.fresh(place / name, "run", Files())
    saved = save(
        series,
        Writer(series.space.files),
        "run-1",
        Content(tensors=tensors),
        Point(step=1),
        kind="periodic",
        seq=series.draw(),
        options=SaveOptions(container="directory", key=key),
    )
    return saved.path
