"""Which checkpoint all ranks resume from."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from swansong.errors import (
    DamagedError,
    KeyNeededError,
    LoadError,
    NotCommittedError,
    SwansongWarning,
    UnauthenticatedError,
    WrongKeyError,
)
from swansong.mindspore.ranks import Ranks
from swansong.store import catalog, naming
from swansong.store.catalog import Found
from swansong.store.crypt import Key
from swansong.store.latest import Choice, choose
from swansong.store.opening import open_checkpoint

_NONE: Final = 0


def agreed(
    ranks: Ranks, directories: Sequence[Path], series: str, key: Key | None, *, allow_fresh: bool
) -> Found | None:
    """The newest checkpoint that verifies on every rank; None if there is none at all (or `allow_fresh`).

    Each rank proposes the newest that it can use; as long as proposals differ, all go back to the lowest.
    Raises DamagedError, NotCommittedError, or what keeps the newest from being opened.
    """
    ranks.gather([_NONE])  # whoever writes may still be ending its training
    limit: int | None = None
    passed: dict[Path, tuple[Found, str]] = {}
    while True:
        choice = ranks.together(partial(choose, directories, series, key=key, limit=limit))
        passed |= {entry.path: (entry, reason) for entry, reason in choice.passed_over}
        own = choice.newest.manifest if choice.newest is not None else None
        proposals = ranks.gather([own.seq, own.step] if own is not None else [_NONE, _NONE])
        lowest = min(seq for seq, _ in proposals)
        if all(proposal == proposals[0] for proposal in proposals):
            break
        limit = lowest if any(seq > lowest for seq, _ in proposals) else lowest - 1
    choice = Choice(choice.newest, tuple(passed.values()))
    strays = _unvouched(directories, series)
    damaged, unvouched = (
        sum(counts) for counts in zip(*ranks.gather([len(passed), len(strays)]), strict=True)
    )
    if choice.newest is None and not allow_fresh:
        if damaged or limit is not None:
            raise _unusable(choice, key)
        if unvouched:
            raise _uncommitted(strays)
    choice.warn()
    for stray in strays:
        if _looks_newer(stray, choice.newest):
            warnings.warn(
                f"{stray} is passed over: by its name it is newer, but no manifest vouches for it",
                SwansongWarning,
                stacklevel=3,
            )
    if limit is not None and ranks.size > 1:
        warnings.warn(
            f"series {series!r}: newer checkpoints are passed over, since not every rank can use them",
            SwansongWarning,
            stacklevel=3,
        )
    return choice.newest


def warn_of_other_series(directories: Sequence[Path], series: str) -> None:
    """Say so if a directory holds checkpoints, but none of `series`: the prefix may be mistyped."""
    there = {
        found.manifest.series
        for directory in directories
        if directory.is_dir()
        for found in catalog.scan(directory)
        if found.manifest is not None
    }
    if there and series not in there:
        listed = ", ".join(sorted(there)[:5])
        warnings.warn(
            f"no checkpoint of {series!r} in {directories[0]}: training begins at step 0; there is: {listed}",
            SwansongWarning,
            stacklevel=3,
        )


def _unusable(choice: Choice, key: Key | None) -> LoadError:
    """The error for a series of which nothing can be used; a wrong or missing key is told as such."""
    for found, _ in choice.passed_over:
        try:
            open_checkpoint(found.path, key=key).close()
        except (KeyNeededError, UnauthenticatedError, WrongKeyError) as error:
            return error
        except (LoadError, OSError):
            continue
    reasons = "\n  ".join(f"{found.path}: {reason}" for found, reason in choice.passed_over)
    where = str(choice.passed_over[0][0].path) if choice.passed_over else ""
    return DamagedError(
        "there are checkpoints, but none can be used (allow_fresh=True begins at step 0):\n  "
        + (reasons or "none of them on every rank"),
        path=where,
    )


def _unvouched(directories: Sequence[Path], series: str) -> list[Path]:
    """Files that are named as if they belonged to the series, but have no manifest."""
    stem = re.compile(rf"{re.escape(series)}(_\d+)?")
    return [
        found.path
        for directory in directories
        if directory.is_dir()
        for found in catalog.scan(directory)
        if found.state == "unverified"
        and (position := naming.parse_position(found.name)) is not None
        and stem.fullmatch(position.stem)
    ]


def _looks_newer(stray: Path, chosen: Found | None) -> bool:
    """True if a file without manifest is named as if it came later in the run of the chosen checkpoint."""
    position = naming.parse_position(stray.name)
    manifest = chosen.manifest if chosen is not None else None
    if position is None or manifest is None or manifest.epoch is None or manifest.step_in_epoch is None:
        return False
    return position.stem == manifest.stem and position[1:] > (manifest.epoch, manifest.step_in_epoch)


def _uncommitted(strays: list[Path]) -> LoadError:
    names = "\n  ".join(map(str, strays))
    return NotCommittedError(
        "there are files of this name, but no manifest vouches for any; was .swansong left behind when they "
        "were copied? (load_checkpoint loads them by path; "
        f"allow_fresh=True begins at step 0):\n  {names}",
        path=str(strays[0]) if strays else "",
    )
