"""`.ckpt` files in memory, for tests of the container and its encryption."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from swansong.state.tensors import HostTensor
from swansong.store.ckpt_messages import head
from swansong.store.ckpt_wire import prefixed
from swansong.store.layout import Layout
from swansong.store.pieces import PIECE, Encoding
from swansong.store.source import check_range


class Memory:
    """A Source over bytes that counts what is read."""

    path = "memory.ckpt"

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.size = len(data)
        self.reads = 0
        self.bytes_read = 0

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        check_range(self, offset, len(out))
        self.reads += 1
        self.bytes_read += len(out)
        np.copyto(out, self.data[offset : offset + len(out)])


def plain_bytes(layout: Layout) -> bytes:
    """The plain bytes of a file, trailer included."""
    body = np.empty(layout.body_size, np.uint8)
    layout.fill(0, body)
    return body.tobytes() + (layout.trailer(zlib.crc32(body.data)) if layout.trailer else b"")


def stored_bytes(encoding: Encoding, plain: bytes) -> bytes:
    """The stored bytes of a file, encoded piece by piece into buffers that are just large enough."""
    step = encoding.plain_piece
    pieces = [np.frombuffer(plain[start : start + step], np.uint8) for start in range(0, len(plain), step)]
    stored = b""
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        out = np.empty(encoding.stored_size(len(plain)) - index * PIECE if last else PIECE, np.uint8)
        stored += out[: encoding.encode(index, last, piece, out)].tobytes()
    return stored


def value(name: str, dims: tuple[int, ...], type_name: str, content: bytes) -> bytes:
    """One Checkpoint message with one Value, however wrong dims, type and content are for each other."""
    return head(name.encode(), dims, type_name, len(content)) + content


def sample(dtype: str, shape: tuple[int, ...]) -> HostTensor:
    """A tensor with elements of every byte pattern (0 and 1 for bool); bfloat16 by its bits."""
    rng = np.random.default_rng(7)
    count = int(np.prod(shape))
    if dtype == "bool":
        return HostTensor.of(rng.integers(0, 2, count).astype(bool).reshape(shape))
    if dtype == "bfloat16":
        return HostTensor.of(rng.integers(0, 1 << 16, count, np.uint16).reshape(shape), dtype="bfloat16")
    raw = np.frombuffer(rng.bytes(count * np.dtype(dtype).itemsize), dtype)
    return HostTensor.of(raw.reshape(shape))


def same(a: HostTensor, b: HostTensor) -> bool:
    """Equal type, shape and bits."""
    return (a.dtype, a.shape, a.array.tobytes()) == (b.dtype, b.shape, b.array.tobytes())


_TAG, _DIM, _TYPE, _CONTENT = (
    prefixed(0x0A, b"w"),
    b"\x08\x02",
    prefixed(0x12, b"Int16"),
    prefixed(0x1A, b"\1\2\3\4"),
)


def _message(tensor: bytes, tag: bytes = _TAG) -> bytes:
    return prefixed(0x0A, tag + prefixed(0x12, tensor))


SAME_MESSAGE = {
    "as-written": _message(_DIM + _TYPE + _CONTENT),
    "other-order": _message(_CONTENT + _TYPE + _DIM),
    "tag-last": prefixed(0x0A, prefixed(0x12, _DIM + _TYPE + _CONTENT) + _TAG),
    "packed-dims": _message(prefixed(0x0A, b"\2") + _TYPE + _CONTENT),
    "unknown-varint": _message(_DIM + _TYPE + _CONTENT + b"\x20\x05"),
    "unknown-fixed64": _message(b"\x21" + bytes(8) + _DIM + _TYPE + _CONTENT),
    "unknown-fixed32": _message(_DIM + b"\x25" + bytes(4) + _TYPE + _CONTENT),
    "unknown-bytes": prefixed(0x12, b"later") + _message(_DIM + _TYPE + _CONTENT),
    "largest-field-number": _message(_DIM + _TYPE + _CONTENT, _TAG + b"\xfa\xff\xff\xff\x0f\x01x"),
    "slices-inside-an-element": _message(_DIM + _TYPE + prefixed(0x1A, b"\1"))
    + _message(_DIM + _TYPE + prefixed(0x1A, b"\2\3\4")),
    "empty-slice": _message(_DIM + _TYPE + prefixed(0x1A, b"")) + _message(_DIM + _TYPE + _CONTENT),
}
"""Ways to write the Int16 tensor "w" of bytes 1, 2, 3, 4 that protobuf reads as the same message."""
