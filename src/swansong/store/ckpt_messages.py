"""The messages of a `.ckpt` file: heads to write before contents, and a scan that finds what a file holds.

    Checkpoint   repeated Value value = 1
    Value        required string tag = 1; oneof { TensorProto tensor = 2; MapTensorProto maptensor = 3 }
    TensorProto  repeated int64 dims = 1; required string tensor_type = 2; required bytes tensor_content = 3

Source: MindSpore's checkpoint.proto (proto2). Every field of Checkpoint is repeated, so a sequence of
serialised Checkpoints is one Checkpoint. Behind the last one may stand a trailer, b"crc_num" and the CRC-32
(zlib's) of everything before it as 10 bytes, big-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from swansong.errors import MalformedError, NotSupportedError
from swansong.store.ckpt_wire import WireReader, prefixed, varint
from swansong.store.source import Source, read

MAX_NAME: Final = 1024
"""Most characters in a name; MindSpore's limit for parameters."""
MAX_RANK: Final = 32
"""Most dimensions of a tensor; NumPy 1's limit."""
MAX_VALUES: Final = 1 << 20
"""Most Values (strings, tensors, slices of tensors) in a file."""
TRAILER_SIZE: Final = 17
"""Bytes of the CRC trailer."""

_TRAILER_MARK: Final = b"crc_num"
_MAX_TYPE_NAME: Final = 64


class _Key:
    """Keys of fields (number << 3 | wire type), a line per message."""

    VALUE = 0x0A
    TAG, TENSOR, MAP_TENSOR = 0x0A, 0x12, 0x1A
    DIM, PACKED_DIMS, TYPE, CONTENT = 0x08, 0x0A, 0x12, 0x1A


def head(tag: bytes, dims: tuple[int, ...], type_name: str, content_size: int) -> bytes:
    """Everything of a Checkpoint with one Value but the tensor's content, which comes last."""
    tensor = b"".join(bytes([_Key.DIM]) + varint(dim) for dim in dims)
    tensor += prefixed(_Key.TYPE, type_name.encode()) + bytes([_Key.CONTENT]) + varint(content_size)
    value = prefixed(_Key.TAG, tag) + bytes([_Key.TENSOR]) + varint(len(tensor) + content_size) + tensor
    return bytes([_Key.VALUE]) + varint(len(value) + content_size) + value


def trailer(crc: int) -> bytes:
    """The CRC trailer."""
    return _TRAILER_MARK + crc.to_bytes(TRAILER_SIZE - len(_TRAILER_MARK), "big")


@dataclass(frozen=True, slots=True)
class Value:
    """One Value message: a string, a tensor, or a slice of one. `offset` is where it begins."""

    offset: int
    name: str
    type_name: str
    dims: tuple[int, ...]
    content: tuple[int, int]
    """[start, stop) in the source."""


class Scan:
    """One pass over the messages of a file. Contents are not read.

    Fields may come in any order and dims may be packed, as for protobuf. A required field that is missing,
    and a singular one that comes twice, is an error. Time and memory are bounded by the limits above and
    those of ckpt_wire, whatever the size of the file.
    """

    crc: int | None = None
    """What the trailer says, once `values` has met one."""

    def __init__(self, source: Source) -> None:
        self.body_size = source.size
        """Bytes before the trailer."""
        self._source = source
        self._wire = WireReader(source)

    def error(self, what: str, at: int | None = None, *, tensor: str | None = None) -> MalformedError:
        """An error about byte `at` (default: where the scan stands), to be raised by the caller."""
        return self._wire.error(what, at, tensor=tensor)

    def values(self) -> Iterator[Value]:
        """Every Value, in file order. Raises MalformedError; NotSupportedError for a MapParameter."""
        wire, end = self._wire, self._source.size
        count = 0
        while wire.offset < end:
            # The one place where a trailer can stand is where another message would begin. (MindSpore takes
            # the last 17 bytes for one whatever they belong to.)
            if wire.offset == end - TRAILER_SIZE and self._take_trailer():
                return
            key = wire.key(end)
            if key != _Key.VALUE:
                wire.skip(key, end)
                continue
            count += 1
            if count > MAX_VALUES:
                raise self.error(f"more than {MAX_VALUES} values")
            yield self._value(wire.span(end))

    def _take_trailer(self) -> bool:
        found = read(self._source, self._wire.offset, TRAILER_SIZE)
        if not found.startswith(_TRAILER_MARK):
            return False
        crc = int.from_bytes(found[len(_TRAILER_MARK) :], "big")
        if crc >> 32:
            raise self.error(f"the trailer's number, {crc}, is no CRC-32")
        self.crc, self.body_size = crc, self._wire.offset
        return True

    def _value(self, end: int) -> Value:
        wire, offset = self._wire, self._wire.offset
        name: str | None = None
        tensor: tuple[str, tuple[int, ...], tuple[int, int]] | None = None
        while wire.offset < end:
            match wire.key(end):
                case _Key.TAG if name is None:
                    name = self._text(end, 4 * MAX_NAME)
                case _Key.TENSOR if tensor is None:
                    tensor = self._tensor(wire.span(end))
                case _Key.MAP_TENSOR:
                    raise NotSupportedError(
                        f"{self._source.path}: byte {offset}: {name!r} is a MapParameter (a hash table), "
                        "which is not read; save it as tensors"
                    )
                case _Key.TAG | _Key.TENSOR:
                    raise self.error("a value with two names or two tensors", offset)
                case key:
                    wire.skip(key, end)
        if name is None or tensor is None:
            raise self.error("a value without a name or without a tensor", offset)
        return Value(offset, name, *tensor)

    def _tensor(self, end: int) -> tuple[str, tuple[int, ...], tuple[int, int]]:
        """Type, dims, and where the content lies."""
        wire, offset = self._wire, self._wire.offset
        dims: list[int] = []
        type_name: str | None = None
        content: tuple[int, int] | None = None
        while wire.offset < end:
            match wire.key(end):
                case _Key.DIM:
                    self._dim(dims, end)
                case _Key.PACKED_DIMS:
                    stop = wire.span(end)
                    while wire.offset < stop:
                        self._dim(dims, stop)
                case _Key.TYPE if type_name is None:
                    type_name = self._text(end, _MAX_TYPE_NAME)
                case _Key.CONTENT if content is None:
                    stop = wire.span(end)
                    content = wire.offset, stop
                    wire.offset = stop
                case _Key.TYPE | _Key.CONTENT:
                    raise self.error("a tensor with two types or two contents", offset)
                case key:
                    wire.skip(key, end)
        if type_name is None or content is None:
            raise self.error("a tensor without a type or without content", offset)
        return type_name, tuple(dims), content

    def _dim(self, dims: list[int], end: int) -> None:
        at = self._wire.offset
        dim = self._wire.varint(end)
        if dim >> 63:
            raise self.error(f"a dimension of {dim - (1 << 64)}", at)
        if len(dims) == MAX_RANK:
            raise self.error(f"a tensor of more than {MAX_RANK} dimensions", at)
        dims.append(dim)

    def _text(self, end: int, most: int) -> str:
        wire, at = self._wire, self._wire.offset
        stop = wire.span(end)
        if stop - wire.offset > most:
            raise self.error(f"a name of {stop - wire.offset} bytes; at most {most} are read", at)
        try:
            return wire.take(stop).decode()
        except UnicodeDecodeError:
            raise self.error("a name that is not UTF-8", at) from None
