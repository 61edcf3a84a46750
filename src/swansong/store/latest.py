"""Choosing the checkpoint to resume from: the newest of a series that verifies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swansong.errors import LoadError, SwansongWarning
from swansong.store import catalog, naming
from swansong.store.catalog import Found
from swansong.store.crypt import Key
from swansong.store.verify import usable


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found in a series."""

    newest: Found | None
    """The newest that verifies; None if there is none."""
    passed_over: tuple[tuple[Found, str], ...]
    """Newer or undatable ones that do not verify, each with what is wrong with it."""

    def warn(self) -> None:
        """Say which ones were passed over, one SwansongWarning each."""
        for found, reason in self.passed_over:
            warnings.warn(f"{found.path} is passed over: {reason}", SwansongWarning, stacklevel=3)


Examine = Callable[[Found, Key | None], str | None]
"""Says what is wrong with a committed checkpoint as a whole; None if nothing is. See `verify.usable`."""


def choose(
    directories: Sequence[Path],
    series: str,
    *,
    key: Key | None = None,
    limit: int | None = None,
    examine: Examine = usable,
) -> Choice:
    """Find the newest checkpoint of `series` in `directories` (by seq) that verifies as a whole.

    Directories that do not exist are empty. With a key, it must have been sealed with that key; one that the
    key does not open is passed over like a damaged one. With `limit`, those with a higher seq do not count.
    The last one for which `examine` finds nothing wrong is the one that is chosen.
    Raises LoadError for a directory that cannot be read.
    """
    candidates = [found for directory in directories for found in _scan(directory)]
    passed = [
        (f, f.problem or "damaged") for f in candidates if f.state == "damaged" and _of_series(f, series)
    ]
    dated = [
        f
        for f in candidates
        if f.committed and f.manifest is not None and f.manifest.series == series
        if limit is None or f.manifest.seq <= limit
    ]
    for found in sorted(dated, key=lambda f: -f.manifest.seq if f.manifest is not None else 0):
        problem = examine(found, key)
        if problem is None:
            return Choice(found, tuple(_newer(passed, found)))
        passed.append((found, problem))
    return Choice(None, tuple(passed))


def _scan(directory: Path) -> list[Found]:
    try:
        return catalog.scan(directory) if directory.is_dir() else []
    except OSError as error:
        raise LoadError(f"{directory}: cannot be read: {error}", path=str(directory)) from error


def _of_series(found: Found, series: str) -> bool:
    if found.manifest is not None:
        return found.manifest.series == series
    if naming.is_fault_name(found.name):
        return True  # of whichever series
    # Its manifest is unreadable: the name is all there is.
    stem, position = rf"{re.escape(series)}(_\d+)?", naming.parse_position(found.name)
    if position is not None and re.fullmatch(stem, position.stem):
        return True
    return re.fullmatch(rf"{stem}-\d+(_\d+)?", found.name) is not None  # see `naming.step_name`


def _newer(passed: list[tuple[Found, str]], than: Found) -> list[tuple[Found, str]]:
    limit = than.manifest.seq if than.manifest is not None else 0
    return [(f, reason) for f, reason in passed if f.manifest is None or f.manifest.seq > limit]
