"""Several writers, one checkpoint: each puts a part into a shared temporary directory, one commits.

A part is data files plus a durable record, written last. Names carry generation, attempt and rank and are
created exclusively, so that a late or replaced writer can hurt nobody. The committer takes the parts it was
told to take, checks that together they hold every element exactly once, removes what no part lists, and
publishes the directory like any other. docs/format.md, section 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swansong.errors import SaveError, SwansongError, UnrepresentableError
from swansong.store import catalog, clock, naming
from swansong.store.checkpoint import Content, Kind, Point, Saved, new_id, short
from swansong.store.clock import Clock, SystemClock
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.manifest import Chunk, FileRecord, Part, TensorRecord, decode_part, encode
from swansong.store.placement import boxes_problem
from swansong.store.publishing import publish_directory
from swansong.store.saving import manifest_of, objects_of, write_data
from swansong.store.series import Series
from swansong.store.sweeping import sweep_directory
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
def staged(series: Series, name: str, *, identity: str | None = None) -> Iterator[Staged]:
    """Open the shared directory; the committer holds it. What is not committed in the block is removed.

    `identity`, 32 hexadecimal digits that nobody else uses, is drawn unless given, as it is where writers
    derive it, and with it the place, without being told.
    """
    naming.checked_name(name)
    identity = identity or new_id()
    with ExitStack() as stack:
        try:
            place = stack.enter_context(series.space.reserve(name, short(identity)))
            series.space.files.make_directory(place, 0o700)
        except OSError as error:
            raise save_error(error, series.directory / name, 0) from error
        yield Staged(series, name, identity, place)


def write_part(
    place: Path,
    identity: str,
    writer: Writer,
    content: Content,
    part: PartId,
    *,
    key: Key | None = None,
    confirm: Callable[[], None] | None = None,
) -> None:
    """Contribute `content` (whole tensors, or boxes of split ones) to the checkpoint put together in `place`.

    Durable when it returns. `confirm` is called when all data were read and are durable, before the record
    exists; it raises if they are not of one step after all. Raises that, SaveError, UnrepresentableError
    (`rest` and `append_info` belong to single writers); nothing of the part is then taken by a committer.
    """
    if content.rest or content.append_info:
        raise UnrepresentableError(f"{place.name}: a part has neither `rest` nor `append_info`")
    names = (naming.staged_data_file(*part, number, sealed=key is not None) for number in itertools.count())
    try:
        files, tensors, _ = write_data(writer, place, content, names, key)
        if confirm is not None:
            confirm()
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

    Raises SaveError naming the parts that are missing when for `idle_s` seconds nothing was written in the
    directory. A writer whose data waits in the page cache for one long fsync shows no progress.
    """
    time = time or SystemClock()
    seen: tuple[int, int, int] = (-1, -1, -1)
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
    ordered = sorted(set(wanted), key=lambda part: part.rank)
    if not ordered or len({part.rank for part in ordered}) < len(ordered):
        raise SaveError(
            f"{target}: not saved: wanted one part of each rank, was told {ordered}", path=str(target)
        )
    parts = [_read_part(staging, target, part, key) for part in ordered]
    records, tensors, renames = _merge(target, parts, short(staging.id))
    nbytes = sum(record.size for record in records)
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
    except OSError as error:
        raise save_error(error, target, nbytes) from error
    with suppress(OSError):  # it is saved by now; a late writer's files are swept, now or another time
        sweep_directory(series.space, target)
    return Saved(path=target, id=staging.id, seq=seq, nbytes=nbytes, direct=True)


def _read_part(staging: Staged, target: Path, wanted: PartId, key: Key | None) -> Part:
    path = staging.place / naming.part(*wanted)
    try:
        part = decode_part(catalog.read_manifest(path), str(path), key)
        problem = _part_problem(staging, wanted, part)
    except (OSError, SwansongError) as error:
        raise SaveError(
            f"{target}: not saved: the part of rank {wanted.rank}: {error}", path=str(target)
        ) from error
    if problem is not None:
        raise SaveError(f"{target}: not saved: rank {wanted.rank}: {problem}", path=str(target))
    return part


def _part_problem(staging: Staged, wanted: PartId, part: Part) -> str | None:
    """Why a part cannot be taken; None if it can. Raises OSError for a file that is not there."""
    if not part.readable:
        return "its part is encrypted; the committer needs the key"
    if (part.id, part.generation, part.attempt, part.rank) != (staging.id, *wanted):
        return f"{naming.part(*wanted)} is a part of something else"
    for number, record in enumerate(part.files):
        if record.name != naming.staged_data_file(*wanted, number, sealed=record.scheme != "none"):
            return f"its part lists {record.name!r}, which is not its own"
        size = (staging.place / record.name).stat().st_size
        if size != record.size:
            return f"{record.name} has {size:,} bytes, its part says {record.size:,}"
    return None


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
                    f"{part.rank}, but {kinds[name][0]} {list(kinds[name][1])} elsewhere",
                    path=str(target),
                )
            chunks.setdefault(name, []).extend(_shifted(chunk, first) for chunk in tensor.chunks)
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        problem = boxes_problem(shape, chunks[name])
        if problem is not None:
            raise SaveError(f"{target}: not saved: tensor {name!r}: {problem}", path=str(target))
        tensors[name] = TensorRecord(dtype=dtype, shape=shape, chunks=chunks[name])
    return records, tensors, renames


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


def _progress(place: Path) -> tuple[int, int, int]:
    # Files have their full size from the beginning (they are preallocated), hence the times.
    count = size = latest = 0
    with suppress(OSError):
        for path in place.iterdir():
            status = path.stat()
            count, size, latest = count + 1, size + status.st_size, max(latest, status.st_mtime_ns)
    return count, size, latest
