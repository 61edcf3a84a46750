"""The flight recorder: what a rank leaves behind in memory when it is killed.

One file per rank in a memory file system. It has a fixed size and all its memory from the start, so writing
to it can neither fail nor end the process (SIGBUS). Sizes in bytes, integers little-endian, each part rounded
up to whole pages:

    header    "swansrec", version (4), length of the msgpack (4), XXH3-64 of the msgpack (8), the msgpack
    status    boundaries so far (8); the monotonic times of the last 128, as doubles, the n-th at n mod 129,
              so that the cell being written is none of theirs; at 2048, two slots of up to 192 for the phase
    clocks    queued, begun, done (8 each) for each component, in the header's order
    records   four slots (see `slots`): the last two boundaries, a provisional record, which becomes one if
              nothing is different at the boundary, and one being written

Files lie in a directory per incarnation of a job, `swansong-JOB-INCARNATION/rank-RANK`, of mode 0700.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Final, Self

import msgspec
import xxhash

from swansong.engine.clock import CELLS, Reading
from swansong.engine.processes import host_name, start_time
from swansong.engine.record_places import check_name, create_file, open_file, place_of, sweep
from swansong.engine.signals import in_forked_children
from swansong.engine.slots import Record, Slots, read_slots, slot_count, slot_size
from swansong.errors import ConfigError, RecordError, RecordTooLargeError, SwansongWarning
from swansong.policy.checks import whole_number

MAX_SLOT_BYTES: Final = 256 * 1024 * 1024
"""The largest `slot_bytes`; what reading a stranger's file may cost in memory."""

_MAGIC: Final = b"swansrec"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<8sIIQ")
_MAX_HEADER: Final = 4 * 1024 * 1024
_PAGE: Final = 4096
_CELL: Final = 8
_TIMES: Final = 128
_RING: Final = _TIMES + 1
_STATUS: Final = struct.Struct(f"<q{_RING}d")
_PHASE_AT: Final = 2048
_PHASE_BYTES: Final = 192
_BOUNDARY, _PROVISIONAL, _PHASE = range(3)
_KEPT: Final = {_BOUNDARY: 2, _PROVISIONAL: 1}
_KEPT_PHASES: Final = {_PHASE: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
    """Where the records lie and how large they may be. Raises ConfigError for what cannot be."""

    directory: Path = Path("/dev/shm")
    """A directory in a memory file system."""
    slot_bytes: int = 1024 * 1024
    """The most bytes of boundary state. Each rank takes four times as much memory."""
    spill: bool = False
    """True: larger boundary state goes to ordinary memory, lost with its process. False: it is an error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path(self.directory))
        if whole_number("slot_bytes", self.slot_bytes) > MAX_SLOT_BYTES:
            raise ConfigError(f"slot_bytes: wanted at most {MAX_SLOT_BYTES}, got {self.slot_bytes}")


class Whose(msgspec.Struct, frozen=True, kw_only=True):
    """Whose recorder it is."""

    job: str
    incarnation: str
    rank: int
    host: str
    """As `processes.host_name` says: pids compare only where it is the same."""
    pid: int
    start_time: int
    """Of the process, in the host's clock ticks."""
    keys: tuple[str, ...]
    """Of the components, in the order of their clocks."""
    slot_bytes: int


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


class Recorder:
    """A rank's own end. Written by the thread that trains; a context manager that removes the file if all is
    well, and leaves it behind for others to read if not. A forked child may not write, and removes nothing.
    """

    def __init__(self, path: Path, memory: mmap.mmap, whose: Whose, options: RecorderOptions) -> None:
        """Use `create`."""
        self.path, self.whose = path, whose
        self._options, self._limit = options, whose.slot_bytes
        self._view = memoryview(memory)
        self._layout = layout = _Layout.of(whose)
        self._slots = Slots(self._view, layout.records, whose.slot_bytes, _KEPT)
        self._phases = Slots(self._view, layout.status + _PHASE_AT, _PHASE_BYTES, _KEPT_PHASES)
        self._count = self._view[layout.status : layout.status + _CELL].cast("q")
        self._times = self._view[layout.status + _CELL : layout.status + _STATUS.size].cast("d")
        self._spilled: dict[int, bytes] = {}
        """Sequence number -> payload in ordinary memory."""
        self._said = False
        """That payloads go there."""
        self._forked = False
        """This is a child's copy."""
        in_forked_children(self._disown)

    @classmethod
    def create(
        cls, options: RecorderOptions, *, job: str, incarnation: str, rank: int, keys: Iterable[str]
    ) -> Self:
        """Make the recorder of this process, all its memory included.

        `job` and `incarnation` are 1 to 64 letters, digits and hyphens. Raises ConfigError for other names,
        RecordError if the rank has one already, the directory is not ours alone, or memory is short.
        """
        for name, value in (("job", job), ("incarnation", incarnation)):
            check_name(name, value)
        whose = Whose(
            job=job,
            incarnation=incarnation,
            rank=whole_number("rank", rank, least=0, wanted="an int, 0 or more"),
            host=host_name(),
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
            keys=tuple(keys),
            slot_bytes=options.slot_bytes,
        )
        path = place_of(options.directory, job=job, incarnation=incarnation, rank=rank)
        layout = _Layout.of(whose)
        descriptor = create_file(path)
        try:
            os.posix_fallocate(descriptor, 0, layout.size)
            memory = mmap.mmap(descriptor, layout.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            memory[: len(layout.header)] = layout.header
        except OSError as error:
            path.unlink()
            raise RecordError(_no_memory(path, layout.size, error), path=str(path)) from error
        finally:
            os.close(descriptor)
        return cls(path, memory, whose, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.remove()

    def cells(self, key: str) -> memoryview:
        """Return the three int64 of a component's clock: for the `cells` of a Clock."""
        at = self._layout.clocks + self.whose.keys.index(key) * CELLS * _CELL
        return self._view[at : at + CELLS * _CELL].cast("q")

    def write_boundary(self, step: int, payload: bytes) -> None:
        """Record the boundary state of `step`, which is final now; the one before stays readable.

        Raises RecordTooLargeError, or keeps it in ordinary memory with a SwansongWarning, by the options.
        """
        self._write(_BOUNDARY, step, payload)
        self._count_boundary()

    def confirm(self) -> None:
        """The boundary was reached for which the last provisional record was made, and that is final now."""
        if self._forked:
            self._refuse_child()
        self._slots.promote(_PROVISIONAL)
        self._count_boundary()

    def _count_boundary(self) -> None:
        count = self._count[0]
        self._times[count % _RING] = time.monotonic()
        self._count[0] = count + 1

    def write_provisional(self, step: int, payload: bytes) -> None:
        """Record what the boundary state of `step`, the next, would be. Raises as `write_boundary` does."""
        self._write(_PROVISIONAL, step, payload)

    def set_phase(self, words: str) -> None:
        """Record what the main thread does now; of long words the beginning."""
        if self._forked:
            self._refuse_child()
        text = words.encode(errors="replace")[:_PHASE_BYTES]
        self._phases.write(_PHASE, 0, text, len(text))

    def recorded(self) -> Recorded:
        """Return what the recorder holds, what went to ordinary memory included. From any thread."""
        spilled = self._spilled
        read = _parse(self.whose, self._layout, lambda at, length: bytes(self._view[at : at + length]))

        def whole(record: Record) -> Record:
            return replace(record, payload=spilled.get(record.sequence, record.payload))

        return replace(
            read,
            boundaries=tuple(map(whole, read.boundaries)),
            provisional=read.provisional and whole(read.provisional),
        )

    def remove(self) -> None:
        """Remove the file, and with the last of them the directory: the job has ended in order.

        Again: nothing. The memory stays valid for clocks that still live in it.
        """
        if os.getpid() == self.whose.pid:
            with suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()

    def _write(self, kind: int, step: int, payload: bytes) -> None:
        if self._forked:
            self._refuse_child()
        nbytes = len(payload)
        if nbytes <= self._limit:
            self._slots.write(kind, step, payload, nbytes)
        else:
            self._write_large(kind, step, payload, nbytes)

    def _write_large(self, kind: int, step: int, payload: bytes, nbytes: int) -> None:
        limit = self._limit
        if not self._options.spill:
            raise RecordTooLargeError(
                f"rank {self.whose.rank}, step {step}: boundary state of {nbytes} bytes does not fit the "
                f"flight recorder's slots of {limit} bytes; raise slot_bytes, or set spill=True to keep it "
                "in ordinary memory, where it is lost with the process",
                path=str(self.path),
                nbytes=nbytes,
                limit=limit,
            )
        if not self._said:
            warnings.warn(
                f"rank {self.whose.rank}: boundary state of {nbytes} bytes exceeds the flight recorder's "
                f"slots of {limit} bytes and is kept in ordinary memory: lost with the process",
                SwansongWarning,
                stacklevel=3,
            )
            self._said = True
        # Before the slot that refers to it, and until after it: another thread may be reading.
        self._spilled[self._slots.next_sequence] = payload
        self._slots.write(kind, step, None, nbytes)
        for sequence in self._spilled.keys() - self._slots.kept():
            del self._spilled[sequence]

    def _disown(self) -> None:
        self._forked = True

    def _refuse_child(self) -> None:
        raise RecordError(
            f"flight recorder of process {self.whose.pid}: its child {os.getpid()} may not write to it",
            path=str(self.path),
        )


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
    layout = _Layout.of(whose)
    if layout.size != size:
        raise RecordError(
            f"flight recorder {path}: wanted {layout.size} bytes by its header, found {size}", path=str(path)
        )
    return _parse(whose, layout, read)


def _read_header(path: Path, read: Callable[[int, int], bytes]) -> Whose:
    """What the header says, of which a sane layout follows."""

    def refused(what: str) -> RecordError:
        return RecordError(f"flight recorder {path}: {what}", path=str(path))

    prefix = read(0, _PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise refused(f"cut short at {len(prefix)} bytes")
    magic, version, length, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise refused("no flight recorder, or one whose process died while making it")
    if version != _VERSION:
        raise refused(f"wanted version {_VERSION}, found {version}")
    if length > _MAX_HEADER:
        raise refused(f"header of {length} bytes, at most {_MAX_HEADER} are read")
    packed = read(_PREFIX.size, length)
    if xxhash.xxh3_64_intdigest(packed) != digest:
        raise refused("the header is damaged")
    try:
        whose = msgspec.msgpack.decode(packed, type=Whose)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refused(f"the header is malformed: {error}") from error
    if not 0 < whose.slot_bytes <= MAX_SLOT_BYTES:
        raise refused(f"slots of {whose.slot_bytes} bytes, wanted 1 to {MAX_SLOT_BYTES}")
    return whose


def _parse(whose: Whose, layout: _Layout, read: Callable[[int, int], bytes]) -> Recorded:
    table = read(layout.clocks, len(whose.keys) * CELLS * _CELL)
    readings = struct.iter_unpack("<qqq", table[: len(table) // (CELLS * _CELL) * CELLS * _CELL])
    phases = read_slots(read, layout.status + _PHASE_AT, _PHASE_BYTES, _KEPT_PHASES)
    records = read_slots(read, layout.records, whose.slot_bytes, _KEPT)
    newest = records[0] if records else None
    return Recorded(
        whose=whose,
        clocks={key: Reading(*cells) for key, cells in zip(whose.keys, readings, strict=False)},
        phase=(phases[0].payload or b"").decode(errors="replace") if phases else "",
        boundary_times=_boundary_times(read(layout.status, _STATUS.size)),
        boundaries=tuple(record for record in records if record.kind == _BOUNDARY),
        # One that is older than a boundary has been superseded by it.
        provisional=newest if newest is not None and newest.kind == _PROVISIONAL else None,
    )


def _boundary_times(status: bytes) -> tuple[float, ...]:
    if len(status) != _STATUS.size:
        return ()
    count, *times = _STATUS.unpack(status)
    if count < 0:
        return ()
    ordered = (times[number % _RING] for number in range(max(0, count - _TIMES), count))
    return tuple(moment for moment in ordered if isfinite(moment))


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parts lie."""

    header: bytes
    status: int
    clocks: int
    records: int
    size: int

    @classmethod
    def of(cls, whose: Whose) -> Self:
        packed = msgspec.msgpack.encode(whose)
        header = _PREFIX.pack(_MAGIC, _VERSION, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed
        if len(packed) > _MAX_HEADER:
            raise ConfigError(f"flight recorder: too many components, {len(whose.keys)}")
        status = _pages(len(header))
        clocks = status + _PAGE
        records = clocks + _pages(len(whose.keys) * CELLS * _CELL)
        size = records + _pages(slot_count(_KEPT) * slot_size(whose.slot_bytes))
        return cls(header, status, clocks, records, size)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _no_memory(path: Path, size: int, error: OSError) -> str:
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    hint = "; lower slot_bytes, or choose another directory" if error.errno == errno.ENOSPC else ""
    return f"flight recorder {path}: {size} bytes wanted, {free} free: {error.strerror}{hint}"
