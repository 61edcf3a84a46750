"""The only place that changes the file system.

Everything that creates, writes, renames or removes goes through one `Files` object, handed down by whoever
saves. Tests hand in one that records (and then enumerate every crash), or one that fails at will.
Reading needs no such care and happens wherever it is convenient.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Alignment of offsets, lengths and memory for direct I/O."""


class Files:
    """The mutating system calls, one method each, on paths and descriptors. All raise OSError."""

    def make_directory(self, path: Path, mode: int = 0o777) -> None:
        """Create one directory; `mode` is subject to the umask."""
        path.mkdir(mode)

    def create(self, path: Path) -> int:
        """Create a file that must not exist, mode 0600 from its first moment, and open it read-write."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def open_direct(self, path: Path) -> int | None:
        """Open an existing file for writing past the page cache; None where the file system refuses."""
        try:
            return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None

    def preallocate(self, descriptor: int, size: int) -> None:
        """Reserve `size` bytes from offset 0, so that a full disk is noticed before anything is written."""
        os.posix_fallocate(descriptor, 0, size)

    def write(self, descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
        """Write all of `data` (1-dim, contiguous) at `offset`."""
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:].data, offset + done)

    def truncate(self, descriptor: int, size: int) -> None:
        """Set the file's size."""
        os.ftruncate(descriptor, size)

    def set_mode(self, descriptor: int, mode: int) -> None:
        """Set the permission bits."""
        os.fchmod(descriptor, mode)

    def sync(self, descriptor: int) -> None:
        """Make an open file's content, size and mode durable."""
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing a file of the target's name in one step."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def close(self, descriptor: int) -> None:
        """Close a descriptor from `create` or `open_direct`."""
        os.close(descriptor)

    def lock(self, path: Path, *, wait: bool) -> FileLock:
        """Take an exclusive lock on a file, created if need be. BlockingIOError if held and not `wait`."""
        return FileLock(path, wait=wait)

    def share_lock(self, path: Path) -> FileLock:
        """Take a lock that others may share, after waiting for whoever has it exclusively."""
        return FileLock(path, wait=True, shared=True)

    def write_hint(self, lock: FileLock, data: bytes) -> None:
        """Replace a lock file's content. Not durable: readers must be able to do without it."""
        lock.write(data)

    # -- built from the above -------------------------------------------------------------------------

    def ensure_directory(self, path: Path, mode: int = 0o777) -> None:
        """Create a directory and its missing parents, durably; only the last one gets `mode`."""
        if path.is_dir():
            return
        if not path.parent.exists():
            self.ensure_directory(path.parent)
        try:
            self.make_directory(path, mode)
        except FileExistsError:
            if not path.is_dir():
                raise NotADirectoryError(f"{path} is there, and is not a directory") from None
            return
        self.sync_directory(path.parent)

    def write_small(self, path: Path, data: bytes) -> None:
        """Create a file with `data`, durable in content; its name is durable when the directory is synced."""
        descriptor = self.create(path)
        try:
            self.write(descriptor, np.frombuffer(data, np.uint8), 0)
            self.sync(descriptor)
        except BaseException:
            self.close(descriptor)
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise
        self.close(descriptor)

    def remove_tree(self, path: Path) -> None:
        """Remove a file, or a directory and all in it; missing ones are fine. Links are not followed."""
        try:
            if path.is_dir() and not path.is_symlink():
                for child in list(path.iterdir()):
                    self.remove_tree(child)
                self.remove_directory(path)
            else:
                self.unlink(path)
        except FileNotFoundError:
            return


class FileLock:
    """A `flock` on a file that may be created for it: exclusive, unless it is to be shared.

    Belongs to the open file, so it ends with the process however that dies. A forked child inherits the open
    file and would keep the lock alive, so children close theirs.
    """

    def __init__(self, path: Path, *, wait: bool, shared: bool = False) -> None:
        """Take the lock. With `wait=False`, BlockingIOError if somebody holds it."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # Before the lock is taken: another thread may fork while this one waits for it.
        _open.add(self)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._descriptor, kind | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            self.release()
            raise

    @property
    def held(self) -> bool:
        """False once it was released, and in a forked child."""
        return self._descriptor >= 0

    def fileno(self) -> int:
        """The open file, to be passed on: it is locked until its last copy is closed."""
        return self._descriptor

    def read(self) -> bytes:
        """The lock file's content (at most 64 KiB)."""
        return os.pread(self._descriptor, 1 << 16, 0)

    def write(self, data: bytes) -> None:
        """See Files.write_hint."""
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    def still_named(self) -> bool:
        """True if the locked file is the one that its path names (and has not been swept meanwhile)."""
        try:
            there = self.path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        here = os.fstat(self._descriptor)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock up. Harmless if done before."""
        if self._descriptor >= 0:
            _open.discard(self)
            os.close(self._descriptor)
            self._descriptor = -1


# What a forked child must close. A property of the process, hence module-level.
_open: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)
