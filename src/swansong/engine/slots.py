"""Slots in shared memory that survive a SIGKILL at any moment of a write.

There is one slot more than records that are kept, so that a write goes to a slot which nobody needs: its
sequence number is set to 0, then come the payload and the rest of the header, and the number last. A digest
over header and payload makes sure of it, for whoever reads while somebody writes. Little-endian:

    8 bytes   sequence: 1 for the first record written, then one more each; 0: none, or being written
    4         kind of the record
    4         1 if its payload was too large and is not here, else 0
    8         step, signed
    8         length of the payload in bytes
    8         XXH3-64 of the 32 bytes above and the payload
    8         the digest once more, when the record has become one of kind 0; else anything
    16        not used
    ...       payload
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

HEADER_BYTES: Final = 64
"""Before the payload; also the alignment of slots."""

_HEAD: Final = struct.Struct("<QIIqQ")
_DIGEST: Final = struct.Struct("<Q")
_NUMBER: Final = 8
"""Bytes of a sequence number, which comes first."""
_PROMOTED: Final = _HEAD.size + _DIGEST.size
_BEING_WRITTEN: Final = bytes(_NUMBER)


class Memory(Protocol):
    """What slots lie in: a memoryview of bytes, or what behaves like one."""

    def __setitem__(self, where: slice, data: bytes, /) -> None:
        """Store bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """What a slot holds."""

    sequence: int
    """Records written later have higher numbers."""
    kind: int
    step: int
    nbytes: int
    """Of the payload."""
    payload: bytes | None
    """None: it was too large for a slot, and was kept in the process's own memory."""


def slot_size(payload_bytes: int) -> int:
    """Bytes that a slot for payloads of up to `payload_bytes` takes."""
    return HEADER_BYTES + -(-payload_bytes // HEADER_BYTES) * HEADER_BYTES


class Slots:
    """The writing end. `keep` says of each kind of record how many, the newest, stay readable."""

    def __init__(self, memory: Memory, offset: int, payload_bytes: int, keep: Mapping[int, int]) -> None:
        self._memory, self._size = memory, slot_size(payload_bytes)
        self._offset = offset
        self._keep = dict(keep)
        self._kept: dict[int, deque[tuple[int, int]]] = {kind: deque() for kind in keep}
        """By kind, (slot, sequence), oldest first."""
        self._free = list(range(slot_count(keep)))
        self._digests = [b""] * slot_count(keep)
        """Of what was written last, by slot."""
        self._sequence = 0

    def write(self, kind: int, step: int, payload: bytes | None, nbytes: int) -> None:
        """Write a record of `nbytes` bytes, which fit unless `payload` is None."""
        self._sequence = sequence = self._sequence + 1
        slot = self._free.pop()
        memory, at = self._memory, self._offset + slot * self._size
        head = _HEAD.pack(sequence, kind, payload is None, step, nbytes)
        self._digests[slot] = digest = _DIGEST.pack(_digest(head, payload))
        memory[at : at + _NUMBER] = _BEING_WRITTEN
        if payload:
            memory[at + HEADER_BYTES : at + HEADER_BYTES + nbytes] = payload
        memory[at + _NUMBER : at + _HEAD.size + _DIGEST.size] = head[_NUMBER:] + digest
        memory[at : at + _NUMBER] = head[:_NUMBER]
        self._keep_at_most(kind, slot, sequence)

    def promote(self, kind: int) -> None:
        """Make the newest record of `kind` one of kind 0, by one store of 8 bytes. There must be one."""
        slot, sequence = self._kept[kind].pop()
        at = self._offset + slot * self._size + _PROMOTED
        self._memory[at : at + _DIGEST.size] = self._digests[slot]
        self._keep_at_most(0, slot, sequence)

    def _keep_at_most(self, kind: int, slot: int, sequence: int) -> None:
        kept = self._kept[kind]
        kept.append((slot, sequence))
        if len(kept) > self._keep[kind]:
            self._free.append(kept.popleft()[0])

    @property
    def next_sequence(self) -> int:
        """The sequence number of the record that is written next."""
        return self._sequence + 1

    def kept(self) -> set[int]:
        """Sequence numbers of the records that are still there."""
        return {sequence for kept in self._kept.values() for _, sequence in kept}


def slot_count(keep: Mapping[int, int]) -> int:
    """How many slots it takes to keep so many records of each kind."""
    return sum(keep.values()) + 1


def read_slots(
    read: Callable[[int, int], bytes], offset: int, payload_bytes: int, keep: Mapping[int, int]
) -> list[Record]:
    """Return what a `Slots` keeps, the newest first, at most `keep` of each kind.

    `read(offset, length)` may return fewer bytes, and whatever bytes. A slot that is not whole is left out,
    and no more than `payload_bytes` are read of any.
    """
    size = slot_size(payload_bytes)
    slots = range(slot_count(keep))
    found = (_read_slot(read, offset + slot * size, payload_bytes) for slot in slots)
    return _newest((record for record in found if record is not None), keep)


def _newest(records: Iterable[Record], keep: Mapping[int, int]) -> list[Record]:
    left = dict(keep)
    chosen = []
    for record in sorted(records, key=lambda record: record.sequence, reverse=True):
        if left.get(record.kind, 0):
            left[record.kind] -= 1
            chosen.append(record)
    return chosen


def _read_slot(read: Callable[[int, int], bytes], at: int, payload_bytes: int) -> Record | None:
    header = read(at, _PROMOTED + _DIGEST.size)
    if len(header) != _PROMOTED + _DIGEST.size:
        return None
    head = header[: _HEAD.size]
    sequence, kind, elsewhere, step, nbytes = _HEAD.unpack(head)
    if not sequence or not (elsewhere or nbytes <= payload_bytes):
        return None
    payload = None if elsewhere else read(at + HEADER_BYTES, nbytes)
    # A payload cut short differs in its digest, too.
    digest = _DIGEST.pack(_digest(head, payload))
    if header[_HEAD.size : _PROMOTED] != digest:
        return None
    if header[_PROMOTED:] == digest:
        kind = 0
    return Record(sequence, kind, step, nbytes, payload)


def _digest(head: bytes, payload: bytes | None) -> int:
    digest = xxhash.xxh3_64(head)
    if payload:
        digest.update(payload)
    return digest.intdigest()
