"""Runs of saves whose every operation is recorded, and what each of their checkpoints must contain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

from crash.crash_recorder import Operation, Recorder, Snapshot
from swansong.policy.keep import KeepAll, KeepLast, KeepPolicy
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import checkpoint, naming, parts, saving
from swansong.store.checkpoint import Container, Content, Mode, Point, Saved, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.parts import PartId
from swansong.store.series import Series
from swansong.store.writer import Writer, WriterOptions

SERIES = "net"
DIRECTORY = "checkpoints"
"""Where the checkpoints are, within the directory that is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A training run: one save after another, save number n (from 1) being that of step n."""

    names: tuple[str, ...]
    """Name of each save's checkpoint; a name that comes again is overwritten."""
    container: Container = "ckpt"
    rest: bool = False
    """Keep a tensor beside the single file."""
    key: Key | None = None
    mode: Mode = "AES-GCM"
    crc: bool = False
    direct: bool = False
    """Write past the page cache however small the files."""
    keep: KeepPolicy = field(default_factory=KeepAll)
    """What is pruned after each save."""
    writers: int = 1
    rank_files: bool = False
    """The one writer gives a part: a .ckpt in a directory of its rank."""
    same_content: bool = False
    """Every save has the same tensors."""
    rows: int = 36
    """Size of the largest tensor; 16 rows fill a block of the disk."""
    restart: bool = False
    """Each save is made by a run of its own, which resumes and sweeps before it saves."""

    @property
    def options(self) -> SaveOptions:
        """What the saves are told."""
        return SaveOptions(container=self.container, key=self.key, mode=self.mode, crc=self.crc)

    def writer(self, files: Files) -> Writer:
        """A writer of the wanted kind."""
        return Writer(files, WriterOptions(threads=1, direct_from_bytes=0 if self.direct else 1 << 20))

    def content(self, number: int) -> Content:
        """What save `number` puts into its checkpoint: a tensor of some blocks, and small ones."""
        chance = np.random.default_rng(0 if self.same_content else number)
        tensors = {
            "weight": HostTensor.of(chance.uniform(1, 2, (self.rows, 64)).astype(np.float32)),
            "bias": HostTensor.of(chance.uniform(1, 2, 5).astype(np.float32)),
        }
        rest = {"moment": HostTensor.of(chance.uniform(1, 2, 8).astype(np.float32))} if self.rest else {}
        return Content(tensors=tensors, rest=rest, objects={"number": number})

    def save(self, series: Series, number: int, name: str) -> Saved:
        """Save as `name`, with the series' own files; prune afterwards."""
        writer = self.writer(series.space.files)
        point = Point(step=number, epoch=1, step_in_epoch=number, world_size=self.writers)
        seq = series.draw()
        if self.rank_files:
            return self._save_rank_file(series, writer, name, number, seq)
        if self.writers == 1:
            content = self.content(number)
            return saving.save(
                series, writer, name, content, point, kind="periodic", seq=seq, options=self.options
            )
        with parts.staged(series, name) as staging:
            wanted = dict.fromkeys(PartId(1, 1, rank) for rank in range(self.writers))
            for part in wanted:
                parts.write_part(
                    staging.place, staging.id, writer, self._share(number, part.rank), part, key=self.key
                )
            taken = parts.read_parts(staging, wanted, key=self.key)
            return parts.commit_parts(staging, taken, point, kind="periodic", seq=seq, key=self.key)

    def _save_rank_file(self, series: Series, writer: Writer, name: str, number: int, seq: int) -> Saved:
        part, again = PartId(1, 1, 0), 0
        while (series.directory / f"{name}{f'_{again}' if again else ''}").exists():
            again += 1  # such a checkpoint is never replaced
        with parts.staged(series, f"{name}{f'_{again}' if again else ''}") as staging:
            parts.write_part(
                staging.place,
                staging.id,
                writer,
                self.content(number),
                part,
                key=self.key,
                container="ckpt",
                mode=self.mode,
            )
            return parts.commit_parts(
                staging,
                parts.read_parts(staging, {part: None}, key=self.key),
                Point(step=number, epoch=1, step_in_epoch=number),
                kind="fault",
                seq=seq,
                key=self.key,
                names=lambda rank, file, _: naming.rank_file(rank, file, 1, number),
            )

    def _share(self, number: int, rank: int) -> Content:
        """What one of several writers holds: rows of the weight, and rank 0 the bias."""
        whole = self.content(number)
        weight = whole.tensors["weight"]
        rows = weight.shape[0] // self.writers
        box = Box((rank * rows, 0), (rows, weight.shape[1]))
        tensors = {"weight": HostTensor.of(weight.array[box.slices])}
        if rank == 0:
            tensors["bias"] = whole.tensors["bias"]
        return Content(tensors=tensors, boxes={"weight": (weight.shape, box)}, objects=whole.objects)


def record(scenario: Scenario, root: Path, *, falling: bool = False) -> tuple[list[Operation], Snapshot]:
    """Run a scenario in `root`; return what it did, and what was there before.

    With `falling`, later checkpoints have ids that sort before earlier ones'.
    """
    files = Recorder(root)
    directory = root / DIRECTORY
    with identities(falling=falling):
        series = Series.fresh(directory, SERIES, files)
        for number, name in enumerate(scenario.names, 1):
            if scenario.restart and number > 1:
                newest = choose([directory], SERIES, key=scenario.key).newest
                assert newest is not None
                series = Series.resumed(newest, files)
                series.sweep()
            saved = scenario.save(series, number, name)
            files.returned(number)
            series.prune(scenario.keep, saved.id)
    return files.trace, files.initial


@contextmanager
def identities(*, falling: bool = False, start: int = 0x01000000) -> Iterator[None]:
    """Ids in a known order instead of random ones: which manifest is looked at first depends on it."""
    step = 0x01000000
    numbers = iter(range(0xF0000000, 0, -step) if falling else range(start, 1 << 32, step))

    class Secrets:
        @staticmethod
        def token_hex(size: int) -> str:
            return f"{next(numbers):08x}".ljust(2 * size, "0")

    with mock.patch.object(checkpoint, "secrets", Secrets):
        yield


KEY = Key(bytes(range(32)))
NEW = ("net-1_1.ckpt", "net-1_2.ckpt")
AGAIN = ("net-1_1.ckpt", "net-1_1.ckpt")
FAULTS = ("ttp_saved_checkpoints-1_1", "ttp_saved_checkpoints-1_2")
THREE = ("net-1_1.ckpt", "net-1_2.ckpt", "net-1_3.ckpt")


def _directories(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.removesuffix(".ckpt") for name in names)


SCENARIOS: dict[str, Scenario] = {
    "ckpt, new name": Scenario(names=NEW),
    "ckpt, new name, direct": Scenario(names=NEW, direct=True),
    "ckpt, overwritten": Scenario(names=AGAIN),
    "ckpt with rest, overwritten, direct": Scenario(names=AGAIN, rest=True, direct=True),
    "ckpt, overwritten by the same content": Scenario(names=AGAIN, rest=True, same_content=True),
    "ckpt, keep last 1": Scenario(names=THREE, crc=True, keep=KeepLast(1)),
    "ckpt, keep last 2": Scenario(names=(*THREE, "net-1_4.ckpt"), keep=KeepLast(2)),
    "ckpt with rest, restarted, keep last 1": Scenario(
        names=THREE, rest=True, keep=KeepLast(1), restart=True
    ),
    "ckpt, AES-GCM, overwritten": Scenario(names=AGAIN, rest=True, key=KEY),
    "ckpt, AES-CBC, new name": Scenario(names=NEW, key=KEY, mode="AES-CBC"),
    "safetensors, overwritten": Scenario(
        names=("net-1_1.safetensors", "net-1_1.safetensors"), container="safetensors"
    ),
    "safetensors, new name, direct": Scenario(
        names=("net-1_1.safetensors", "net-1_2.safetensors"), container="safetensors", direct=True
    ),
    "directory, new name": Scenario(names=_directories(NEW), container="directory"),
    "directory, new name, direct": Scenario(names=_directories(NEW), container="directory", direct=True),
    "directory, overwritten": Scenario(names=_directories(AGAIN), container="directory"),
    "directory, keep last 1": Scenario(names=_directories(THREE), container="directory", keep=KeepLast(1)),
    "directory, restarted, keep last 1": Scenario(
        names=_directories(THREE), container="directory", keep=KeepLast(1), restart=True
    ),
    "directory, sealed, overwritten": Scenario(
        names=_directories(AGAIN), container="directory", key=KEY, direct=True
    ),
    "two writers, new name, direct": Scenario(
        names=_directories(NEW), container="directory", writers=2, direct=True
    ),
    "a rank's ckpt, new name": Scenario(names=FAULTS, rank_files=True),
    "a rank's ckpt, AES-GCM, restarted, direct": Scenario(
        names=FAULTS, rank_files=True, restart=True, key=KEY, direct=True
    ),
    "two writers, overwritten": Scenario(names=_directories(AGAIN), container="directory", writers=2),
}
