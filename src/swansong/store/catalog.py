"""What lies in a directory: which checkpoints are committed, damaged, unverified or incomplete.

Everything is told from manifests and sizes; content is read only where several manifests claim one file.
Nothing here changes the file system.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from swansong.errors import DamagedError, LoadError, MalformedError
from swansong.store import manifest as manifests
from swansong.store import naming
from swansong.store.manifest import FileRecord, Manifest
from swansong.store.source import PlainFile

State = Literal["committed", "damaged", "unverified", "incomplete"]


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

    With `series`, only what is committed in it. Raises FileNotFoundError or NotADirectoryError.
    """
    entries = sorted(os.scandir(directory), key=lambda e: e.name)
    claims = sidecars(directory)
    found = []
    for entry in entries:
        if entry.name == naming.CONTROL:
            continue
        path = directory / entry.name
        if entry.is_dir():
            if (path / naming.MANIFEST).is_file():
                found.append(_directory(path))
        elif entry.is_file() and (entry.name in claims or entry.name.endswith(naming.SINGLE_FILE_SUFFIXES)):
            found.append(_single(path, claims.get(entry.name, [])))
    if series is not None:
        found = [f for f in found if f.committed and f.manifest is not None and f.manifest.series == series]
    else:
        found += _unfinished(directory)
    return sorted(found, key=_newest_first)


def find(path: Path) -> Found:
    """What stands at `path`. Raises FileNotFoundError."""
    if path.is_dir():
        return _directory(path)
    return _single(path, sidecars(path.parent).get(path.name, []))


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
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > manifests.SIZE_LIMIT:
            raise MalformedError(
                f"{path}: wanted a file of at most {manifests.SIZE_LIMIT:,} bytes, found {status.st_size:,}",
                path=str(path),
                file=str(path),
            )
        return file.read(manifests.SIZE_LIMIT + 1)


@dataclass(frozen=True, slots=True)
class Claim:
    """A manifest that vouches for an open single file."""

    manifest: Manifest
    path: Path


def match(descriptor: int, candidates: list[Path]) -> tuple[Claim | None, str]:
    """The manifest among `candidates` that vouches for an open file; else None, and why not.

    Size decides, and the other files that the manifest lists; where several fit, the content does.
    """
    size = os.fstat(descriptor).st_size
    fitting: list[Claim] = []
    reasons: list[str] = []
    for path in candidates:
        try:
            found = manifests.decode(read_manifest(path), str(path))
        except FileNotFoundError:
            continue
        except (DamagedError, LoadError) as error:
            reasons.append(str(error))
            continue
        reason = _unfit(found, size, path)
        if reason is None:
            fitting.append(Claim(found, path))
        else:
            reasons.append(reason)
    if len(fitting) > 1:
        # Leftovers of saves that never came to their rename can have the same size.
        same = [claim for claim in fitting if same_content(descriptor, claim.manifest.files[0])]
        fitting = same or fitting[-1:]
    return (fitting[-1], "") if fitting else (None, "; ".join(reasons))


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


def same_content(descriptor: int, record: FileRecord, *, pieces: int | None = None) -> bool:
    """True if an open file has the recorded size and digests (of the first `pieces`, if given)."""
    source = PlainFile(descriptor, record.name)
    if (
        source.size != record.size
        or record.piece <= 0
        or len(record.digests) != -(-record.size // record.piece)
    ):
        return False
    for index, want in enumerate(record.digests[:pieces]):
        piece = np.empty(min(record.piece, record.size - index * record.piece), np.uint8)
        try:
            source.read_into(index * record.piece, piece)
        except MalformedError:
            return False
        if xxhash.xxh3_128_hexdigest(piece.data) != want:
            return False
    return True


def _single(path: Path, candidates: list[Path]) -> Found:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        claim, reason = match(descriptor, candidates)
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
        state="damaged" if reason else "unverified",
        nbytes=status.st_size,
        modified=status.st_mtime,
        problem=reason or "no manifest vouches for it",
    )


def _directory(path: Path) -> Found:
    record = path / naming.MANIFEST
    status = path.stat()
    try:
        found = manifests.decode(read_manifest(record), str(record))
    except (LoadError, OSError) as error:
        size = sum(p.stat().st_size for p in path.iterdir() if p.is_file())
        problem = str(error)
        return Found(path=path, state="damaged", nbytes=size, modified=status.st_mtime, problem=problem)
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
        files = [path] if path.is_file() else [p for p in path.glob("*") if p.is_file()]
        size = sum(p.stat().st_size for p in files)
        found.append(
            Found(
                path=path,
                state="incomplete",
                nbytes=size,
                modified=path.stat().st_mtime,
                problem="being written, or left by a save that died",
            )
        )
    return found


def _newest_first(found: Found) -> tuple[int, int, float, str]:
    if found.manifest is None:
        return (1, 0, -found.modified, found.name)
    return (0, -found.manifest.seq, -found.modified, found.name)
