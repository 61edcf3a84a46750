"""Several writers, one checkpoint: each puts a part into a shared temporary directory, one commits.

A part is data files plus a durable record, written last. Names carry generation, attempt and rank and are
created exclusively, so that a late or replaced writer can hurt nobody. The committer takes the parts it was
told to take, checks that together they hold every element exactly once, removes what no part lists, and
publishes the directory like any other. docs/format.md, section 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swansong.errors import DamagedError, SaveError, SwansongError
from swansong.state.boxes import Box, coverage
from swansong.store import catalog, clock, naming
from swansong.store.checkpoint import Content, Kind, Point, Saved, new_id, short
from swansong.store.clock import Clock, SystemClock
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.manifest import Chunk, FileRecord, Part, TensorRecord, decode_part, encode
from swansong.store.saving import manifest_of, objects_of, publish_directory, write_data
from swansong.store.series import Series
from swansong.store.writer import Writer, save_error


class PartId(NamedTuple):
    """Which contribution: a writer that is replaced or tries again has another one."""

    generation: int
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The shared temporary directory of one checkpoint. What writers need to be told is `place` and `id`."""

    series: Series
    name: str
    id: str
    place: Path


@contextmanager
def staged(series: Series, name: str) -> Iterator[Staged]:
    """Open the shared directory; the committer holds it. What is not committed in the block is removed."""
    naming.checked_name(name)
    identity = new_id()
    with series.space.reserve(name, short(identity)) as place:
        series.space.files.make_directory(place, 0o700)
        yield Staged(series, name, identity, place)


def write_part(
    place: Path, identity: str, writer: Writer, content: Content, part: PartId, *, key: Key | None = None
) -> None:
    """Contribute `content` (whole tensors, or boxes of split ones) to the checkpoint put together in `place`.

    Durable when it returns. Raises SaveError; nothing of the part is then taken by a committer.
    """
    names = (naming.staged_data_file(*part, number, sealed=key is not None) for number in itertools.count())
    try:
        files, tensors, _ = write_data(writer, place, content, names, key)
        record = Part(
            id=identity,
            generation=part.generation,
            attempt=part.attempt,
            rank=part.rank,
            files=files,
            tensors=tensors,
            aliases=dict(content.aliases),
            objects=objects_of(content),
            inexact=[dict(entry) for entry in content.inexact],
        )
        writer.files.write_small(place / naming.part(*part), encode(record, key))
        writer.files.sync_directory(place)
    except OSError as error:
        raise save_error(error, place / naming.part(*part), content.nbytes) from error


def await_parts(
    staging: Staged,
    wanted: Sequence[PartId],
    *,
    idle_s: float,
    sleep: Callable[[float], None],
    time: Clock | None = None,
) -> None:
    """Wait until every wanted part is there. The deadline moves with progress.

    Raises SaveError naming the parts that are missing when for `idle_s` seconds nothing in the directory has
    grown.
    """
    time = time or SystemClock()
    seen: tuple[int, int] = (-1, -1)
    deadline = time.monotonic() + idle_s
    while missing := [part for part in wanted if not (staging.place / naming.part(*part)).exists()]:
        progress = _progress(staging.place)
        if progress != seen:
            seen, deadline = progress, time.monotonic() + idle_s
        elif time.monotonic() >= deadline:
            ranks = ", ".join(
                f"rank {p.rank} (generation {p.generation}, attempt {p.attempt})" for p in missing
            )
            raise SaveError(
                f"{staging.name}: not saved: no progress for {idle_s:g} s while waiting for {ranks}",
                path=str(staging.series.directory / staging.name),
            )
        sleep(min(0.01, idle_s / 10))


def commit_parts(
    staging: Staged,
    wanted: Sequence[PartId],
    point: Point,
    *,
    kind: Kind,
    seq: int,
    key: Key | None = None,
    time: Clock | None = None,
) -> Saved:
    """Make one checkpoint of the wanted parts, durably.

    Raises SaveError if a part is missing or damaged, if a tensor is not covered exactly once, or if parts
    contradict each other; nothing is visible then.
    """
    series, files = staging.series, staging.series.space.files
    target = series.directory / staging.name
    parts = [_read_part(staging, part, key) for part in sorted(set(wanted), key=lambda p: (p.rank, p))]
    if not parts:
        raise SaveError(f"{target}: not saved: no part was wanted", path=str(target))
    records, tensors, renames = _merge(target, parts, short(staging.id))
    try:
        _keep_only(files, staging.place, {old for old, _ in renames})
        for old, new in renames:
            files.rename(staging.place / old, staging.place / new)
        manifest = manifest_of(
            series,
            point,
            id=staging.id,
            name=staging.name,
            container="directory",
            kind=kind,
            seq=seq,
            created=clock.iso((time or SystemClock()).wall()),
            files=records,
            tensors=tensors,
            aliases={alias: name for part in parts for alias, name in part.aliases.items()},
            objects=parts[0].objects,
            rank_objects={str(part.rank): part.objects for part in parts},
            inexact=[entry for part in parts for entry in part.inexact],
        )
        files.write_small(staging.place / naming.MANIFEST, encode(manifest, key))
        publish_directory(series.space, staging.place, target, [record.name for record in records])
    except SwansongError:
        raise
    except OSError as error:
        raise save_error(error, target, manifest.nbytes) from error
    return Saved(path=target, id=staging.id, seq=seq, nbytes=manifest.nbytes, direct=True)


def _read_part(staging: Staged, wanted: PartId, key: Key | None) -> Part:
    path = staging.place / naming.part(*wanted)
    try:
        part = decode_part(catalog.read_manifest(path), str(path), key)
    except (OSError, DamagedError) as error:
        raise SaveError(f"{staging.name}: not saved: the part of rank {wanted.rank}: {error}") from error
    if (part.id, part.generation, part.attempt, part.rank) != (staging.id, *wanted):
        raise SaveError(f"{staging.name}: not saved: {path.name} is a part of something else")
    for record in part.files:
        try:
            size = (staging.place / record.name).stat().st_size
        except OSError as error:
            raise SaveError(f"{staging.name}: not saved: rank {wanted.rank}: {error}") from error
        if size != record.size:
            raise SaveError(
                f"{staging.name}: not saved: rank {wanted.rank}: {record.name} has {size:,} bytes, "
                f"its part says {record.size:,}"
            )
    return part


def _merge(
    target: Path, parts: list[Part], id8: str
) -> tuple[list[FileRecord], dict[str, TensorRecord], list[tuple[str, str]]]:
    """Files under their final names, tensors with all parts' chunks, and the renames that this takes."""
    records: list[FileRecord] = []
    renames: list[tuple[str, str]] = []
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        first = len(records)
        for number, record in enumerate(part.files):
            name = naming.data_file(part.rank, number, id8, sealed=record.name.endswith(naming.SEALED))
            renames.append((record.name, name))
            records.append(_renamed(record, name))
        for name, tensor in part.tensors.items():
            if kinds.setdefault(name, (tensor.dtype, tensor.shape)) != (tensor.dtype, tensor.shape):
                raise SaveError(
                    f"{target}: not saved: tensor {name!r} is {tensor.dtype} {list(tensor.shape)} on rank "
                    f"{part.rank}, but {kinds[name][0]} {list(kinds[name][1])} elsewhere"
                )
            chunks.setdefault(name, []).extend(_shifted(chunk, first) for chunk in tensor.chunks)
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        _check_coverage(target, name, shape, chunks[name])
        tensors[name] = TensorRecord(dtype=dtype, shape=shape, chunks=chunks[name])
    return records, tensors, renames


def _check_coverage(target: Path, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    boxes = [Box(c.offset or (0,) * len(shape), c.shape if c.shape is not None else shape) for c in chunks]
    covered = coverage(shape, boxes)
    if not covered.complete:
        raise SaveError(f"{target}: not saved: tensor {name!r}: {covered.describe()}", path=str(target))


def _renamed(record: FileRecord, name: str) -> FileRecord:
    return FileRecord(
        name=name,
        size=record.size,
        piece=record.piece,
        digests=record.digests,
        scheme=record.scheme,
        salt=record.salt,
        macs=record.macs,
    )


def _shifted(chunk: Chunk, by: int) -> Chunk:
    return Chunk(file=chunk.file + by, ranges=chunk.ranges, offset=chunk.offset, shape=chunk.shape)


def _keep_only(files: Files, place: Path, names: set[str]) -> None:
    for path in list(place.iterdir()):
        if path.name not in names:
            files.remove_tree(path)


def _progress(place: Path) -> tuple[int, int]:
    count = size = 0
    for path in place.iterdir():
        with suppress(OSError):
            size += path.stat().st_blocks
            count += 1
    return count, size
