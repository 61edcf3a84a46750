"""Where the job's token comes from: the environment, or a file beside the checkpoints."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from swansong.errors import ConfigError
from swansong.protocol.handshake import TOKEN, Token

VARIABLE: Final = "SWANSONG_TOKEN"
"""Environment variable: the token as 64 hexadecimal digits. Goes before any file."""
FILE_NAME: Final = ".swansong-token"
"""Of the token's file in a checkpoint directory: 64 hexadecimal digits and a newline, mode 0600."""

_MOST: Final = 2 * TOKEN + 16
"""Bytes of a token file that are looked at."""


def job_token(directory: Path, environment: Mapping[str, str], *, create: bool) -> Token:
    """The token of the job that keeps its checkpoints in `directory`, which exists.

    From `environment`, or else from the file. With `create`, as rank 0 has it, a missing file is made, once,
    whoever else tries at the same moment. Raises ConfigError for what is no token, a missing file, and a file
    that others may read, or that belongs to another user; the message never shows the token.
    """
    given = environment.get(VARIABLE)
    if given is not None:
        return _parse(given, f"environment variable {VARIABLE}")
    path = directory / FILE_NAME
    if create and not os.path.lexists(path):
        _create(path)
    return read_token(path)


def read_token(path: Path) -> Token:
    """The token in a file. Raises ConfigError as `job_token` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        message = f"token file {path}: not there; rank 0 makes it when the job starts, or set {VARIABLE}"
        raise ConfigError(message) from None
    except OSError as error:
        raise ConfigError(f"token file {path}: cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"token file {path}: wanted a regular file")
        if status.st_uid != os.geteuid():
            raise ConfigError(f"token file {path}: belongs to user {status.st_uid}, wanted {os.geteuid()}")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigError(
                f"token file {path}: mode {mode:04o} lets others at it, wanted 0600; whoever has read it can "
                "speak for any rank, so delete it while no job runs, and a new one is made"
            )
        return _parse(os.read(descriptor, _MOST).decode("ascii", "replace"), f"token file {path}")
    finally:
        os.close(descriptor)


def _parse(text: str, where: str) -> Token:
    digits = text.strip()
    if len(digits) != 2 * TOKEN or not set(digits) <= set("0123456789abcdefABCDEF"):
        raise ConfigError(f"{where}: wanted {2 * TOKEN} hexadecimal digits, got {len(digits)} characters")
    return Token(bytes.fromhex(digits))


def _create(path: Path) -> None:
    """Make the file whole or not at all: nobody can read half of it, and the first to link it wins."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(
            fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_hex(TOKEN).encode() + b"\n")
                file.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):
                os.link(fresh, path, follow_symlinks=False)
        finally:
            fresh.unlink()
    except OSError as error:
        hint = f"; set {VARIABLE} instead" if error.errno in (errno.EPERM, errno.EOPNOTSUPP) else ""
        raise ConfigError(f"token file {path}: cannot be made: {error.strerror}{hint}") from error
