"""Making a filled temporary directory exist as a checkpoint: the commit of the native container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from swansong.errors import SaveError
from swansong.store import naming
from swansong.store.manifest import MANIFEST_START
from swansong.store.sweeping import sweep_directory
from swansong.store.workspace import Workspace


def publish_directory(space: Workspace, place: Path, target: Path, data: list[str]) -> None:
    """Make a filled temporary directory (data files and manifest durable in content) exist as `target`.

    Under a new name the directory is renamed as a whole. Under an existing checkpoint's name the data files
    move in first and the manifest replaces the old one last, which is the commit. That takes names of data
    files that no other checkpoint has, so SaveError if they lead into directories of their own.
    """
    files = space.files
    if not (target / naming.MANIFEST).exists():
        files.sync_directory(place)
        try:
            files.rename(place, target)
        except OSError:
            if not (target / naming.MANIFEST).exists():
                raise
            # Another writer of that name was first: its checkpoint is replaced.
        else:
            files.sync_directory(target.parent)
            return
    _refuse_strangers(target)
    if any("/" in name for name in data):
        raise SaveError(f"{target}: not saved: there is a checkpoint of this name", path=str(target))
    moved: list[Path] = []
    try:
        for name in data:
            files.rename(place / name, target / name)
            moved.append(target / name)
        files.sync_directory(target)
        files.rename(place / naming.MANIFEST, target / naming.MANIFEST)
    except BaseException:
        # An interrupt may have come after the last rename; what is committed needs its data.
        for path in moved if (place / naming.MANIFEST).exists() else ():
            with suppress(OSError):
                files.unlink(path)
        raise
    files.sync_directory(target)
    with suppress(OSError):  # it is saved by now; what stays behind is swept another time
        sweep_directory(space, target)


def _refuse_strangers(target: Path) -> None:
    """Raise SaveError if what is to be replaced has a manifest that was never one of ours."""
    with (target / naming.MANIFEST).open("rb") as file:
        if not file.read(len(MANIFEST_START)) == MANIFEST_START:
            raise SaveError(
                f"{target}: not saved: its {naming.MANIFEST} is no checkpoint's; move the directory away",
                path=str(target),
            )
