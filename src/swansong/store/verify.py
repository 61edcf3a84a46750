"""Checking what lies on disk against its manifests. No key is needed: digests are over stored bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swansong.errors import (
    CheckpointNotFoundError,
    DamagedError,
    LoadError,
    NotCommittedError,
    SwansongError,
)
from swansong.store import catalog, manifest, members
from swansong.store.catalog import ATTEMPTS, Found
from swansong.store.crypt import Key, PieceMac, Unsealed
from swansong.store.manifest import FileRecord
from swansong.store.opening import open_checkpoint, open_file
from swansong.store.pieces import PIECE
from swansong.store.placement import names_in
from swansong.store.reading import in_parallel
from swansong.store.source import PlainFile
from swansong.store.verified import Verified

Progress = Callable[[int], None]
"""Called with the number of bytes checked since the last call, by one thread at a time."""
PieceCheck = Callable[[int, NDArray[np.uint8]], int]
"""Checks piece number n by way of a buffer, and returns its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    path: str
    """The checkpoint."""
    file: str | None
    """The file in which it is wrong."""
    offset: int | None
    """First stored byte of the smallest range known to contain the damage."""
    tensor: str | None
    """A tensor that stands there."""
    what: str
    """In words."""
    about_key: bool = False
    """True if it is about the key or the cipher, not about the bytes, which may be sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a check found."""

    checked_bytes: int
    """Stored bytes that were read and compared."""
    checkpoints: int
    """Checkpoints that were looked at."""
    authenticated: bool | None
    """With a key: whether everything was proved to be sealed with it. None without a key."""
    problems: tuple[Problem, ...]
    unverified: int = 0
    """Those of which nothing could be compared, since they have no manifest."""

    @property
    def ok(self) -> bool:
        """True if nothing is wrong and there was something to compare."""
        return not self.problems and self.unverified < self.checkpoints


def targets(path: Path) -> list[Found]:
    """What `verify` checks at `path`: a checkpoint, or all in a directory but incomplete ones, newest first.

    A file of a directory stands for the whole of it. Raises CheckpointNotFoundError if there is nothing,
    LoadError if it cannot be read.
    """
    try:
        if path.is_dir() and not catalog.is_native(path):
            found = [f for f in catalog.scan(path) if f.state != "incomplete"]
        else:
            found = [catalog.find(members.checkpoint_of(path))]
    except (FileNotFoundError, NotADirectoryError):
        found = []
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    if not found:
        raise CheckpointNotFoundError(f"{path}: no checkpoint there", path=str(path))
    return found


def verify(
    path: Path,
    *,
    key: Key | None = None,
    progress: Progress | None = None,
    checked: Callable[[Found, list[Problem]], None] | None = None,
) -> Report:
    """Check a checkpoint, or every checkpoint in a directory of them.

    `checked` is called with each one and what is wrong with it, as soon as that is known.

    Every stored byte of every committed checkpoint is read. What has no manifest is parsed, which finds a cut
    file but no flipped bit in a tensor; it counts as unverified, which is a problem only if there was nothing
    else to verify. Incomplete ones are passed over. Raises CheckpointNotFoundError if there is nothing to
    check.
    """
    found = targets(path)
    problems: list[Problem] = []
    checked_bytes = unverified = 0
    for entry in found:
        size, wrong = check(entry, key=key, progress=progress)
        checked_bytes += size
        problems += wrong
        unverified += entry.manifest is None and not wrong
        if checked is not None:
            checked(entry, wrong)
    authenticated = None if key is None else not problems and all(f.manifest is not None for f in found)
    return Report(
        checked_bytes=checked_bytes,
        checkpoints=len(found),
        authenticated=authenticated,
        problems=tuple(problems),
        unverified=unverified,
    )


def check(
    found: Found, *, key: Key | None = None, progress: Progress | None = None
) -> tuple[int, list[Problem]]:
    """Check one entry of a directory; return the bytes read and what is wrong, all of it.

    A key that does not fit is one problem; the bytes are then checked without it. What was replaced since it
    was found is looked at anew, what was removed since has no problems.
    """
    for _ in range(ATTEMPTS):
        checked, problems = _check(found, key, progress)
        if not problems:
            return checked, problems
        try:
            now = catalog.find(found.path)
        except FileNotFoundError:
            return checked, []
        except (SwansongError, OSError):
            break
        if now.manifest == found.manifest:
            break
        found = now
    if key is None or not any(problem.about_key for problem in problems):
        return checked, problems
    checked, damage = _check(found, None, progress)
    return checked, problems + damage


def _check(found: Found, key: Key | None, progress: Progress | None) -> tuple[int, list[Problem]]:
    if found.state == "damaged" and found.manifest is None:
        return 0, [_why_damaged(found)]
    if found.manifest is None or found.manifest_path is None:
        return _check_foreign(found, key)
    try:
        record = manifest.decode(catalog.read_manifest(found.manifest_path), str(found.manifest_path), key)
    except (SwansongError, OSError) as error:
        return 0, [_from_error(found, error)]
    base = found.path if record.container == "directory" else found.path.parent
    checked = 0
    problems: list[Problem] = []
    for index, file in enumerate(record.files):
        with ExitStack() as stack:
            try:
                source = open_file(base / file.name, stack)
                check_piece = _piece_check(source, file, names_in(record, index), key)
                room = min(PIECE, source.size)
            except (LoadError, OSError) as error:
                problems.append(_from_error(found, error, str(base / file.name)))
                continue
            size, wrong = _check_pieces(found, source.path, len(file.digests), check_piece, room, progress)
            checked += size
            problems += wrong
    return checked, problems


def _why_damaged(found: Found) -> Problem:
    """What opening it says, which tells the file and the place."""
    try:
        open_checkpoint(found.path).close()
    except (SwansongError, OSError) as error:
        return _from_error(found, error)
    return _problem(found, str(found.path), None, None, found.problem or "damaged")


def usable(found: Found, key: Key | None = None) -> str | None:
    """None if a committed checkpoint verifies as a whole, else what is wrong with it."""
    if found.manifest is None:
        return found.problem
    _, problems = _check(found, key, None)
    return problems[0].what if problems else None


def _piece_check(
    data: PlainFile, record: FileRecord, names: Callable[[int, int], list[str]], key: Key | None
) -> PieceCheck:
    """What checks one piece of a file and returns its length. Errors as those of the Sources."""
    salt = bytes.fromhex(record.salt) if record.salt is not None else b""
    mac = PieceMac(key, salt) if key is not None and record.macs is not None else None
    stored = Verified(data, record, names, mac)
    if key is not None and record.scheme == "sealed":
        # A digest proves nothing against somebody who knows how it is made; that takes the key.
        return Unsealed(stored, key, salt).check
    return stored.check


def _check_pieces(
    found: Found, file: str, count: int, check_piece: PieceCheck, room: int, progress: Progress | None
) -> tuple[int, list[Problem]]:
    """Check all pieces, some at a time; what is wrong is told in their order."""
    checked = 0
    problems: dict[int, Problem] = {}
    guard = threading.Lock()

    def one(index: int, buffer: NDArray[np.uint8]) -> None:
        nonlocal checked
        try:
            size = check_piece(index, buffer)
        except (LoadError, OSError) as error:
            problems[index] = _from_error(found, error, file)
            return
        with guard:  # nobody who watches progress needs to expect two calls at once
            checked += size
            if progress is not None:
                progress(size)

    in_parallel(range(count), one, buffer=room)
    return checked, [problems[index] for index in sorted(problems)]


def _check_foreign(found: Found, key: Key | None) -> tuple[int, list[Problem]]:
    from swansong.store.ckpt_cipher import looks_encrypted

    with ExitStack() as stack:
        try:
            if key is None and looks_encrypted(open_file(found.path, stack)):
                return 0, []  # nothing can be told of it without the key
            with open_checkpoint(found.path, key=key):
                return found.nbytes, []
        except (SwansongError, OSError) as error:
            return 0, [_from_error(found, error)]


def _from_error(found: Found, error: Exception, file: str | None = None) -> Problem:
    if isinstance(error, DamagedError):
        return _problem(found, error.file or file, error.offset, error.tensor, str(error))
    return Problem(
        path=str(found.path),
        file=file or str(found.path),
        offset=None,
        tensor=None,
        what=str(error),
        about_key=not isinstance(error, OSError | NotCommittedError),
    )


def _problem(found: Found, file: str | None, offset: int | None, tensor: str | None, what: str) -> Problem:
    return Problem(path=str(found.path), file=file, offset=offset, tensor=tensor, what=what)
