"""Wrong programs, made from the trace of a right one: a model that finds no fault with them is worth nothing.

A trace is cut into segments at the points where a save returned; operations are moved within a segment only.
Exchanging two syncs, or a sync and the creation of another file, gives no other program: what counts is that
they precede the rename. So the exchanges are those that involve a rename or an unlink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from crash.crash_recorder import Names, Operation, Returned, Sync
from swansong.store import naming


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed trace."""

    what: str
    """What was changed, in words."""
    trace: tuple[Operation, ...]
    start: int
    """Prefixes shorter than this are the unchanged trace's."""


def without_a_sync(trace: Sequence[Operation]) -> Iterator[Mutant]:
    """Each fsync, of a file or a directory, left out."""
    for index, operation in enumerate(trace):
        if isinstance(operation, Sync):
            what = f"without: {operation} (after: {trace[index - 1]})"
            yield Mutant(what, (*trace[:index], *trace[index + 1 :]), index)


def neighbours_exchanged(trace: Sequence[Operation]) -> Iterator[Mutant]:
    """Each two steps of a commit that follow one another, a rename or unlink among them, exchanged."""
    for segment in _segments(trace):
        steps = [i for i in segment if isinstance(trace[i], Sync) or _is_change(trace[i])]
        for first, second in pairwise(steps):
            possible = _inodes(trace[second]).isdisjoint(_made(trace[first:second]))
            if possible and (_is_change(trace[first]) or _is_change(trace[second])):
                yield _moved("exchanged", trace, second, first)


def commit_too_early(trace: Sequence[Operation]) -> Iterator[Mutant]:
    """The rename that commits, moved before each sync that precedes it."""
    for segment in _segments(trace):
        renames = [i for i in segment if trace[i].call == "rename" and not is_temporary(_target(trace[i]))]
        if renames:
            commit = renames[-1]
            for index in segment:
                if index < commit and isinstance(trace[index], Sync):
                    yield _moved("committed early", trace, commit, index)


def pruned_too_early(trace: Sequence[Operation]) -> Iterator[Mutant]:
    """The removal of something committed, moved before the sync that makes its successor durable."""
    for index, operation in enumerate(trace):
        if _is_change(operation) and not (
            operation.call == "rename" and not is_temporary(_target(operation))
        ):
            renames = [
                i for i in range(index) if trace[i].call == "rename" and not is_temporary(_target(trace[i]))
            ]
            if renames:
                durable = next(i for i in range(renames[-1], index) if isinstance(trace[i], Sync))
                yield _moved("pruned early", trace, index, durable)


def is_temporary(path: str) -> bool:
    """True for what lies in the temporary directory."""
    return f"{naming.CONTROL}/{naming.TEMPORARY}/" in path


def _target(operation: Operation) -> str:
    return operation.target if isinstance(operation, Names) else ""


def _is_change(operation: Operation) -> bool:
    """True if a name outside the temporary directory is given, taken or replaced."""
    if not isinstance(operation, Names) or operation.call not in ("rename", "unlink"):
        return False
    return not is_temporary(operation.path) or (
        operation.call == "rename" and not is_temporary(operation.target)
    )


def _inodes(operation: Operation) -> set[int]:
    """What an operation works on."""
    if isinstance(operation, Names):
        return {inode for _, inode in operation.changes if inode is not None}
    return {operation.inode} if isinstance(operation, Sync) else set()


def _made(operations: Sequence[Operation]) -> set[int]:
    """What comes into being."""
    return set().union(*(_inodes(o) for o in operations if o.call in ("create", "make_directory", "lock")))


def _segments(trace: Sequence[Operation]) -> Iterator[list[int]]:
    """Indexes of the operations between one return of a save and the next."""
    segment: list[int] = []
    for index, operation in enumerate(trace):
        if isinstance(operation, Returned):
            yield segment
            segment = []
        else:
            segment.append(index)
    yield segment


def _moved(how: str, trace: Sequence[Operation], index: int, before: int) -> Mutant:
    changed = (*trace[:before], trace[index], *trace[before:index], *trace[index + 1 :])
    return Mutant(f"{how}: {trace[index]} before: {trace[before]}", changed, before)
