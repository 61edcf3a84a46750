"""The control directory beside a directory's checkpoints, and the places where new ones are put together.

Every save has an identity and a lock `.swansong/tmp/{id8}-{name}.lock`, taken before anything else exists and
held until the save is over. So whatever carries an id8 belongs to a living save if and only if that lock is
held; everything else that is unfinished may be swept. Process ids play no part: they mean nothing across
hosts and containers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from swansong.store import naming
from swansong.store.files import FileLock, Files


class Workspace:
    """The control directory of one directory of checkpoints."""

    def __init__(self, directory: Path, files: Files) -> None:
        self.directory = directory
        self.files = files
        self.control = directory / naming.CONTROL
        self.temporary = self.control / naming.TEMPORARY

    def prepare(self) -> None:
        """Create what is missing: the directory (0700, as MindSpore's), the control directory, its tmp."""
        self.files.ensure_directory(self.directory, 0o700)
        self.files.ensure_directory(self.control, 0o700)
        self.files.ensure_directory(self.temporary, 0o700)

    @contextmanager
    def reserve(self, name: str, id8: str) -> Iterator[Path]:
        """A path for a save to fill, its own until the block ends; what is left there then is removed."""
        path = self.temporary / naming.temporary(id8, name)
        lock = self._new_lock(path)
        try:
            yield path
        finally:
            # In a child that was forked meanwhile the lock is gone, and what is here is not the child's.
            if lock.held:
                try:
                    with suppress(OSError):
                        self.files.remove_tree(path)
                    with suppress(OSError):
                        self.files.unlink(lock.path)
                finally:
                    lock.release()

    def in_progress(self, name: str, id8: str) -> bool:
        """True if the save of that identity is still running, or if that cannot be told."""
        path = self._lock_path(self.temporary / naming.temporary(id8, name))
        if not path.exists():
            return False
        try:
            lock = self.files.lock(path, wait=False)
        except OSError:
            return True  # held, or not ours to open
        with lock:
            if lock.still_named():
                with suppress(OSError):
                    self.files.unlink(path)
        return False

    def unfinished(self) -> list[Path]:
        """What lies in the temporary directory, locks not counted."""
        try:
            return sorted(p for p in self.temporary.iterdir() if p.suffix != naming.LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @property
    def busy(self) -> bool:
        """True if something is being put together here."""
        return any(self.in_progress(*reversed(path.name.split("-", 1))) for path in self.unfinished())

    def sweep(self) -> None:
        """Remove what dead saves left in the temporary directory, and nothing that a living one holds."""
        try:
            entries = sorted(self.temporary.iterdir())
        except FileNotFoundError:
            return
        if entries:
            # A checkpoint that was moved here to be removed must not come back hollow after a crash.
            self.files.sync_directory(self.temporary)
        for path in entries:
            if path.suffix == naming.LOCK:
                self._sweep_locked(path)
        for path in entries:
            # Without a lock file, nobody can be at work on it: the lock exists before and after the content.
            if path.suffix != naming.LOCK and not self._lock_path(path).exists():
                with suppress(OSError):
                    self.files.remove_tree(path)

    def _sweep_locked(self, path: Path) -> None:
        try:
            lock = self.files.lock(path, wait=False)
        except OSError:
            return  # held, or gone meanwhile, or not ours to open
        with lock:
            if lock.still_named():
                with suppress(OSError):
                    self.files.remove_tree(path.with_name(path.name.removesuffix(naming.LOCK)))
                    self.files.unlink(path)

    def _new_lock(self, path: Path) -> FileLock:
        while True:
            lock = self.files.lock(self._lock_path(path), wait=True)
            if lock.still_named():
                return lock
            lock.release()  # a sweeper took it between its creation and our lock

    def _lock_path(self, path: Path) -> Path:
        return path.with_name(path.name + naming.LOCK)
