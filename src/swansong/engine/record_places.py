"""Where flight recorders lie: directories and files, made and opened so that no other user can interfere.

The directory of all recorders, /dev/shm as a rule, may be written by anybody.
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from swansong.engine.processes import open_process
from swansong.errors import ConfigError, RecordError

_PREFIX: Final = "swansong"
_NAME: Final = re.compile(r"[0-9A-Za-z-]{1,64}")
_FILE: Final = re.compile(r"rank-[0-9]{1,10}")
_TRIES: Final = 3


def check_name(what: str, value: str) -> None:
    """Raise ConfigError unless `value` can be part of a directory's name."""
    if not _NAME.fullmatch(value):
        raise ConfigError(f"{what}: wanted 1 to 64 letters, digits and hyphens, got {value!r:.100}")


def place_of(directory: Path, *, job: str, incarnation: str, rank: int) -> Path:
    """Where the recorder of a rank lies."""
    return directory / f"{_PREFIX}-{job}-{incarnation}" / f"rank-{rank}"


def ranks_in(place: Path) -> list[int]:
    """The ranks that have a recorder in an incarnation's directory, lowest first; none if it is not ours."""
    try:
        with _directory(place) as directory:
            names = [entry.name for entry in os.scandir(directory) if _FILE.fullmatch(entry.name)]
    except (OSError, RecordError):
        return []
    return sorted(int(name.removeprefix("rank-")) for name in names)


def create_file(path: Path) -> int:
    """Create a recorder's file, and its directory unless it is there; return a descriptor.

    Raises RecordError if the file is there, or the directory may be another's.
    """
    try:
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                path.parent.mkdir(0o700)
            # Another rank that ends may just have removed the directory that was empty.
            with suppress(FileNotFoundError), _directory(path.parent) as directory:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                return os.open(path.name, flags, 0o600, dir_fd=directory)
    except FileExistsError:
        message = f"flight recorder {path}: there is one already; do two processes claim this rank?"
        raise RecordError(message, path=str(path)) from None
    except OSError as error:
        raise RecordError(f"flight recorder {path}: {error.strerror}", path=str(path)) from error
    raise RecordError(f"flight recorder {path}: its directory keeps vanishing", path=str(path))


def open_file(path: Path) -> tuple[int, int]:
    """Open a recorder's file for reading; return a descriptor and the size. Raises RecordError."""
    try:
        with _directory(path.parent) as directory:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path.name, flags, dir_fd=directory)
    except OSError as error:
        raise RecordError(f"flight recorder {path}: {error.strerror}", path=str(path)) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise RecordError(f"flight recorder {path}: wanted a regular file of this user", path=str(path))
    return descriptor, status.st_size


def sweep(
    directory: Path,
    *,
    job: str,
    keep: str,
    owner: Callable[[Path], tuple[int, int] | None],
) -> list[Path]:
    """Remove what former incarnations of a job have left on this host; return the directories that are gone.

    `keep` is the present incarnation. `owner` says which process (pid, start time) a file is of, None if
    that cannot be compared here, and raises RecordError if the file is not whole. A directory goes if no
    process of its files lives. Call it when the former controller is gone: it may still want to read.
    """
    check_name("job", job)
    wanted = re.compile(rf"{_PREFIX}-{re.escape(job)}-{_NAME.pattern}")
    mine = f"{_PREFIX}-{job}-{keep}"
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if wanted.fullmatch(entry.name))
    except OSError as error:
        raise RecordError(
            f"flight recorders in {directory}: {error.strerror}", path=str(directory)
        ) from error
    return [directory / name for name in names if name != mine and _remove(directory / name, owner)]


def _remove(place: Path, owner: Callable[[Path], tuple[int, int] | None]) -> bool:
    try:
        with _directory(place) as opened:
            files = [entry.name for entry in os.scandir(opened) if _FILE.fullmatch(entry.name)]
            if any(_may_live(place / name, owner) for name in files):
                return False
            for name in files:
                os.unlink(name, dir_fd=opened)
        place.rmdir()
    except (OSError, RecordError):
        return False  # another's, or another sweeps, too: in either case none of ours to remove
    return True


def _may_live(path: Path, owner: Callable[[Path], tuple[int, int] | None]) -> bool:
    try:
        process = owner(path)
    except RecordError:
        return False  # its process died while making it
    return process is None or is_alive(*process)


def is_alive(pid: int, started: int) -> bool:
    """True if that very process of this host has not ended; also if that cannot be told."""
    try:
        descriptor = open_process(pid, started)
    except OSError:
        return True
    if descriptor is None:
        return False
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(descriptor)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    """A descriptor of a directory that is this user's alone. Raises RecordError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            raise RecordError(
                f"directory {path}: wanted one of user {os.geteuid()} with mode 0700, "
                f"found user {status.st_uid}, mode {mode:04o}",
                path=str(path),
            )
        yield descriptor
    finally:
        os.close(descriptor)
