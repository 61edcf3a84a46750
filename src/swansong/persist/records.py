"""Boundary records: kept by each rank in its flight recorder, found by others when it is dead.

A rank writes its records in its main thread; the processor's thread, the committer and other ranks of the
host read them. Whoever saves a part at a fault writes the best record of each rank of its host into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from swansong.engine.recorder import Recorder, RecorderOptions
from swansong.engine.recorder_reading import Recorded
from swansong.engine.recorders import HostRecorders
from swansong.errors import MalformedError, RecordError
from swansong.persist import places
from swansong.persist.boundary import Record, best, trimmed
from swansong.state import tree

FIELD: Final = "records"
"""In a part's objects: rank -> record."""


class Records:
    """This rank's own: the last two boundaries, and what was recorded since. Written by the main thread."""

    def __init__(self, start: int, recorder: Recorder | None = None) -> None:
        """`start` is the step at which the run begins, whose state is not of this run's making.

        Without `recorder` they are lost with the process.
        """
        self.start = start
        self._recorder = recorder
        self._kept: tuple[Record, ...] = ()
        self._provisional: Record | None = None

    def add(self, step: int, payload: bytes) -> None:
        """The boundary of `step` was reached; `payload` is its packed state.

        Raises RecordTooLargeError if the recorder's options say so.
        """
        if self._recorder is not None:
            self._recorder.write_boundary(step, payload)
        self._kept, self._provisional = (Record(step, False, payload), *self._kept[:1]), None

    def add_provisional(self, step: int, payload: bytes) -> None:
        """What the boundary of `step`, the next, will say of this rank, if all goes well. Raises likewise."""
        if self._recorder is not None:
            self._recorder.write_provisional(step, payload)
        self._provisional = Record(step, True, payload)

    def confirm(self) -> None:
        """The boundary was reached for which a provisional record was made, and there is no more to say."""
        provisional = self._provisional
        if provisional is None:
            raise RuntimeError("a boundary is confirmed of which nothing was recorded")
        if self._recorder is not None:
            self._recorder.confirm()
        record = Record(provisional.step, False, provisional.payload)
        self._kept, self._provisional = (record, *self._kept[:1]), None

    @property
    def last_step(self) -> int | None:
        """The last boundary; None before the first."""
        kept = self._kept
        return kept[0].step if kept else None

    @property
    def reached(self) -> int:
        """The step at which the loop stands."""
        last = self.last_step
        return self.start if last is None else last

    def best(self, step: int) -> Record | None:
        """What says most of a step."""
        provisional = self._provisional
        return best([*self._kept, *([provisional] if provisional is not None else [])], step)


@dataclass(frozen=True, slots=True)
class RecordPlaces:
    """Where the records of a start of a job lie, on whichever host."""

    options: RecorderOptions
    job: str
    incarnation: str

    @classmethod
    def of(cls, options: RecorderOptions, directory: Path, series: str, incarnation: bytes) -> RecordPlaces:
        """By the directory of checkpoints and the series that it trains: one job at a time does that."""
        return cls(options, places.recorder_job(directory, series), incarnation.hex())

    @property
    def here(self) -> HostRecorders:
        """Those of this host."""
        return HostRecorders(directory=self.options.directory, job=self.job, incarnation=self.incarnation)

    def create(self, rank: int, keys: Iterable[str], say: Callable[[str], object]) -> Recorder | None:
        """Make this rank's recorder; None, and `say` why, where that cannot be."""
        try:
            return Recorder.create(
                self.options, job=self.job, incarnation=self.incarnation, rank=rank, keys=keys
            )
        except RecordError as error:
            say(f"rank {rank} has no flight recorder; if it is killed, its boundary state is lost: {error}")
            return None


def recorded_on(host: HostRecorders, step: int) -> dict[int, Record]:
    """The best record of a step of each rank that has a recorder on this host."""
    found = {rank: host.read(rank) for rank in host.ranks()}
    records = {
        rank: best(_records(recorded), step) for rank, recorded in found.items() if recorded is not None
    }
    return {rank: record for rank, record in records.items() if record is not None}


def _records(recorded: Recorded) -> list[Record]:
    slots = [(slot, False) for slot in recorded.boundaries]
    if recorded.provisional is not None:
        slots.append((recorded.provisional, True))
    return [
        Record(slot.step, provisional, slot.payload)
        for slot, provisional in slots
        if slot.payload is not None
    ]


def as_objects(records: Mapping[int, Record], step: int, *, tensors: bool = True) -> dict[str, Any]:
    """Records as a part's objects. Of boundary tensors only those that can count are kept, if `tensors`."""
    return {
        FIELD: {
            rank: {"step": record.step, "provisional": record.provisional, "payload": record.payload}
            for rank, record in trimmed(records, step, tensors=tensors).items()
        }
    }


def from_objects(objects: Mapping[str, Any] | None) -> dict[int, Record]:
    """The records in a part's objects; none if it has none, or they are malformed."""
    try:
        extra = tree.unflatten((objects or {}).get("extra"), {})
        found = extra.get(FIELD, {}) if isinstance(extra, dict) else {}
        return msgspec.convert(found, type=dict[int, Record])
    except (MalformedError, msgspec.ValidationError):
        return {}
