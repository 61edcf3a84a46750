"""What lies in a directory: which checkpoints are committed, damaged, unverified or incomplete.

Everything is told from manifests and sizes; content is read only where several manifests claim one file.
Nothing here changes the file system.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import xxhash

from swansong.errors import LoadError, MalformedError, NotSupportedError, SwansongError
from swansong.store import manifest as manifests
from swansong.store import naming
from swansong.store.manifest import FileRecord, Manifest
from swansong.store.source import PlainFile, open_regular

State = Literal["committed", "damaged", "unverified", "incomplete"]
ATTEMPTS: Final = 3
"""Looks at something that a writer may be replacing, before it is called damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One entry of a directory."""

    path: Path
    """The file or directory that a user sees."""
    state: State
    manifest: Manifest | None = None
    """What the checkpoint says of itself (public fields if sealed); None if nothing sound does."""
    manifest_path: Path | None = None
    nbytes: int
    """Stored bytes of the data."""
    modified: float
    """File time in seconds, for entries that have no manifest."""
    problem: str | None = None
    """Why the state is not `committed`."""

    @property
    def name(self) -> str:
        """Name within its directory."""
        return self.path.name

    @property
    def committed(self) -> bool:
        """Sound manifest, right sizes."""
        return self.state == "committed"


def scan(directory: Path, *, series: str | None = None) -> list[Found]:
    """Everything in `directory` that is or was to be a checkpoint, newest first, those without seq last.

    With `series`, only what is committed in it. What cannot be read is listed as damaged, what goes meanwhile
    is left out. Raises FileNotFoundError or NotADirectoryError.
    """
    entries = sorted(os.scandir(directory), key=lambda e: e.name)
    claims = sidecars(directory)
    found = [one for entry in entries if (one := _look(directory / entry.name, entry, claims)) is not None]
    if series is not None:
        found = [f for f in found if f.committed and f.manifest is not None and f.manifest.series == series]
    else:
        found += _unfinished(directory)
    return sorted(found, key=_newest_first)


def find(path: Path) -> Found:
    """What stands at `path`. Raises FileNotFoundError, OSError, MalformedError for no regular file.

    What looks damaged is looked at again: a writer may have replaced it between the looks at its parts.
    """
    for _ in range(ATTEMPTS - 1):
        found = _find(path, None)
        if found.state != "damaged":
            return found
    return _find(path, None)


def is_native(path: Path) -> bool:
    """True if a directory is a native checkpoint, or what is left of one whose manifest is gone."""
    if (path / naming.MANIFEST).is_file():
        return True
    with suppress(OSError):
        names = [entry.name for entry in os.scandir(path)]
        of_fault = naming.is_fault_name(path.name) and any(map(naming.is_rank_directory, names))
        return of_fault or any(map(naming.parse_data_file, names))
    return False


def kind_of(entry: os.DirEntry[str]) -> Literal["file", "directory"] | None:
    """What an entry is, links followed; None for anything else, and for what cannot be told."""
    try:
        return "directory" if entry.is_dir() else "file" if entry.is_file() else None
    except OSError:
        return None


def sidecars(directory: Path) -> dict[str, list[Path]]:
    """Manifests of single files by the name they vouch for."""
    claims: dict[str, list[Path]] = defaultdict(list)
    try:
        entries = sorted((directory / naming.CONTROL).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for path in entries:
        parsed = naming.parse_sidecar(path.name)
        if parsed is not None:
            claims[parsed[0]].append(path)
    return dict(claims)


def read_manifest(path: Path) -> bytes:
    """A manifest's raw bytes. Raises FileNotFoundError, or MalformedError beyond the size limit."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > manifests.SIZE_LIMIT:
            raise MalformedError(
                f"{path}: wanted a file of at most {manifests.SIZE_LIMIT:,} bytes, found {size:,}",
                path=str(path),
                file=str(path),
            )
        return file.read(size)


def identity(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from the next one of its name, even on the freed inode; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Claim:
    """A manifest that vouches for an open single file."""

    manifest: Manifest
    path: Path


def match(data: PlainFile, candidates: list[Path]) -> tuple[Claim | None, SwansongError | None]:
    """The manifest among `candidates` that vouches for an open file; else None, and why not.

    Size decides, and the other files that the manifest lists; where several fit, the content does. There is
    no error only if there are no candidates.
    """
    fitting: list[Claim] = []
    problems: list[SwansongError] = []
    for path in candidates:
        try:
            found = manifests.decode(read_manifest(path), str(path))
        except (LoadError, NotSupportedError) as error:
            problems.append(error)
        except OSError as error:
            # Also if it has gone meanwhile: without it, the file would pass for unverified.
            problems.append(_malformed(data, str(error)))
        else:
            reason = _unfit(found, data.size, path)
            if reason is None:
                fitting.append(Claim(found, path))
            else:
                problems.append(_malformed(data, reason))
    if len(fitting) > 1:
        # Leftovers of saves that never came to their rename can have the same size. Where even the content
        # is the same, the latest counts: it may have returned.
        same = [claim for claim in fitting if same_content(data, claim.manifest.files[0])]
        fitting = same or fitting
    if fitting:
        return max(fitting, key=lambda claim: claim.manifest.seq), None
    if len(problems) > 1:
        newer: list[SwansongError] = [p for p in problems if isinstance(p, NotSupportedError)]
        problems = newer or [_malformed(data, "; ".join(map(str, problems)))]
    return None, problems[0] if problems else None


def _malformed(data: PlainFile, what: str) -> MalformedError:
    return MalformedError(f"{data.path}: {what}", path=data.path, file=data.path)


def _unfit(found: Manifest, size: int, path: Path) -> str | None:
    if not found.files or found.container == "directory":
        return f"{path}: vouches for no single file"
    if found.files[0].size != size:
        return f"not the committed content: it has {size:,} bytes, {path.name} says {found.files[0].size:,}"
    for record in found.files[1:]:
        other = path.parent.parent / record.name
        try:
            got = other.stat().st_size
        except OSError as error:
            return f"{other}: missing ({error.strerror})"
        if got != record.size:
            return f"{other}: has {got:,} bytes, {path.name} says {record.size:,}"
    return None


def same_content(data: PlainFile, record: FileRecord, *, sample: bool = False) -> bool:
    """True if an open file has the recorded size and digests; with `sample`, of its first and last piece."""
    count = -(-record.size // record.piece)
    if data.size != record.size or len(record.digests) != count:
        return False
    for index in range(count) if not sample else {0, count - 1} if count else ():
        piece = np.empty(min(record.piece, record.size - index * record.piece), np.uint8)
        try:
            data.read_into(index * record.piece, piece)
        except MalformedError:
            return False
        if xxhash.xxh3_128_hexdigest(piece.data) != record.digests[index]:
            return False
    return True


def _look(path: Path, entry: os.DirEntry[str], claims: dict[str, list[Path]]) -> Found | None:
    """What an entry of a directory is; None if that is no checkpoint."""
    kind = kind_of(entry) if entry.name != naming.CONTROL else None
    try:
        if kind == "directory" and is_native(path):
            return find(path)
        if kind == "file" and (entry.name in claims or entry.name.endswith(naming.SINGLE_FILE_SUFFIXES)):
            found = _find(path, claims)
            return found if found.state != "damaged" else find(path)
    except FileNotFoundError:
        return None  # removed since the directory was read
    except (MalformedError, OSError) as error:
        return Found(path=path, state="damaged", nbytes=0, modified=0.0, problem=str(error))
    return None


def _find(path: Path, claims: dict[str, list[Path]] | None) -> Found:
    """`claims` are the directory's sidecars, if they are known."""
    if path.is_dir():
        return _directory(path)
    descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
        # After the data is open: a manifest is there before its data gets its name.
        known = sidecars(path.parent) if claims is None else claims
        claim, error = match(PlainFile(descriptor, str(path)), known.get(path.name, []))
    finally:
        os.close(descriptor)
    if claim is not None:
        return Found(
            path=path,
            state="committed",
            manifest=claim.manifest,
            manifest_path=claim.path,
            nbytes=claim.manifest.nbytes,
            modified=status.st_mtime,
        )
    return Found(
        path=path,
        state="damaged" if error is not None else "unverified",
        nbytes=status.st_size,
        modified=status.st_mtime,
        problem=str(error) if error is not None else "no manifest vouches for it",
    )


def _directory(path: Path) -> Found:
    record = path / naming.MANIFEST
    status = path.stat()
    try:
        found = manifests.decode(read_manifest(record), str(record))
    except (LoadError, NotSupportedError, OSError) as error:
        return Found(
            path=path, state="damaged", nbytes=_size(path), modified=status.st_mtime, problem=str(error)
        )
    problems = [text for file in found.files if (text := _misfit(path, file)) is not None]
    return Found(
        path=path,
        state="damaged" if problems else "committed",
        manifest=found,
        manifest_path=record,
        nbytes=found.nbytes,
        modified=status.st_mtime,
        problem="; ".join(problems) or None,
    )


def _misfit(directory: Path, record: FileRecord) -> str | None:
    try:
        size = (directory / record.name).stat().st_size
    except OSError as error:
        return f"{directory / record.name}: missing ({error.strerror})"
    if size == record.size:
        return None
    return f"{directory / record.name}: has {size:,} bytes, the manifest says {record.size:,}"


def _unfinished(directory: Path) -> list[Found]:
    found = []
    temporary = directory / naming.CONTROL / naming.TEMPORARY
    entries = sorted(temporary.iterdir()) if temporary.is_dir() else []
    for path in entries:
        if path.suffix == naming.LOCK:
            continue
        with suppress(OSError):  # it may be over by now
            found.append(
                Found(
                    path=path,
                    state="incomplete",
                    modified=path.stat().st_mtime,
                    nbytes=_size(path),
                    problem="being written, or left by a save that died",
                )
            )
    return found


def _size(path: Path) -> int:
    """Bytes of a file, or of the files right in a directory."""
    size = 0
    for file in path.iterdir() if path.is_dir() else [path]:
        with suppress(OSError):
            size += file.stat().st_size if file.is_file() else 0
    return size


def _newest_first(found: Found) -> tuple[int, int, float, str]:
    if found.manifest is None:
        return (1, 0, -found.modified, found.name)
    return (0, -found.manifest.seq, -found.modified, found.name)
