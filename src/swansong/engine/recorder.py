"""The flight recorder: what a rank leaves behind in memory when it is killed.

One file per rank in a memory file system, with a fixed size and all its memory from the start, so that
writing to it can neither fail nor end the process (SIGBUS). What lies where, `recorder_layout` says.

Files lie in a directory per incarnation of a job, `swansong-JOB-INCARNATION/rank-RANK`, of mode 0700.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from swansong.engine.clock import CELLS
from swansong.engine.processes import host_name, start_time
from swansong.engine.record_places import check_name, create_file, place_of
from swansong.engine.recorder_layout import (
    BOUNDARY,
    CELL,
    KEPT,
    KEPT_PHASES,
    MAX_SLOT_BYTES,
    PHASE,
    PHASE_AT,
    PHASE_BYTES,
    PROVISIONAL,
    RING,
    STATUS,
    Layout,
    Whose,
)
from swansong.engine.recorder_reading import Recorded, parse
from swansong.engine.signals import in_forked_children
from swansong.engine.slots import Record, Slots
from swansong.errors import ConfigError, RecordError, RecordTooLargeError, SwansongWarning
from swansong.policy.checks import whole_number


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


class Recorder:
    """A rank's own end. Written by the thread that trains; a context manager that removes the file if all is
    well, and leaves it behind for others to read if not. A forked child may not write, and removes nothing.
    """

    def __init__(self, path: Path, memory: mmap.mmap, whose: Whose, options: RecorderOptions) -> None:
        """Use `create`."""
        self.path, self.whose = path, whose
        self._options, self._limit = options, whose.slot_bytes
        self._view = memoryview(memory)
        self._layout = layout = Layout.of(whose)
        self._slots = Slots(self._view, layout.records, whose.slot_bytes, KEPT)
        self._phases = Slots(self._view, layout.status + PHASE_AT, PHASE_BYTES, KEPT_PHASES)
        self._count = self._view[layout.status : layout.status + CELL].cast("q")
        self._times = self._view[layout.status + CELL : layout.status + STATUS.size].cast("d")
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
        layout = Layout.of(whose)
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
        at = self._layout.clocks + self.whose.keys.index(key) * CELLS * CELL
        return self._view[at : at + CELLS * CELL].cast("q")

    def write_boundary(self, step: int, payload: bytes) -> None:
        """Record the boundary state of `step`, which is final now; the one before stays readable.

        Raises RecordTooLargeError, or keeps it in ordinary memory with a SwansongWarning, by the options.
        """
        self._write(BOUNDARY, step, payload)
        self._count_boundary()

    def confirm(self) -> None:
        """The boundary was reached for which the last provisional record was made, and that is final now."""
        if self._forked:
            self._refuse_child()
        self._slots.promote(PROVISIONAL)
        self._count_boundary()

    def _count_boundary(self) -> None:
        count = self._count[0]
        self._times[count % RING] = time.monotonic()
        self._count[0] = count + 1

    def write_provisional(self, step: int, payload: bytes) -> None:
        """Record what the boundary state of `step`, the next, would be. Raises as `write_boundary` does."""
        self._write(PROVISIONAL, step, payload)

    def set_phase(self, words: str) -> None:
        """Record what the main thread does now; of long words the beginning."""
        if self._forked:
            self._refuse_child()
        text = words.encode(errors="replace")[:PHASE_BYTES]
        self._phases.write(PHASE, 0, text, len(text))

    def recorded(self) -> Recorded:
        """Return what the recorder holds, what went to ordinary memory included. From any thread."""
        spilled = self._spilled
        read = parse(self.whose, self._layout, lambda at, length: bytes(self._view[at : at + length]))

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
                f"rank {self.whose.rank}, step {step}: boundary state, all that is copied at a step's end, "
                f"of {nbytes} bytes does not fit the flight recorder's slots of {limit} bytes; copy less "
                "(large tensors in objects that are given for their state_dict), raise slot_bytes, or set "
                "spill=True to keep it in ordinary memory, where it is lost with the process",
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


def _no_memory(path: Path, size: int, error: OSError) -> str:
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    hint = "; lower slot_bytes, or choose another directory" if error.errno == errno.ENOSPC else ""
    return f"flight recorder {path}: {size} bytes wanted, {free} free: {error.strerror}{hint}"
