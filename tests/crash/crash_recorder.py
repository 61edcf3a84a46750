"""A `Files` that does what it is told on the real file system, and writes down what it did.

The record is a list of operations on *inodes* and *slots*. An inode is a file or directory, known by a number
that never changes; a slot is a place for a name, (number of a directory, name). Operations that change names
are assignments of inodes to slots, so that a trace with two operations exchanged or one left out still means
something: that is how the tests make the wrong programs which the crash model must condemn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from swansong.store.files import FileLock, Files

ROOT = 0
"""The inode of the directory that a recorder watches; its own name is durable."""

Slot: TypeAlias = tuple[int, str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the file system, done and returned from."""

    call: str
    """The method of `Files`."""
    path: str
    """What it was called with, relative to the watched directory: for people, and to compare with strace."""

    def __str__(self) -> str:
        return f"{self.call} {self.path}"


@dataclass(frozen=True, slots=True)
class Names(Operation):
    """Slots take inodes (None: nothing), all or none of them; durable when directory `home` is synced."""

    changes: tuple[tuple[Slot, int | None], ...]
    home: int
    makes_directory: bool = False
    target: str = ""
    """New path, of a rename."""

    def __str__(self) -> str:
        return f"{self.call} {self.path}" + (f" -> {self.target}" if self.target else "")


@dataclass(frozen=True, slots=True)
class Write(Operation):
    """Bytes are put into a file."""

    inode: int
    offset: int
    data: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.call} {self.path} [{self.offset}, {self.offset + len(self.data)})"


@dataclass(frozen=True, slots=True)
class Resize(Operation):
    """A file's size is set; with `grow`, only if it is smaller."""

    inode: int
    size: int
    grow: bool = False

    def __str__(self) -> str:
        return f"{self.call} {self.path} to {self.size}"


@dataclass(frozen=True, slots=True)
class SetMode(Operation):
    """Permission bits. The model does not look at them: whoever owns a file may read it in any case."""

    inode: int
    mode: int


@dataclass(frozen=True, slots=True)
class Sync(Operation):
    """fsync of a file or directory has returned."""

    inode: int


@dataclass(frozen=True, slots=True)
class Returned(Operation):
    """A save has returned to its caller: from here on it is promised."""

    save: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was there, durably, before anything was recorded."""

    children: dict[int, dict[str, int]]
    contents: dict[int, bytes]


class Recorder(Files):
    """See the module's text. Threads may share one; what they do is recorded in the order that it had."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trace: list[Operation] = []
        self._children: dict[int, dict[str, int]] = {ROOT: {}}
        self._next = ROOT + 1
        self._open: dict[int, int] = {}
        self._guard = threading.Lock()
        contents: dict[int, bytes] = {}
        self._load(root, ROOT, contents)
        self.initial = Snapshot({number: dict(names) for number, names in self._children.items()}, contents)

    def before(self, call: str, path: str) -> None:
        """Called before every operation. Tests let it raise or wait."""

    def after(self, call: str, path: str) -> None:
        """Called after every operation, before its caller knows of its end. Tests let it raise or wait."""

    def returned(self, save: int) -> None:
        """Note that save number `save` has returned."""
        self.trace.append(Returned("returned", str(save), save))

    # -- the methods of Files -------------------------------------------------------------------------

    def make_directory(self, path: Path, mode: int = 0o777) -> None:
        def note(_: None) -> Operation:
            inode = self._number()
            self._children[inode] = {}
            return self._name("make_directory", path, inode)

        self._step("make_directory", path, lambda: super(Recorder, self).make_directory(path, mode), note)

    def create(self, path: Path) -> int:
        def note(descriptor: int) -> Operation:
            self._open[descriptor] = inode = self._number()
            return self._name("create", path, inode)

        return self._step("create", path, lambda: super(Recorder, self).create(path), note)

    def open_direct(self, path: Path) -> int | None:
        descriptor = super().open_direct(path)
        if descriptor is None:
            # This file system has no direct I/O. The order of operations is what matters here, so go on
            # as if it had.
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with self._guard:
            self._open[descriptor] = self._inode(path)
        return descriptor

    def preallocate(self, descriptor: int, size: int) -> None:
        self._on(
            descriptor,
            lambda: super(Recorder, self).preallocate(descriptor, size),
            lambda path, inode: Resize("preallocate", path, inode, size, grow=True),
            "preallocate",
        )

    def write(self, descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
        self._on(
            descriptor,
            lambda: super(Recorder, self).write(descriptor, data, offset),
            lambda path, inode: Write("write", path, inode, offset, data.tobytes()),
            "write",
        )

    def truncate(self, descriptor: int, size: int) -> None:
        self._on(
            descriptor,
            lambda: super(Recorder, self).truncate(descriptor, size),
            lambda path, inode: Resize("truncate", path, inode, size),
            "truncate",
        )

    def set_mode(self, descriptor: int, mode: int) -> None:
        self._on(
            descriptor,
            lambda: super(Recorder, self).set_mode(descriptor, mode),
            lambda path, inode: SetMode("set_mode", path, inode, mode),
            "set_mode",
        )

    def sync(self, descriptor: int) -> None:
        self._on(
            descriptor,
            lambda: super(Recorder, self).sync(descriptor),
            lambda path, inode: Sync("sync", path, inode),
            "sync",
        )

    def sync_directory(self, path: Path) -> None:
        self._step(
            "sync_directory",
            path,
            lambda: super(Recorder, self).sync_directory(path),
            lambda _: Sync("sync_directory", self._shown(path), self._inode(path)),
        )

    def rename(self, source: Path, target: Path) -> None:
        def note(_: None) -> Operation:
            old, new = self._slot(source), self._slot(target)
            inode = self._children[old[0]].pop(old[1])
            self._children[new[0]][new[1]] = inode
            return Names(
                "rename",
                self._shown(source),
                ((old, None), (new, inode)),
                new[0],
                target=self._shown(target),
            )

        self._step("rename", source, lambda: super(Recorder, self).rename(source, target), note)

    def unlink(self, path: Path) -> None:
        self._step(
            "unlink", path, lambda: super(Recorder, self).unlink(path), lambda _: self._drop("unlink", path)
        )

    def remove_directory(self, path: Path) -> None:
        self._step(
            "remove_directory",
            path,
            lambda: super(Recorder, self).remove_directory(path),
            lambda _: self._drop("remove_directory", path),
        )

    def close(self, descriptor: int) -> None:
        # A close that fails has closed nevertheless.
        super().close(descriptor)
        with self._guard:
            path = self._path_of(self._open.pop(descriptor))
            self.before("close", path)
            self.after("close", path)

    def lock(self, path: Path, *, wait: bool) -> FileLock:
        shown = self._shown(path)
        with self._guard:
            self.before("lock", shown)
        lock = super().lock(path, wait=wait)  # may wait for another thread: not under the guard
        with self._guard:
            directory, name = self._slot(path)
            if name not in self._children[directory] and lock.still_named():
                self.trace.append(self._name("lock", path, self._number()))
            try:
                self.after("lock", shown)
            except BaseException:
                lock.release()
                raise
        return lock

    def write_hint(self, lock: FileLock, data: bytes) -> None:
        shown = self._shown(lock.path)
        with self._guard:
            self.before("write_hint", shown)
            super().write_hint(lock, data)
            inode = self._inode(lock.path)
            self.trace.append(Write("write_hint", shown, inode, 0, data))
            self.trace.append(Resize("write_hint", shown, inode, len(data)))
            self.after("write_hint", shown)

    # -- keeping the books ----------------------------------------------------------------------------

    def _step(self, call: str, path: Path, action: Callable[[], T], note: Callable[[T], Operation]) -> T:
        shown = self._shown(path)
        with self._guard:
            self.before(call, shown)
            result = action()
            self.trace.append(note(result))
            self.after(call, shown)
            return result

    def _on(
        self,
        descriptor: int,
        action: Callable[[], None],
        note: Callable[[str, int], Operation],
        call: str,
    ) -> None:
        with self._guard:
            inode = self._open[descriptor]
            shown = self._path_of(inode)
            self.before(call, shown)
            action()
            self.trace.append(note(shown, inode))
            self.after(call, shown)

    def _name(self, call: str, path: Path, inode: int) -> Names:
        slot = self._slot(path)
        self._children[slot[0]][slot[1]] = inode
        return Names(
            call, self._shown(path), ((slot, inode),), slot[0], makes_directory=inode in self._children
        )

    def _drop(self, call: str, path: Path) -> Names:
        slot = self._slot(path)
        del self._children[slot[0]][slot[1]]
        return Names(call, self._shown(path), ((slot, None),), slot[0])

    def _number(self) -> int:
        self._next += 1
        return self._next - 1

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    def _slot(self, path: Path) -> Slot:
        return self._inode(path.parent), path.name

    def _inode(self, path: Path) -> int:
        inode = ROOT
        for name in path.relative_to(self.root).parts:
            inode = self._children[inode][name]
        return inode

    def _path_of(self, inode: int, start: int = ROOT, prefix: str = "") -> str:
        for name, child in self._children[start].items():
            if child == inode:
                return prefix + name
            if child in self._children and (found := self._path_of(inode, child, f"{prefix}{name}/")):
                return found
        return "" if start != ROOT else f"(unlinked {inode})"

    def _load(self, path: Path, inode: int, contents: dict[int, bytes]) -> None:
        for entry in sorted(path.iterdir()):
            child = self._number()
            self._children[inode][entry.name] = child
            if entry.is_dir():
                self._children[child] = {}
                self._load(entry, child, contents)
            else:
                contents[child] = entry.read_bytes()
