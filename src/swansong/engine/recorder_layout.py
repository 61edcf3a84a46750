"""How a flight recorder's file is laid out.

Sizes in bytes, integers little-endian, each part rounded up to whole pages:

    header    "swansrec", version (4), length of the msgpack (4), XXH3-64 of the msgpack (8), the msgpack
    status    boundaries so far (8); the monotonic times of the last 128, as doubles, the n-th at n mod 129,
              so that the cell being written is none of theirs; at 2048, two slots of up to 192 for the phase
    clocks    queued, begun, done (8 each) for each component, in the header's order
    records   four slots (see `slots`): the last two boundaries, a provisional record, which becomes one if
              nothing is different at the boundary, and one being written
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

import msgspec
import xxhash

from swansong.engine.clock import CELLS
from swansong.engine.slots import slot_count, slot_size
from swansong.errors import ConfigError

MAX_SLOT_BYTES: Final = 256 * 1024 * 1024
"""The largest `slot_bytes`; what reading a stranger's file may cost in memory."""

MAGIC: Final = b"swansrec"
VERSION: Final = 1
PREFIX: Final = struct.Struct("<8sIIQ")
MAX_HEADER: Final = 4 * 1024 * 1024
PAGE: Final = 4096
CELL: Final = 8
TIMES: Final = 128
RING: Final = TIMES + 1
STATUS: Final = struct.Struct(f"<q{RING}d")
PHASE_AT: Final = 2048
PHASE_BYTES: Final = 192
BOUNDARY, PROVISIONAL, PHASE = range(3)
KEPT: Final = {BOUNDARY: 2, PROVISIONAL: 1}
KEPT_PHASES: Final = {PHASE: 1}


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
class Layout:
    """Where the parts lie."""

    header: bytes
    status: int
    clocks: int
    records: int
    size: int

    @classmethod
    def of(cls, whose: Whose) -> Self:
        packed = msgspec.msgpack.encode(whose)
        header = PREFIX.pack(MAGIC, VERSION, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed
        if len(packed) > MAX_HEADER:
            raise ConfigError(f"flight recorder: too many components, {len(whose.keys)}")
        status = _pages(len(header))
        clocks = status + PAGE
        records = clocks + _pages(len(whose.keys) * CELLS * CELL)
        size = records + _pages(slot_count(KEPT) * slot_size(whose.slot_bytes))
        return cls(header, status, clocks, records, size)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
