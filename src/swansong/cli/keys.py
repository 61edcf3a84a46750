"""Key files.

A key file holds one of

- the key itself: exactly 16, 24 or 32 bytes, whatever they are;
- the key in hexadecimal: 32, 48 or 64 digits of either case, then any white space (a line end, as a rule).

32 hexadecimal digits and nothing else could be a key of 32 bytes or one of 16, so such a file is refused.
With a line end it is hexadecimal; a key of 32 such bytes can be given by its 64 digits.
"""

from __future__ import annotations

import re
import stat
import warnings
from pathlib import Path
from typing import Final

import typer

from swansong.errors import SwansongWarning
from swansong.store.crypt import KEY_SIZES, Key

_HEX: Final = re.compile(rb"([0-9A-Fa-f]{32}|[0-9A-Fa-f]{48}|[0-9A-Fa-f]{64})\s*")
_AMBIGUOUS: Final = re.compile(rb"[0-9A-Fa-f]{32}")
_LIMIT: Final = 1024


def read_key(path: Path | None) -> Key | None:
    """The key in a key file; None without one.

    The file may be a pipe. Raises typer.BadParameter, which shows nothing of the content. Warns if others can
    read the file.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            mode = path.stat().st_mode
            content = file.read(_LIMIT)
    except OSError as error:
        raise _refused(f"{path}: {error.strerror}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        warnings.warn(
            f"{path}: every user of this machine can read this key; chmod 600 it",
            SwansongWarning,
            stacklevel=2,
        )
    return Key(_material(content, path))


def _material(content: bytes, path: Path) -> bytes:
    if _AMBIGUOUS.fullmatch(content):
        raise _refused(
            f"{path}: 32 hexadecimal digits could be a key of 32 bytes, or one of 16 in hexadecimal; add a "
            "newline if they are hexadecimal, else write the 64 digits of the 32 bytes"
        )
    if len(content) in KEY_SIZES:
        return content
    if digits := _HEX.fullmatch(content):
        return bytes.fromhex(digits[1].decode())
    size = f"{_LIMIT} or more" if len(content) == _LIMIT else f"{len(content)}"
    newline = ", the last of them a newline" if content.endswith(b"\n") else ""
    raise _refused(
        f"{path}: wanted a key of 16, 24 or 32 bytes, or its 32, 48 or 64 hexadecimal digits; "
        f"found {size} bytes{newline}"
    )


def _refused(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--key-file")
