"""What the processes of one start of a job share: its incarnation, and what rank 0 found and decided.

Rank 0 writes a file beside the checkpoints and the others wait for it: the one exchange that every job can
do, whatever it trains with. An incarnation must be new at each start of the job, or the others could read
what an earlier start has left.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from swansong.errors import ConfigError, LoadError, MalformedError, UnreachableError
from swansong.persist import places
from swansong.persist.crash_loop import CrashLoop
from swansong.persist.rank_files import RankFiles
from swansong.protocol.handshake import INCARNATION
from swansong.store.checkpoint import new_id, short
from swansong.store.files import Files
from swansong.store.series import Series
from swansong.store.workspace import Workspace

VARIABLE: Final = "SWANSONG_INCARNATION"
"""Environment variable: the incarnation as 32 hexadecimal digits, drawn anew at each start of the job."""

_POLL_S: Final = 0.02
_MOST: Final = 1 << 20
"""Bytes of a job file that are read."""


class SeriesFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A `store.series.Series`, without the directory."""

    name: str
    stem: str
    run: str
    parent: str | None
    floor: int
    rank_files: RankFiles | None = None
    """How a fault's checkpoints lie on disk, if not as native directories."""

    @classmethod
    def of(cls, series: Series) -> SeriesFacts:
        """What the others need to know of a series."""
        return cls(
            name=series.name, stem=series.stem, run=series.run, parent=series.parent, floor=series.floor
        )

    def series(self, directory: Path, files: Files) -> Series:
        """The series, in another process."""
        return Series(
            space=Workspace(directory, files),
            name=self.name,
            stem=self.stem,
            run=self.run,
            parent=self.parent,
            floor=self.floor,
        )


class JobRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """What rank 0 tells the others if it cannot begin."""

    reason: str


class JobFacts(msgspec.Struct, frozen=True, kw_only=True, tag="facts"):
    """What rank 0 tells the others."""

    world_size: int
    series: SeriesFacts
    checkpoint: str | None
    """Path of the checkpoint that all resume from; None: a fresh start."""
    step: int
    """Its step; 0 for a fresh start."""
    resume_command: str = ""
    """What starts the job again, for reports."""
    crash_loop: CrashLoop | None = None
    """Why nobody is to go on, if so."""


def incarnation_of(given: bytes | None, environment: Mapping[str, str], world_size: int) -> bytes:
    """The incarnation of this start of the job, 16 bytes: as given, or from `environment`, or drawn.

    Drawn only if the job has one process. Raises ConfigError for anything else than 16 bytes.
    """
    text = environment.get(VARIABLE)
    if given is None and text is not None:
        digits = text.strip()
        if len(digits) != 2 * INCARNATION or not set(digits) <= set("0123456789abcdefABCDEF"):
            raise ConfigError(f"{VARIABLE}: wanted {2 * INCARNATION} hexadecimal digits, got {text[:80]!r}")
        return bytes.fromhex(digits)
    if given is None:
        if world_size > 1:
            raise ConfigError(
                f"incarnation: wanted {INCARNATION} random bytes, the same on all {world_size} ranks and new "
                f"at each start of the job (or {VARIABLE}, as {2 * INCARNATION} hexadecimal digits), got none"
            )
        return secrets.token_bytes(INCARNATION)
    if not isinstance(given, bytes) or len(given) != INCARNATION:
        raise ConfigError(f"incarnation: wanted {INCARNATION} bytes, got {given!r:.80}")
    return given


def announce(directory: Path, incarnation: bytes, facts: JobFacts | JobRefused, files: Files) -> None:
    """Tell the others, as rank 0. The directory is prepared. Raises OSError."""
    target = places.job_file(directory, incarnation)
    with Workspace(directory, files).reserve(target.name, short(new_id())) as place:
        files.write_small(place, msgspec.json.encode(facts))
        files.rename(place, target)


def learn(directory: Path, incarnation: bytes, *, timeout_s: float) -> JobFacts:
    """Wait for what rank 0 tells.

    Raises UnreachableError if it tells nothing in time, LoadError if it cannot begin, MalformedError.
    """
    path = places.job_file(directory, incarnation)
    deadline = time.monotonic() + timeout_s
    while (data := _read(path)) is None:
        if time.monotonic() >= deadline:
            raise UnreachableError(
                f"{path}: not there after {timeout_s:g} s; rank 0 writes it when it begins. "
                "Do all ranks have this directory and this incarnation?"
            )
        time.sleep(_POLL_S)
    try:
        told = msgspec.json.decode(data, type=JobFacts | JobRefused)
    except msgspec.DecodeError as error:
        raise MalformedError(f"{path}: {error}", path=str(path)) from error
    if isinstance(told, JobRefused):
        raise LoadError(f"rank 0 did not begin, so nobody can: {told.reason}", path=str(directory))
    return told


def forget(directory: Path, incarnation: bytes, files: Files) -> None:
    """Remove what was told: the job is over, or everybody has read it."""
    with suppress(FileNotFoundError):
        files.unlink(places.job_file(directory, incarnation))


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        return file.read(_MOST)
