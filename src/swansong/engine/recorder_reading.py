"""Reading a flight recorder: one's own, or a dead process's, of which nothing is believed."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import msgspec
import xxhash

from swansong.engine.clock import CELLS, Reading
from swansong.engine.processes import host_name
from swansong.engine.record_places import open_file, sweep
from swansong.engine.recorder_layout import (
    BOUNDARY,
    CELL,
    KEPT,
    KEPT_PHASES,
    MAGIC,
    MAX_HEADER,
    MAX_SLOT_BYTES,
    PHASE_AT,
    PHASE_BYTES,
    PREFIX,
    PROVISIONAL,
    RING,
    STATUS,
    TIMES,
    VERSION,
    Layout,
    Whose,
)
from swansong.engine.slots import Record, read_slots
from swansong.errors import RecordError


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recorder holds. Each part is whole; together they may be a moment apart while its rank lives."""

    whose: Whose
    clocks: dict[str, Reading]
    """By component key. Begun and done are UNKNOWN for clocks that the host does not keep."""
    phase: str
    """What the main thread said last that it does."""
    boundary_times: tuple[float, ...]
    """Monotonic seconds of this host at the last boundaries, oldest first, at most 128."""
    boundaries: tuple[Record, ...]
    """Boundary state at the last two boundaries, newest first."""
    provisional: Record | None
    """Boundary state taken since then, tagged with the step to come."""

    def at(self, step: int) -> Record | None:
        """Return the record of a boundary."""
        return next((record for record in self.boundaries if record.step == step), None)


def read_recorder(path: Path) -> Recorded:
    """Read a recorder, usually that of a dead process of this host.

    No length in the file is believed, no file that another user may have written is opened, and at most
    MAX_SLOT_BYTES are read per record. Raises RecordError.
    """
    descriptor, size = open_file(path)
    try:
        return _read(path, size, lambda at, length: os.pread(descriptor, length, at))
    except OSError as error:
        raise RecordError(f"flight recorder {path}: {error.strerror}", path=str(path)) from error
    finally:
        os.close(descriptor)


def sweep_recorders(directory: Path, *, job: str, keep: str) -> list[Path]:
    """Remove what incarnations of `job` have left on this host, but for the present one, which is `keep`.

    Those of an incarnation are removed, and their directory returned, if none of its processes lives. Call it
    when the former controller is gone: until then it may want to read them. Raises RecordError, ConfigError.
    """
    return sweep(directory, job=job, keep=keep, owner=_owner)


def _owner(path: Path) -> tuple[int, int] | None:
    descriptor, _ = open_file(path)
    try:
        whose = _read_header(path, lambda at, length: os.pread(descriptor, length, at))
    finally:
        os.close(descriptor)
    return (whose.pid, whose.start_time) if whose.host == host_name() else None


def _read(path: Path, size: int, read: Callable[[int, int], bytes]) -> Recorded:
    whose = _read_header(path, read)
    layout = Layout.of(whose)
    if layout.size != size:
        raise RecordError(
            f"flight recorder {path}: wanted {layout.size} bytes by its header, found {size}", path=str(path)
        )
    return parse(whose, layout, read)


def _read_header(path: Path, read: Callable[[int, int], bytes]) -> Whose:
    """What the header says, of which a sane layout follows."""

    def refused(what: str) -> RecordError:
        return RecordError(f"flight recorder {path}: {what}", path=str(path))

    prefix = read(0, PREFIX.size)
    if len(prefix) != PREFIX.size:
        raise refused(f"cut short at {len(prefix)} bytes")
    magic, version, length, digest = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise refused("no flight recorder, or one whose process died while making it")
    if version != VERSION:
        raise refused(f"wanted version {VERSION}, found {version}")
    if length > MAX_HEADER:
        raise refused(f"header of {length} bytes, at most {MAX_HEADER} are read")
    packed = read(PREFIX.size, length)
    if xxhash.xxh3_64_intdigest(packed) != digest:
        raise refused("the header is damaged")
    try:
        whose = msgspec.msgpack.decode(packed, type=Whose)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refused(f"the header is malformed: {error}") from error
    if not 0 < whose.slot_bytes <= MAX_SLOT_BYTES:
        raise refused(f"slots of {whose.slot_bytes} bytes, wanted 1 to {MAX_SLOT_BYTES}")
    return whose


def parse(whose: Whose, layout: Layout, read: Callable[[int, int], bytes]) -> Recorded:
    table = read(layout.clocks, len(whose.keys) * CELLS * CELL)
    readings = struct.iter_unpack("<qqq", table[: len(table) // (CELLS * CELL) * CELLS * CELL])
    phases = read_slots(read, layout.status + PHASE_AT, PHASE_BYTES, KEPT_PHASES)
    records = read_slots(read, layout.records, whose.slot_bytes, KEPT)
    newest = records[0] if records else None
    return Recorded(
        whose=whose,
        clocks={key: Reading(*cells) for key, cells in zip(whose.keys, readings, strict=False)},
        phase=(phases[0].payload or b"").decode(errors="replace") if phases else "",
        boundary_times=_boundary_times(read(layout.status, STATUS.size)),
        boundaries=tuple(record for record in records if record.kind == BOUNDARY),
        # One that is older than a boundary has been superseded by it.
        provisional=newest if newest is not None and newest.kind == PROVISIONAL else None,
    )


def _boundary_times(status: bytes) -> tuple[float, ...]:
    if len(status) != STATUS.size:
        return ()
    count, *times = STATUS.unpack(status)
    if count < 0:
        return ()
    ordered = (times[number % RING] for number in range(max(0, count - TIMES), count))
    return tuple(moment for moment in ordered if isfinite(moment))
