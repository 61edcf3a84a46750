"""MindSpore's single-file container, `.ckpt`: written from the tensors' own memory, read strictly.

The messages are described in ckpt_messages. What they mean:

- Content is row-major and little-endian. Consecutive Values with one tag are slices of one tensor: each
  repeats the type and the full dims, and their contents are joined.
- A scalar has no dims. Older MindSpore wrote dims [0] and one element; that is read as a scalar too.
- A string has type "str", dims [0] and UTF-32-LE content.

MindSpore 2.10 does not compare content with dims, and takes a file that was cut between two messages for a
shorter one. Here the first is an error; the second only a manifest can tell.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

import numpy as np

from swansong.errors import ConfigError, DigestMismatchError, NotSupportedError, UnrepresentableError
from swansong.state.dtypes import DTYPES, DType
from swansong.state.tensors import HostTensor
from swansong.store.ckpt_messages import (
    MAX_NAME,
    MAX_RANK,
    MAX_VALUES,
    TRAILER_SIZE,
    Scan,
    Value,
    head,
    trailer,
)
from swansong.store.layout import Layout, Segment
from swansong.store.source import Source, TensorEntry, read, read_tensor

SLICE: Final = 512 * 1024 * 1024
"""Most content bytes in one message, as in MindSpore (protobuf parses messages below 2 GiB)."""

_TYPES: Final = {
    "bool": "Bool",
    "int8": "Int8",
    "int16": "Int16",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "UInt8",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "bfloat16": "BFloat16",
}
_DTYPES: Final = {theirs: DTYPES[ours] for ours, theirs in _TYPES.items()}
_STRING: Final = "str"
_CRC_STEP: Final = 1 << 20


def layout(
    tensors: Mapping[str, HostTensor],
    append_info: Mapping[str, int | float | bool | str | HostTensor] | None = None,
    *,
    crc: bool = False,
    slice_bytes: int = SLICE,
) -> Layout:
    """Lay out a `.ckpt` file that `mindspore.load_checkpoint` reads. No tensor is copied.

    `append_info` follows the tensors, encoded as MindSpore does it: int as Int64 (UInt64 from 2**63), bool as
    Bool, **float as Float32** (a `numpy.float64` as Float64), str without its trailing NULs. `crc` adds the
    trailer. Tensors of more than `slice_bytes` are cut into slices.

    Raises ConfigError for a name that stands in both mappings; UnrepresentableError, with the name, for what
    MindSpore cannot load: complex and 8-bit float elements, integers beyond 64 bits, names of more than
    MAX_NAME characters. The same for more than MAX_RANK dimensions, more than MAX_VALUES values, and nothing.
    """
    segments: list[Segment] = []
    for name, tensor in tensors.items():
        segments += _tensor_segments(name, tensor, slice_bytes)
    for name, value in (append_info or {}).items():
        if name in tensors:
            raise ConfigError(
                f"append_info: {name!r} is the name of a tensor, which it would replace on loading; rename it"
            )
        if isinstance(value, str):
            segments.append(_string_segment(name, value))
        else:
            segments += _tensor_segments(name, _appended(name, value), slice_bytes)
    if not segments:
        raise UnrepresentableError(
            "neither tensors nor append_info: MindSpore does not load an empty .ckpt file"
        )
    count = sum(segment.name is None for segment in segments)
    if count > MAX_VALUES:
        raise UnrepresentableError(f"{count} values in one .ckpt file; at most {MAX_VALUES} are read back")
    if not crc:
        return Layout.of(segments)
    return Layout.of(segments, trailer=trailer, trailer_size=TRAILER_SIZE)


def _tensor_segments(name: str, tensor: HostTensor, slice_bytes: int) -> Iterator[Segment]:
    type_name = _TYPES.get(tensor.dtype.name)
    if type_name is None:
        raise UnrepresentableError(
            f"{name}: MindSpore does not load {tensor.dtype.name} elements from a .ckpt file; "
            f"wanted one of {', '.join(_TYPES)}"
        )
    if len(tensor.shape) > MAX_RANK:
        raise UnrepresentableError(
            f"{name}: {len(tensor.shape)} dimensions; a .ckpt file holds at most {MAX_RANK}"
        )
    for part in _slices(tensor, slice_bytes):
        yield Segment(head(_tag(name), tensor.shape, type_name, part.nbytes))
        yield Segment(part, name)


def _string_segment(name: str, text: str) -> Segment:
    # MindSpore goes through NumPy's fixed-width strings, which drop trailing NULs, have at least one
    # character and let lone surrogates pass.
    content = (text.rstrip("\0") or "\0").encode("utf-32-le", "surrogatepass")
    return Segment(head(_tag(name), (0,), _STRING, len(content)) + content)


def _tag(name: str) -> bytes:
    if len(name) > MAX_NAME:
        raise UnrepresentableError(
            f"{name[:60]!r}...: {len(name)} characters; MindSpore takes names of up to {MAX_NAME}"
        )
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise UnrepresentableError(f"{name!r}: a name that has no UTF-8 form") from None


def _slices(tensor: HostTensor, limit: int) -> Iterator[HostTensor]:
    """Views of at most `limit` bytes (at least one element) that follow one another in row-major order."""
    if tensor.nbytes <= limit:
        yield tensor
        return
    array = tensor.array.reshape(-1) if tensor.contiguous else tensor.array
    row_bytes = tensor.nbytes // len(array)
    if row_bytes <= limit or array.ndim == 1:
        step = max(limit // row_bytes, 1)
        for first in range(0, len(array), step):
            yield HostTensor(tensor.dtype, array[first : first + step])
    else:
        for row in array:
            yield from _slices(HostTensor(tensor.dtype, row), limit)


def _appended(name: str, value: float | HostTensor) -> HostTensor:
    match value:
        case HostTensor():
            return value
        case bool():
            dtype = "bool"
        case int() if -(1 << 63) <= value < 1 << 64:
            dtype = "uint64" if value >= 1 << 63 else "int64"
        case int():
            raise UnrepresentableError(f"append_info: {name} = {value} does not fit into 64 bits")
        case float():
            dtype = "float64" if isinstance(value, np.float64) else "float32"
        case _:
            raise UnrepresentableError(
                f"append_info: {name} is a {type(value).__name__}; wanted int, float, bool, str or a tensor"
            )
    with np.errstate(over="ignore"):  # MindSpore's own rounding: 1e300 becomes infinity
        return HostTensor(DTYPES[dtype], np.array(value, DTYPES[dtype].carrier))


class CkptReader:
    """What a `.ckpt` file holds: found when the reader is made, from the headers alone; read on demand.

    Time and memory are bounded by the limits of ckpt_messages and ckpt_wire; strings, which are read at once,
    by the size of the file. Thread-safe if the source is.

    Raises MalformedError, with the offset in the plain bytes, for what is not such a file: lengths that
    cannot be true, content that does not fit type and dims, a name that comes twice, nothing at all.
    NotSupportedError, with the name, for MapParameter and Int4 entries.
    """

    def __init__(self, source: Source) -> None:
        self.entries: dict[str, TensorEntry] = {}
        """Tensors by name, in file order."""
        self.strings: dict[str, str] = {}
        """Strings of append_info by name, in file order."""
        self._source = source
        scan = Scan(source)
        for name, group in groupby(scan.values(), key=lambda value: value.name):
            values = list(group)
            if name in self.entries or name in self.strings:
                raise scan.error(f"{name!r} comes a second time, and not as the next slice", values[0].offset)
            if values[0].type_name == _STRING:
                self.strings[name] = self._string(scan, values)
            else:
                self.entries[name] = self._entry(scan, values)
        if not self.entries and not self.strings:
            raise scan.error("the file ends without any tensor or string", 0)
        self.crc = scan.crc
        """The CRC-32 that the trailer states; None without a trailer."""
        self._body_size = scan.body_size

    def read(self, entry: TensorEntry) -> HostTensor:
        """Read one of `entries` into fresh memory, with its shape and dtype. Errors as `Source.read_into`."""
        return read_tensor(self._source, entry)

    def verify_crc(self) -> bool:
        """Compare the bytes before the trailer with what it says, a mebibyte at a time.

        Returns False if there is no trailer to compare with. Raises DigestMismatchError.
        """
        if self.crc is None:
            return False
        found = 0
        for start in range(0, self._body_size, _CRC_STEP):
            found = zlib.crc32(read(self._source, start, min(_CRC_STEP, self._body_size - start)), found)
        if found != self.crc:
            path = self._source.path
            raise DigestMismatchError(
                f"{path}: the trailer says CRC-32 {self.crc:08x}, the content has {found:08x}: it is damaged",
                path=path,
                file=path,
                offset=0,
                want=f"{self.crc:08x}",
                got=f"{found:08x}",
            )
        return True

    def _string(self, scan: Scan, values: list[Value]) -> str:
        value = values[0]
        if len(values) > 1 or value.dims not in ((0,), ()):
            raise scan.error(
                f"the string {value.name!r} comes in slices, or with dims {list(value.dims)}", value.offset
            )
        start, stop = value.content
        try:
            return read(self._source, start, stop - start).decode("utf-32-le", "surrogatepass").rstrip("\0")
        except UnicodeDecodeError:
            raise scan.error(f"the string {value.name!r} is not UTF-32", start) from None

    def _entry(self, scan: Scan, slices: list[Value]) -> TensorEntry:
        """Join the slices of one tensor, whose contents must be exactly what type and dims need."""
        first = slices[0]
        for part in slices:
            if (part.type_name, part.dims) != (first.type_name, first.dims):
                raise scan.error(
                    f"a slice of {first.name!r} that differs from the first in type or dims",
                    part.offset,
                    tensor=first.name,
                )
        dtype = self._dtype(scan, first)
        ranges = tuple(part.content for part in slices)
        length = sum(stop - start for start, stop in ranges)
        shape = () if first.dims == (0,) and length == dtype.itemsize else first.dims
        # NumPy counts an array's bytes in 63 bits, and leaves out the zeros when it does.
        countable = math.prod(dim or 1 for dim in shape) * dtype.itemsize < 1 << 63
        if not countable or math.prod(shape) * dtype.itemsize != length:
            raise scan.error(
                f"{first.name!r}: {length} bytes make no {first.type_name} tensor of shape {list(shape)}",
                first.offset,
                tensor=first.name,
            )
        return TensorEntry(first.name, dtype, shape, ranges)

    def _dtype(self, scan: Scan, value: Value) -> DType:
        if value.type_name == "Int4":
            raise NotSupportedError(
                f"{self._source.path}: byte {value.offset}: {value.name!r} has Int4 elements: not supported"
            )
        if value.type_name not in _DTYPES:
            raise scan.error(f"{value.name!r} has elements of unknown type {value.type_name!r}", value.offset)
        return _DTYPES[value.type_name]
