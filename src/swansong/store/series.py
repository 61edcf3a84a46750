"""A series: the checkpoints of one run and of the runs that continue it, in one directory.

`seq` alone orders them. The lock file of a series is held only while a number is drawn or old checkpoints
are pruned; what it contains is a hint, the manifests are the truth.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swansong.errors import LoadError
from swansong.policy.keep import Committed, KeepPolicy
from swansong.store import catalog, clock, naming
from swansong.store.catalog import Found
from swansong.store.checkpoint import new_id, short
from swansong.store.files import FileLock, Files
from swansong.store.manifest import Manifest
from swansong.store.source import PlainFile, open_regular
from swansong.store.sweeping import sweep_directory, sweep_sidecars
from swansong.store.workspace import Workspace
from swansong.store.writing import await_writers


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One run's place in a series. Holds no lock and no open file between calls."""

    space: Workspace
    name: str
    """What the user asked for."""
    stem: str
    """What names begin with."""
    run: str
    """This start of the job (its incarnation)."""
    parent: str | None
    """Id of the checkpoint that this run was resumed from."""
    floor: int
    """Highest seq that was known when the run began; numbers drawn are higher."""

    @classmethod
    def fresh(cls, directory: Path, name: str, files: Files) -> Series:
        """Begin a run that was not resumed. In an occupied directory its stem gets a number.

        What a writer process of an earlier run still saves there is waited for: it may take a stem. Raises
        ConfigError for a name that cannot be one, OSError if the directory cannot be made or written.
        """
        naming.checked_prefix(name)
        space = Workspace(directory, files)
        space.prepare()
        await_writers(directory, name, files)
        stem = naming.free_stem(name, [entry.name for entry in os.scandir(directory) if _takes_a_stem(entry)])
        return cls(
            space=space, name=name, stem=stem, run=new_id(), parent=None, floor=_highest(directory, name)
        )

    @classmethod
    def resumed(cls, found: Found, files: Files, *, directory: Path | None = None) -> Series:
        """Continue the series of a committed checkpoint: its stem, numbering and retention.

        `directory` is where new ones go, if not beside it.
        """
        if found.manifest is None:
            raise ValueError(f"{found.path}: not committed, so there is no series to continue")
        space = Workspace(directory or found.path.parent, files)
        space.prepare()
        return cls(
            space=space,
            name=found.manifest.series,
            stem=found.manifest.stem,
            run=new_id(),
            parent=found.manifest.id,
            floor=max(found.manifest.seq, _highest(space.directory, found.manifest.series)),
        )

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self.space.directory

    def draw(self) -> int:
        """The next number: 1 + the highest drawn in the series or carried by any checkpoint of it.

        The lock file is never made durable; after a power cut `floor` makes up for what it forgot, and if it
        was emptied or removed, the checkpoints that there are. Raises OSError.
        """
        with self._lock() as lock:
            drawn = _number(lock.read())
            if drawn is None:
                drawn = _highest(self.directory, self.name)
            seq = 1 + max(drawn, self.floor)
            self.space.files.write_hint(lock, b"%d\n" % seq)
            return seq

    def found(self) -> list[Found]:
        """The committed checkpoints of the series, newest first."""
        return catalog.scan(self.directory, series=self.name)

    def prune(self, keep: KeepPolicy, newest: str) -> list[Path]:
        """Remove what `keep` lets go, after `newest` (its id) was committed; return what was removed.

        Only checkpoints of this stem are counted and removed: a run that began afresh in an occupied
        directory does not thin out what the earlier one left. What somebody else put there stays: a file that
        is no longer the committed content, a copy under another name, a link.

        Raises the first OSError, after trying the others.
        """
        with self._lock():
            sweep_sidecars(self.space)
            found = {f.manifest.id: f for f in self.found() if f.manifest and self._saved_here(f.manifest, f)}
            committed = [
                Committed(
                    id=m.id,
                    seq=m.seq,
                    time_s=clock.from_iso(m.created),
                    kind=m.kind,
                    run=m.run,
                    parent=m.parent,
                )
                for f in found.values()
                if (m := f.manifest) is not None
            ]
            doomed = [found[identity] for identity in keep.doomed(committed, newest)]
            return self._remove_all(doomed)

    def _remove_all(self, doomed: list[Found]) -> list[Path]:
        removed: list[Path] = []
        failure: OSError | None = None
        for found in doomed:
            try:
                if self._remove(found):
                    removed.append(found.path)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return removed

    def sweep(self) -> None:
        """Remove what saves that died have left behind, and nothing else."""
        self.space.sweep()
        with self._lock():
            sweep_sidecars(self.space)
            for found in self.found():
                if found.path.is_dir():
                    # Its manifest may have been put there by a process that died before it made it durable.
                    self.space.files.sync_directory(found.path)
                    sweep_directory(self.space, found.path)

    def _saved_here(self, manifest: Manifest, found: Found) -> bool:
        return manifest.stem == self.stem and manifest.name == found.name

    def _lock(self) -> FileLock:
        return self.space.files.lock(self.space.control / naming.series_lock(self.name), wait=True)

    def _remove(self, found: Found) -> bool:
        """Remove one checkpoint. It disappears by one unlink or rename; the rest follows."""
        files = self.space.files
        if found.manifest is None or not _is_ours(found):
            return False
        if found.manifest.container == "directory":
            with self.space.reserve(found.name, short(new_id())) as grave:
                files.rename(found.path, grave)
                # Durable before the content goes, or a crash could bring it back hollow.
                files.sync_directory(grave.parent)
            return True
        # The manifest stays until a later sweep: should a crash bring the file's name back, it is still a
        # checkpoint, and pruned again.
        with suppress(FileNotFoundError):
            files.unlink(found.path)
        return True


def _is_ours(found: Found) -> bool:
    """True if the content begins and ends as committed; the size was compared when it was found."""
    if found.manifest is None or found.path.is_symlink():
        return False
    if found.manifest.container == "directory":
        return True
    try:
        descriptor = open_regular(found.path)
    except (OSError, LoadError):
        return False
    try:
        data = PlainFile(descriptor, str(found.path))
        return catalog.same_content(data, found.manifest.files[0], sample=True)
    finally:
        os.close(descriptor)


def _takes_a_stem(entry: os.DirEntry[str]) -> bool:
    """True for what MindSpore's collision rule looks at, and for native directories."""
    match catalog.kind_of(entry):
        case "file":
            by_exception = entry.name.removesuffix(".ckpt").endswith(naming.BREAKPOINT)
            return entry.name.endswith(naming.SINGLE_FILE_SUFFIXES) and not by_exception
        case "directory":
            return Path(entry.path, naming.MANIFEST).is_file()
        case _:
            return False


def _highest(directory: Path, series: str) -> int:
    return max(
        (f.manifest.seq for f in catalog.scan(directory, series=series) if f.manifest is not None), default=0
    )


def _number(raw: bytes) -> int | None:
    """What a lock file says; None if it was not written to its end."""
    return int(raw) if re.fullmatch(rb"[0-9]{1,18}\n", raw) else None
