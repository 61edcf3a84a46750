"""Removing what vouches for nothing: leftover manifests and rest files, data files that no manifest lists.

The order of looking matters everywhere here: first make sure that the save which made a thing is over, then
look whether the thing is of use. The other way round, a save could end between the two looks, and lose its
manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from swansong.errors import LoadError, NotSupportedError
from swansong.store import catalog, manifest, naming
from swansong.store.source import PlainFile, open_regular
from swansong.store.workspace import Workspace


def sweep_sidecars(space: Workspace) -> None:
    """Remove the manifests whose file is gone or has another, right one; and rest files without manifest."""
    useless: list[Path] = []
    for name, paths in catalog.sidecars(space.directory).items():
        over = [path for path in paths if not _in_progress(space, path)]
        useless += _useless(space.directory / name, over, paths)
    if useless:
        # What makes them useless, a file that was removed or replaced, may have been done by a process that
        # died before it made it durable.
        space.files.sync_directory(space.directory)
    for path in useless:
        _unlink(space, path)
    _sweep_rests(space)


def retire_others(space: Workspace, name: str, id8: str, is_current: Callable[[], bool]) -> None:
    """After `id8` was committed as `name`: remove what earlier commits of that name have left.

    `is_current` tells whether the file of that name is still the one committed as `id8`.
    """
    paths = catalog.sidecars(space.directory).get(name, [])
    over = [p for p in paths if p.name != naming.sidecar(name, id8) and not _in_progress(space, p)]
    if is_current():
        for path in over:
            _unlink(space, path)
    _sweep_rests(space)


def sweep_directory(space: Workspace, path: Path) -> None:
    """Remove from a committed native directory what its manifest does not list: data files, and what writers
    brought too late.
    """
    record = path / naming.MANIFEST
    try:
        names = [entry.name for entry in path.iterdir()]
        over = [
            n
            for n in names
            if (p := naming.parse_data_file(n)) is None or not space.in_progress(path.name, p)
        ]
        listed = {file.name for file in manifest.decode(catalog.read_manifest(record), str(record)).files}
    except (OSError, LoadError, NotSupportedError):
        return  # gone, damaged or of a newer format: nothing is known to be useless
    for name in over:
        if name not in listed and (naming.parse_data_file(name) is not None or naming.is_staged(name)):
            _unlink(space, path / name)


def _useless(data: Path, over: list[Path], claims: list[Path]) -> list[Path]:
    if not over:
        return []
    try:
        descriptor = open_regular(data)
    except FileNotFoundError:
        return over
    except (OSError, LoadError):
        return []
    try:
        # A single one, right or wrong, stays: a wrong one tells that the file is not what was committed.
        claim = catalog.match(PlainFile(descriptor, str(data)), claims)[0] if len(claims) > 1 else None
    finally:
        os.close(descriptor)
    # If it is the one of a save that is still running, that save retires the others when it is over.
    return [path for path in over if path != claim.path] if claim is not None and claim.path in over else []


def _sweep_rests(space: Workspace) -> None:
    for path in list(space.control.iterdir()):
        parsed = naming.parse_rest(path.name)
        if parsed is None or space.in_progress(*parsed):
            continue
        if not (space.control / naming.sidecar(*parsed)).exists():
            _unlink(space, path)


def _in_progress(space: Workspace, path: Path) -> bool:
    parsed = naming.parse_sidecar(path.name)
    return parsed is not None and space.in_progress(*parsed)


def _unlink(space: Workspace, path: Path) -> None:
    with suppress(OSError):  # what cannot be removed now does no harm, and is tried again
        space.files.unlink(path)
