"""Noticing a job that is resumed again and again, only to fail in the same way at the same step.

What is known of earlier starts of a job are the reports of their incidents. The last incident of each start
is how it ended. Ends are in a row if they belong to one stem, follow each other, and have a failure in
common: the same exception (type and message, but for addresses and the like: `persist.failure_text`) after
the same step of the rank that threw it, or the loss of a process after the same step of that process or, if
it has left no record, of those that remained. What began an incident always counts, and so does what came
with it, but for exceptions that speak of a peer that is gone where somebody threw another one. Which rank
it was does not matter: what one rank runs into today another may tomorrow. An end of another kind (a signal,
a request, a stall) interrupts the row, and so does progress: a step that the checkpoint to be resumed from
has left behind.

A loss of which nobody knows at which step it was is in no row.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from swansong.errors import CrashLoopError
from swansong.persist import incidents, places
from swansong.persist.failure_text import normalised, tells_of_a_peer
from swansong.protocol.messages import FaultKind

LOOKED_AT: Final = 100
"""At least so many reports are looked at, the latest first; more only for a higher limit."""
BYTES_READ: Final = 4 * incidents.SIZE_LIMIT
"""No more than so many bytes of reports are read in all."""

_LOST: Final = "a rank's process was lost"
_WISHED: Final = frozenset({FaultKind.SIGNALLED.value, FaultKind.REQUESTED.value})
"""What begins an end that somebody wanted."""
_SHOWN: Final = 10
"""So many reports are named in a message."""


class Failure(NamedTuple):
    """What a start of the job ended with."""

    what: str
    """Type and message of an exception, normalised, or other words."""
    step: int
    """The last that was complete."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one start of a job ended."""

    report: str
    """Path of the report."""
    failures: tuple[Failure, ...]
    """What began it, then the others in the order in which they became known. None: it did not fail, or
    nobody knows where."""


class CrashLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is not resumed."""

    what: str
    step: int
    """The last that was complete."""
    reports: tuple[str, ...]
    """Paths, the latest first: one for each end."""

    def error(self) -> CrashLoopError:
        """For the user."""
        more = len(self.reports) - _SHOWN
        listed = "\n  ".join([*self.reports[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
        return CrashLoopError(
            f"not resumed: the job failed {len(self.reports)} times in a row after step {self.step}, in the "
            f"same way: {self.what}. Going on would most likely end so again. Mend the cause; then remove "
            f"these reports, or resume with a higher crash_loop_limit (0 or None: no limit):\n  {listed}",
            step=self.step,
            reports=self.reports,
        )


def look_for(directory: Path, stem: str, *, step: int, limit: int) -> CrashLoop | None:
    """The crash loop that the reports of a directory show, if there is one.

    `stem` is that of the checkpoints, `step` is where the job would be resumed. With limit 0 nothing is read.
    """
    return (
        find(endings(directory, stem, most=max(LOOKED_AT, 4 * limit)), step=step, limit=limit)
        if limit
        else None
    )


def find(latest_first: Iterable[Ending], *, step: int, limit: int) -> CrashLoop | None:
    """The crash loop of `limit` ends in a row at a step not left behind at `step`. Pure.

    No more is taken of `latest_first` than that needs.
    """
    common: tuple[Failure, ...] | None = None
    row: list[str] = []
    for ending in latest_first:
        found = tuple(failure for failure in ending.failures if failure.step >= step)
        common = found if common is None else tuple(failure for failure in common if failure in found)
        if not common:
            return None
        row.append(ending.report)
        if len(row) >= limit:
            return CrashLoop(what=common[0].what, step=common[0].step, reports=tuple(row))
    return None


# -- reading ------------------------------------------------------------------------------------------


class _Fault(msgspec.Struct):
    kind: str
    rank: int
    what: str = ""
    traceback: str = ""
    step: int | None = None

    @property
    def lost(self) -> bool:
        return self.kind == FaultKind.LOST

    @property
    def raised(self) -> bool:
        return self.kind == FaultKind.RAISED


class _Rank(msgspec.Struct):
    rank: int
    step: int | None
    boundary: int | None


class _Report(msgspec.Struct):
    """What matters here of `incidents.document`."""

    stem: str
    run: str
    faults: list[_Fault]
    ranks: list[_Rank]
    first_fault: _Fault | None = None


def endings(directory: Path, stem: str, *, most: int = LOOKED_AT) -> Iterator[Ending]:
    """How the starts of a job ended, the latest first, as far as that is told.

    Of at most `most` reports. What is no report, or cannot be read, is passed over.
    """
    try:
        paths = places.incident_files(directory)
    except OSError:
        return
    known: set[str] = set()
    left = BYTES_READ
    for path in paths[:most]:
        data = _read(path, left)
        left -= len(data)
        report = _decoded(data)
        if report is not None and report.stem == stem and report.run not in known:
            known.add(report.run)
            yield Ending(str(path), _failures(report))


def _read(path: Path, most: int) -> bytes:
    """The content of a regular file; nothing of one that is larger than it should be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > min(most, incidents.SIZE_LIMIT):
                return b""
            return file.read(status.st_size)
    except OSError:
        return b""


def _decoded(data: bytes) -> _Report | None:
    try:
        return msgspec.json.decode(data, type=_Report)
    except (msgspec.DecodeError, RecursionError):
        return None


def _failures(report: _Report) -> tuple[Failure, ...]:
    if report.faults and report.faults[0].kind in _WISHED:
        return ()
    reached = {rank.rank: rank.step if rank.boundary is None else rank.boundary for rank in report.ranks}
    newest = max((step for step in reached.values() if step is not None), default=None)
    failures: list[Failure] = []
    for fault in _counted(report):
        known = (reached.get(fault.rank), fault.step, newest) if fault.lost else (fault.step,)
        step = next((step for step in known if step is not None), None)
        if step is not None:
            failures.append(Failure(_LOST if fault.lost else normalised(fault.what), step))
    return tuple(failures)


def _counted(report: _Report) -> list[_Fault]:
    """The faults that may be in common with other ends, what began the incident first."""
    faults = [fault for fault in report.faults if fault.lost or fault.raised]
    told = [fault for fault in faults if fault.raised and tells_of_a_peer(fault.what, fault.traceback)]
    explained = any(fault.raised and fault not in told for fault in faults)
    first = report.first_fault
    counted = [fault for fault in faults if fault == first or not (explained and fault in told)]
    return sorted(counted, key=lambda fault: fault != first)
