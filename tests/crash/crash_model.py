"""What may be on the disk after the power goes: docs/format.md, section 8, as a program.

A power cut happens after some number of recorded operations. Of those, the disk has kept

- **data**: what a file contained when its last fsync returned, for certain. Of what was done to it since, any
  4 KiB block has its old content, or one that it had since, or zeros, or is torn (half one, half the other);
  the file has any size that it passed through since.
- **names**: those that a directory had when its last fsync returned, for certain. Of the changes since
  (create, unlink, rename), any subset, but in order for each name: a later one does not survive without the
  earlier ones of the same name. A rename happened as a whole or not at all; it is certain once its *new*
  directory was synced.

Files and names are kept independently: a name may survive while the content of its file does not.

`crashes` lists the states that a trace can leave, for every prefix of it: every subset of the uncertain name
changes if there are at most 8 (else the plain ones and 200 random ones), each with all uncertain data kept,
lost or zeroed; and every single block, size and file kept or lost alone, with all names kept or none. It is
the extremes that find wrong programs out: what one lost thing does, and what one does that is not lost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crash.crash_recorder import ROOT, Names, Operation, Resize, Returned, Slot, Snapshot, Sync, Write

BLOCK = 4096
EXHAUSTIVE = 8
"""Up to so many uncertain name changes, every subset is tried."""
SAMPLES = 200
"""Random subsets beyond that."""

Tree: TypeAlias = dict[str, bytes | None]
"""Relative path -> content, None for a directory."""


@dataclass(frozen=True, slots=True)
class Crash:
    """One state of the disk."""

    prefix: int
    """Operations done before the power went."""
    returned: int
    """Saves promised by then (their highest number; 0: none)."""
    lost: str
    """What was lost, in words."""
    tree: Tree


def crashes(
    trace: Sequence[Operation], initial: Snapshot, *, seed: int, start: int = 0, returned: int = 0
) -> Iterator[Crash]:
    """Every state that a power cut during `trace` can leave, from prefix `start` on; each state only once.

    The same state is listed again when more was promised by then. `returned` was promised before.
    """
    disk = Disk(initial)
    seen: set[frozenset[tuple[str, bytes | None]]] = set()
    chance = random.Random(seed)
    for prefix, operation in enumerate([None, *trace]):
        if isinstance(operation, Returned):
            returned = operation.save
            seen.clear()
        elif operation is not None:
            disk.apply(operation)
        if prefix < start:
            continue
        for lost, tree in disk.crashes(chance):
            state = frozenset(tree.items())
            if state not in seen:
                seen.add(state)
                yield Crash(prefix, returned, lost, tree)


class Disk:
    """What is certain and what is not, after some operations."""

    def __init__(self, initial: Snapshot) -> None:
        self._certain = {
            (directory, name): inode
            for directory, names in initial.children.items()
            for name, inode in names.items()
        }
        self._settled: dict[Slot, int] = {}
        """Slot -> when the change was made that is now certain; earlier ones have no effect any more."""
        self._uncertain: list[tuple[int, Names]] = []
        self._directories = set(initial.children)
        self._files = {inode: File(content) for inode, content in initial.contents.items()}
        self._time = 0

    def apply(self, operation: Operation) -> None:
        """Perform one more operation."""
        self._time += 1
        if isinstance(operation, Names):
            self._uncertain.append((self._time, operation))
            for _, inode in operation.changes:
                if inode is not None and operation.makes_directory:
                    self._directories.add(inode)
                elif inode is not None and inode not in self._directories:
                    self._files.setdefault(inode, File(b""))
        elif isinstance(operation, Write):
            self._files[operation.inode].write(operation.offset, operation.data)
        elif isinstance(operation, Resize):
            self._files[operation.inode].resize(operation.size, grow=operation.grow)
        elif isinstance(operation, Sync) and operation.inode in self._directories:
            self._settle(operation.inode)
        elif isinstance(operation, Sync):
            self._files[operation.inode].sync()

    def crashes(self, chance: random.Random) -> Iterator[tuple[str, Tree]]:
        """(what was lost, what is left), for a power cut now. The same tree may come twice."""
        pending = [(self._effect(time, names), names) for time, names in self._uncertain]
        subsets = list(_subsets([effect for effect, _ in pending], chance))
        everything, nothing = frozenset(range(len(pending))), frozenset[int]()
        reachable = {*self._certain.values()} | {i for effect, _ in pending for _, i in effect.items()}
        dirty = {i: f for i, f in self._files.items() if i in reachable and f.dirty}
        general = list(_general(dirty))
        for kept in subsets:
            children = self._children(effect for index, (effect, _) in enumerate(pending) if index in kept)
            gone = ", ".join(str(names) for index, (_, names) in enumerate(pending) if index not in kept)
            for what, contents in general:
                yield f"names lost: {gone or 'none'}; data: {what}", self._tree(children, contents)
        for kept in (everything, nothing):
            children = self._children(effect for index, (effect, _) in enumerate(pending) if index in kept)
            for what, contents in _particular(dirty):
                yield (
                    f"names lost: {'none' if kept else 'all uncertain ones'}; data: {what}",
                    self._tree(children, contents),
                )

    def _settle(self, directory: int) -> None:
        waiting = []
        for time, names in self._uncertain:
            if names.home != directory:
                waiting.append((time, names))
                continue
            for slot, inode in self._effect(time, names).items():
                self._settled[slot] = time
                self._certain.pop(slot, None)
                if inode is not None:
                    self._certain[slot] = inode
        self._uncertain = [(time, names) for time, names in waiting if self._effect(time, names)]

    def _effect(self, time: int, names: Names) -> dict[Slot, int | None]:
        return {slot: inode for slot, inode in names.changes if time > self._settled.get(slot, 0)}

    def _children(self, effects: Iterable[dict[Slot, int | None]]) -> dict[int, dict[str, int]]:
        slots: dict[Slot, int | None] = dict(self._certain)
        for effect in effects:
            slots.update(effect)
        children: dict[int, dict[str, int]] = {}
        for (directory, name), inode in slots.items():
            if inode is not None:
                children.setdefault(directory, {})[name] = inode
        return children

    def _tree(self, children: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
        tree: Tree = {}
        todo = [("", ROOT)]
        while todo:
            prefix, directory = todo.pop()
            for name, inode in children.get(directory, {}).items():
                if inode in self._directories:
                    tree[prefix + name] = None
                    todo.append((f"{prefix}{name}/", inode))
                else:
                    tree[prefix + name] = contents.get(inode, self._files[inode].content)
        return tree


class File:
    """A file's content: what is certain, what it is now, and what its blocks were in between."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.certain = content
        self._sizes = [len(content)]
        self._blocks: dict[int, list[bytes]] = {}

    @property
    def dirty(self) -> bool:
        """True if something is not certain."""
        return len(self._sizes) > 1 or bool(self._blocks)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at an offset."""
        padded = self.content.ljust(offset, b"\0")
        self._become(padded[:offset] + data + padded[offset + len(data) :])

    def resize(self, size: int, *, grow: bool) -> None:
        """Cut, or fill up with zeros."""
        if not grow or size > len(self.content):
            self._become(self.content[:size].ljust(size, b"\0"))

    def sync(self) -> None:
        """Make everything certain."""
        self.certain = self.content
        self._sizes = [len(self.content)]
        self._blocks = {}

    def extremes(self) -> Iterator[tuple[str, bytes]]:
        """Everything that is uncertain lost; everything zeros."""
        yield "lost", self.certain
        yield "zeros", self._with(dict.fromkeys(self._blocks, bytes(BLOCK)))

    def variants(self) -> Iterator[tuple[str, bytes]]:
        """Each size; each block's earlier values alone, or its newest alone; each block zeros or torn."""
        old = {block: values[0] for block, values in self._blocks.items()}
        for size in dict.fromkeys(self._sizes):
            yield f"size {size}", self._with({}, size)
            yield f"size {size}, blocks lost", self._with(old, size)
            yield f"size {size}, blocks zero", self._with(dict.fromkeys(old, bytes(BLOCK)), size)
        for block, values in self._blocks.items():
            new = values[-1]
            for earlier in dict.fromkeys([*values[:-1], bytes(BLOCK)]):
                yield f"block {block} lost", self._with({block: earlier})
                yield f"block {block} torn", self._with({block: new[: BLOCK // 2] + earlier[BLOCK // 2 :]})
                yield f"block {block} torn", self._with({block: earlier[: BLOCK // 2] + new[BLOCK // 2 :]})
            yield f"only block {block} kept", self._with({b: v for b, v in old.items() if b != block})

    def _become(self, content: bytes) -> None:
        if len(content) != len(self.content):
            self._sizes.append(len(content))
        for block in range(-(-max(len(content), len(self.content)) // BLOCK)):
            before, now = _block(self.content, block), _block(content, block)
            if before != now:
                self._blocks.setdefault(block, [before]).append(now)
        self.content = content

    def _with(self, blocks: dict[int, bytes], size: int | None = None) -> bytes:
        size = len(self.content) if size is None else size
        content = bytearray(self.content.ljust(size, b"\0"))
        for block, value in blocks.items():
            content[block * BLOCK : (block + 1) * BLOCK] = value
        return bytes(content[:size]).ljust(size, b"\0")


def _block(content: bytes, block: int) -> bytes:
    return content[block * BLOCK : (block + 1) * BLOCK].ljust(BLOCK, b"\0")


def _general(dirty: dict[int, File]) -> Iterator[tuple[str, dict[int, bytes]]]:
    """All files alike: kept, lost, zeros."""
    yield "all kept", {}
    if dirty:
        extremes = {inode: dict(file.extremes()) for inode, file in dirty.items()}
        for what in ("lost", "zeros"):
            yield f"all {what}", {inode: contents[what] for inode, contents in extremes.items()}


def _particular(dirty: dict[int, File]) -> Iterator[tuple[str, dict[int, bytes]]]:
    """One file in every way, while all others are kept, or lost."""
    lost = {inode: file.certain for inode, file in dirty.items()}
    for inode, file in dirty.items():
        for what, content in itertools.chain(file.variants(), [("kept", file.content)], file.extremes()):
            yield f"file {inode}: {what}", {inode: content}
            yield f"file {inode}: {what}, other files lost", {**lost, inode: content}


def _subsets(effects: Sequence[dict[Slot, int | None]], chance: random.Random) -> Iterator[frozenset[int]]:
    """Sets of indexes of changes that may have survived, each in order for every name."""
    before = [{j for j in range(i) if effects[j].keys() & effect.keys()} for i, effect in enumerate(effects)]
    count = len(effects)

    def in_order(kept: set[int]) -> frozenset[int]:
        return frozenset(i for i in kept if _ancestors(i, before) <= kept)

    if count <= EXHAUSTIVE:
        yield from {in_order({i for i in range(count) if bits >> i & 1}) for bits in range(1 << count)}
        return
    everything = set(range(count))
    sets = [everything, set[int]()]
    sets += [{i} | _ancestors(i, before) for i in range(count)]
    sets += [everything - {i} for i in range(count)]
    sets += [{i for i in range(count) if chance.random() < 0.5} for _ in range(SAMPLES)]
    yield from {in_order(kept) for kept in sets}


def _ancestors(index: int, before: Sequence[set[int]]) -> set[int]:
    found: set[int] = set()
    todo = [index]
    while todo:
        for earlier in before[todo.pop()] - found:
            found.add(earlier)
            todo.append(earlier)
    return found
