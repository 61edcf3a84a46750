"""Removing what vouches for nothing: leftover manifests and rest files, data files that no manifest lists.

The order of looking matters everywhere here: first make sure that the save which made a thing is over, then
look whether the thing is of use. The other way round, a save could end between the two looks, and lose its
manifest.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from swansong.errors import LoadError
from swansong.store import catalog, manifest, naming
from swansong.store.workspace import Workspace


def sweep_sidecars(space: Workspace) -> None:
    """Remove the manifests whose file is gone or has another, right one; and rest files without manifest."""
    for name, paths in catalog.sidecars(space.directory).items():
        over = [path for path in paths if not _in_progress(space, path)]
        for path in _useless(space.directory / name, over, paths):
            _unlink(space, path)
    _sweep_rests(space)


def retire_others(space: Workspace, name: str, id8: str) -> None:
    """After `id8` was committed as `name`: remove what earlier commits of that name have left."""
    for path in catalog.sidecars(space.directory).get(name, []):
        if path.name != naming.sidecar(name, id8) and not _in_progress(space, path):
            _unlink(space, path)
    _sweep_rests(space)


def sweep_directory(space: Workspace, path: Path) -> None:
    """Remove from a committed native directory the data files that its manifest does not list."""
    record = path / naming.MANIFEST
    try:
        names = [entry.name for entry in path.iterdir()]
        over = [
            n
            for n in names
            if (p := naming.parse_data_file(n)) is None or not space.in_progress(path.name, p)
        ]
        listed = {file.name for file in manifest.decode(catalog.read_manifest(record), str(record)).files}
    except (OSError, LoadError):
        return  # gone, or damaged: nothing is known to be useless
    for name in over:
        if name not in listed and naming.parse_data_file(name) is not None:
            _unlink(space, path / name)


def _useless(data: Path, over: list[Path], claims: list[Path]) -> list[Path]:
    if not over:
        return []
    try:
        descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return over
    except OSError:
        return []
    try:
        # A single one, right or wrong, stays: a wrong one tells that the file is not what was committed.
        claim = catalog.match(descriptor, claims)[0] if len(claims) > 1 else None
    finally:
        os.close(descriptor)
    return [path for path in over if path != claim.path] if claim is not None else []


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
    with suppress(FileNotFoundError):
        space.files.unlink(path)
