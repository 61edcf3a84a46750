"""Protocol Buffers wire format, as much of it as `.ckpt` files use.

Source: https://protobuf.dev/programming-guides/encoding/. A message is a sequence of fields, each a key
(number << 3 | wire type, as a varint) and a value. Writing makes bytes; reading goes forward through a
Source in windows, never holds a field that nobody asked for, and stays inside the bounds of the enclosing
message.

Reading is stricter than protobuf's own in three points that no writer of `.ckpt` files needs: varints must
be minimal, groups (wire types 3 and 4, deprecated) are refused, so that nothing nests deeper than the
schema, and unknown fields, which are skipped, are at most MAX_UNKNOWN_FIELDS.
"""

from __future__ import annotations

from typing import Final

from swansong.errors import MalformedError
from swansong.store.source import Source, read

MAX_UNKNOWN_FIELDS: Final = 1 << 16
"""Unknown fields skipped per file."""

_WINDOW: Final = 4096  # enough for the headers of many small tensors; after a large one most of it is wasted


def varint(value: int) -> bytes:
    """The base-128 form of 0 <= value < 2**64, least significant group first."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def prefixed(key: int, content: bytes) -> bytes:
    """A length-delimited field: key (below 128), length, content."""
    return bytes([key]) + varint(len(content)) + content


class WireReader:
    """Reads fields one after the other. `offset` is the position in the source, and may be set.

    `end` is always the offset at which the enclosing message ends. Everything raises MalformedError with
    the offset of what is wrong.
    """

    def __init__(self, source: Source) -> None:
        self.offset = 0
        self._source = source
        self._window = b""
        self._window_at = 0
        self._unknown = 0

    def error(self, what: str, at: int | None = None, *, tensor: str | None = None) -> MalformedError:
        """An error about the byte `at` (default: where the reader stands), to be raised by the caller."""
        offset = self.offset if at is None else at
        path = self._source.path
        return MalformedError(
            f"{path}: byte {offset}: {what}", path=path, file=path, offset=offset, tensor=tensor
        )

    def key(self, end: int) -> int:
        """Read a field's key."""
        at = self.offset
        key = self.varint(end)
        if not 1 <= key >> 3 < 1 << 29:
            raise self.error(f"{key >> 3} is no field number; this is not a .ckpt file, or it is damaged", at)
        return key

    def varint(self, end: int) -> int:
        """Read an unsigned number below 2**64 in its shortest form."""
        at = self.offset
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte(end)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64 or (byte == 0 and shift):
                    break
                return value
        raise self.error("a number that is longer than it may be", at)

    def span(self, end: int) -> int:
        """Read a length; return the offset at which the content that follows ends."""
        at = self.offset
        length = self.varint(end)
        if length > end - self.offset:
            raise self.error(
                f"a length of {length} bytes, but {end - self.offset} are left; the file was cut or damaged",
                at,
            )
        return self.offset + length

    def take(self, stop: int) -> bytes:
        """Read everything up to `stop`, which `span` has returned."""
        first = self.offset - self._window_at
        last = stop - self._window_at
        self.offset = stop
        if 0 <= first <= last <= len(self._window):
            return self._window[first:last]
        return read(self._source, stop - (last - first), last - first)

    def skip(self, key: int, end: int) -> None:
        """Pass over the value of an unknown field."""
        at = self.offset
        self._unknown += 1
        if self._unknown > MAX_UNKNOWN_FIELDS:
            raise self.error(f"more than {MAX_UNKNOWN_FIELDS} unknown fields")
        match key & 7:
            case 0:  # varint
                self.varint(end)
            case 1:  # 64 bits
                self.offset += 8
            case 2:  # length-delimited
                self.offset = self.span(end)
            case 5:  # 32 bits
                self.offset += 4
            case wire_type:
                raise self.error(
                    f"field {key >> 3} has wire type {wire_type}, which .ckpt files do not use", at
                )
        if self.offset > end:
            raise self.error(f"field {key >> 3} runs past the end of its message at byte {end}", at)

    def _byte(self, end: int) -> int:
        if self.offset >= end:
            raise self.error("the message ends inside a field; the file was cut or damaged")
        index = self.offset - self._window_at
        if not 0 <= index < len(self._window):
            self._window = read(self._source, self.offset, min(_WINDOW, self._source.size - self.offset))
            self._window_at = self.offset
            index = 0
        self.offset += 1
        return self._window[index]
