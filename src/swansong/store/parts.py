"""Several writers, one checkpoint: each puts a part into a shared temporary directory, one commits.

A part is data files plus a durable record, written last. Names carry generation, attempt and rank and are
created exclusively, so that a late or replaced writer can hurt nobody. The committer takes the parts it was
told to take, checks that together they hold every element exactly once, removes what no part lists, and
publishes the directory like any other. docs/format.md, section 2.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swansong.errors import SaveError, SwansongError, UnrepresentableError
from swansong.store import catalog, clock, naming
from swansong.store.checkpoint import Container, Content, Kind, Mode, Point, Saved, SaveOptions, new_id, short
from swansong.store.clock import Clock, SystemClock
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.manifest import FileRecord, Part, TensorRecord, decode_part, encode
from swansong.store.merging import FileNames, Taken, merge, native_names
from swansong.store.publishing import publish_directory
from swansong.store.saving import append_info_of, manifest_of, objects_of, write_data, write_single
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
    container: Container = "directory",
    mode: Mode = "AES-GCM",
    confirm: Callable[[], None] | None = None,
) -> None:
    """Contribute `content` to the checkpoint put together in `place`.

    Whole tensors, or boxes of split ones, as safetensors files; with container "ckpt", whole tensors and
    `append_info` as one file that MindSpore loads. Durable when it returns. `confirm` is called when all data
    were read and are durable, before the record exists; it raises if they are not of one step after all.
    Raises that, SaveError, UnrepresentableError (`rest` belongs to single writers, and `append_info` to
    .ckpt files); nothing of the part is then taken by a committer.
    """
    options, scope = SaveOptions(container=container, key=key, mode=mode), content.scope
    made: list[Path] = []
    try:
        files, tensors = _write_files(place, writer, content, part, options, made)
        if confirm is not None:
            confirm()
        record = Part(
            id=identity,
            generation=part.generation,
            attempt=part.attempt,
            rank=part.rank,
            files=files,
            components={
                component: [scope + name for name in names] for component, names in content.components.items()
            },
            tensors={scope + name: tensor for name, tensor in tensors.items()},
            aliases={scope + alias: scope + name for alias, name in content.aliases.items()},
            objects=objects_of(content),
            inexact=[dict(entry) for entry in content.inexact],
            append_info=append_info_of(content) if content.append_info else None,
        )
        writer.files.write_small(place / naming.part(*part), encode(record, key))
        writer.files.sync_directory(place)
    except BaseException as error:
        _forsake(writer.files, made)
        if isinstance(error, SaveError) or not isinstance(error, OSError):
            raise
        raise save_error(error, place / naming.part(*part), content.nbytes) from error


def _write_files(
    place: Path, writer: Writer, content: Content, part: PartId, options: SaveOptions, made: list[Path]
) -> tuple[list[FileRecord], dict[str, TensorRecord]]:
    """Write a part's data files; `made` gets the paths of those that nobody has created before."""
    if content.rest or (content.append_info and options.container != "ckpt"):
        raise UnrepresentableError(f"{place.name}: such a part has neither `rest` nor `append_info`")
    if options.container != "ckpt":
        numbered = (
            naming.staged_data_file(*part, number, sealed=options.key is not None)
            for number in itertools.count()
        )
        files, tensors, _ = write_data(writer, place, content, _noted(place, numbered, made), options.key)
        return files, tensors
    if content.boxes:
        raise UnrepresentableError(f"{place.name}: a .ckpt holds whole tensors, these are split")
    [name] = _noted(place, iter([naming.staged_ckpt(*part)]), made)
    record, tensors = write_single(writer, place, name, content, options)
    return [record], tensors


def _noted(place: Path, names: Iterator[str], made: list[Path]) -> Iterator[str]:
    for name in names:
        if not os.path.lexists(place / name):
            made.append(place / name)
        yield name


def _forsake(files: Files, made: list[Path]) -> None:
    """Give back the room of a part that came to nothing: others may need it. That need not be durable."""
    for path in made:
        with suppress(OSError):
            files.unlink(path)


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


def read_parts(
    staging: Staged, wanted: Mapping[PartId, AbstractSet[str] | None], *, key: Key | None = None
) -> list[Taken]:
    """Read the records of parts, by rank and attempt, and check that their files are there.

    `wanted` says which components (keys of `Content.components`) are taken of each part; None: all that is in
    it. Raises SaveError for a part that is missing, damaged, or not what it should be.
    """
    ordered = sorted(wanted, key=lambda part: (part.rank, part.generation, part.attempt))
    return [Taken(_read_part(staging, part, key), wanted[part]) for part in ordered]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What a checkpoint of several parts says besides its tensors: manifest fields of these names."""

    objects: dict[str, Any] | None
    rank_objects: dict[str, Any]
    inexact: list[dict[str, Any]]
    components: list[dict[str, Any]] = field(default_factory=list)
    append_info: Any = None


def own_objects(taken: Sequence[Taken]) -> Objects:
    """Each rank's objects are those of its part; the first rank's are everybody's."""
    return Objects(
        objects=taken[0].part.objects if taken else None,
        rank_objects={str(one.part.rank): one.part.objects for one in taken},
        inexact=[entry for one in taken for entry in one.part.inexact],
        append_info=first_appended(taken),
    )


def first_appended(taken: Sequence[Taken]) -> Any:
    """What the first part has besides tensors that has anything."""
    return next((one.part.append_info for one in taken if one.part.append_info is not None), None)


def commit_parts(
    staging: Staged,
    taken: Sequence[Taken],
    point: Point,
    *,
    kind: Kind,
    seq: int,
    key: Key | None = None,
    time: Clock | None = None,
    objects: Objects | None = None,
    names: FileNames | None = None,
) -> Saved:
    """Make one checkpoint of parts that `read_parts` has read, durably.

    `objects` goes with the tensors; None: as `own_objects` has it. `names` says what its files are called;
    None: as those of native directories are. With others an earlier checkpoint is not replaced. Raises
    SaveError if a tensor is not covered exactly once, or if parts contradict each other; nothing is visible
    then.
    """
    series, files = staging.series, staging.series.space.files
    target = series.directory / staging.name
    merged = merge(taken, names or native_names(staging.id)) if taken else "no parts were wanted"
    if isinstance(merged, str):
        raise SaveError(f"{target}: not saved: {merged}", path=str(target))
    kept = objects if objects is not None else own_objects(taken)
    nbytes = sum(record.size for record in merged.files)
    try:
        _keep_only(files, staging.place, {old for old, _ in merged.renames})
        _rename_all(files, staging.place, merged.renames)
        manifest = manifest_of(
            series,
            point,
            id=staging.id,
            name=staging.name,
            container="directory",
            kind=kind,
            seq=seq,
            created=clock.iso((time or SystemClock()).wall()),
            files=merged.files,
            tensors=merged.tensors,
            aliases=merged.aliases,
            components=kept.components,
            objects=kept.objects,
            rank_objects=kept.rank_objects,
            inexact=kept.inexact,
            append_info=kept.append_info,
        )
        files.write_small(staging.place / naming.MANIFEST, encode(manifest, key))
        publish_directory(series.space, staging.place, target, [record.name for record in merged.files])
    except OSError as error:
        raise save_error(error, target, nbytes) from error
    with suppress(OSError):  # it is saved by now; a late writer's files are swept, now or another time
        sweep_directory(series.space, target)
    return Saved(path=target, id=staging.id, seq=seq, nbytes=nbytes, direct=True)


def _read_part(staging: Staged, wanted: PartId, key: Key | None) -> Part:
    target = staging.series.directory / staging.name
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
    used = {chunk.file for tensor in part.tensors.values() for chunk in tensor.chunks}
    if unlisted := used - set(range(len(part.files))):
        return f"its part places tensors in files that it does not list: {sorted(unlisted)}"
    if strangers := {name for names in part.components.values() for name in names} - part.tensors.keys():
        return f"its part counts {min(strangers)!r} to a component, but does not hold it"
    for number, record in enumerate(part.files):
        sealed = record.scheme != "none"
        own = {naming.staged_data_file(*wanted, number, sealed=sealed), naming.staged_ckpt(*wanted)}
        if record.name not in own or (record.name.endswith(naming.CKPT) and number > 0):
            return f"its part lists {record.name!r}, which is not its own"
        size = (staging.place / record.name).stat().st_size
        if size != record.size:
            return f"{record.name} has {size:,} bytes, its part says {record.size:,}"
    return None


def _keep_only(files: Files, place: Path, names: set[str]) -> None:
    for path in list(place.iterdir()):
        if path.name not in names:
            files.remove_tree(path)


def _rename_all(files: Files, place: Path, renames: Sequence[tuple[str, str]]) -> None:
    """Give files their final names; directories that these lead into are made, and are durable."""
    made = sorted({(place / new).parent for _, new in renames} - {place})
    for directory in made:
        files.make_directory(directory, 0o700)
    for old, new in renames:
        files.rename(place / old, place / new)
    for directory in made:
        files.sync_directory(directory)


def _progress(place: Path) -> tuple[int, int, int]:
    # Files have their full size from the beginning (they are preallocated), hence the times.
    count = size = latest = 0
    with suppress(OSError):
        for path in place.iterdir():
            status = path.stat()
            count, size, latest = count + 1, size + status.st_size, max(latest, status.st_mtime_ns)
    return count, size, latest
