"""The native container's data files: safetensors, written from memory in place and read strictly.

A file is eight bytes (N, unsigned, little-endian), N bytes of header, and the elements (little-endian,
row-major, without gaps). The header is one JSON object, then spaces: `{name: {"dtype", "shape",
"data_offsets": [start, stop]}}`, offsets counted from the header's end, and `"__metadata__": {str: str}`.
Source: https://github.com/huggingface/safetensors, README, "Format"; the judge is its library, 0.8.

What this module adds as a writer: tensors stand by falling item size, then as given; spaces bring the
first element to a multiple of 4096, so that direct I/O and memory maps need no copy. complex128, for which
the format has no name, is stored as F64 with one more dimension of 2: real, imaginary.

As a reader it refuses more than the library does: repeated keys, unknown fields, more than 64 dimensions,
a header that does not begin with "{". Only -0 for 0 passes here and not there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from swansong.errors import MalformedError, NotSupportedError, UnrepresentableError
from swansong.state.dtypes import DTYPES, DType
from swansong.state.tensors import HostTensor
from swansong.store.layout import Layout, Segment
from swansong.store.source import Source, TensorEntry, read

HEADER_LIMIT: Final = 100_000_000
"""Bytes that a header may have; the reference library reads no more."""
SPLIT_LIMIT: Final = 90_000_000
"""Bytes of tensor entries after which `split` begins a new file; the rest is left to the metadata."""
ALIGNMENT: Final = 4096
"""The first element stands at a multiple of this: every direct-I/O block size in use divides it."""

_METADATA: Final = "__metadata__"
_LENGTH: Final = 8
_DIMENSIONS: Final = 64  # NumPy's limit
_INT64: Final = 2**63 - 1

_CODES: Final = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES: Final = {code: DTYPES[name] for name, code in _CODES.items()}
_PACKED: Final = frozenset({"F4", "F6_E2M3", "F6_E3M2"})  # the library's, several elements to a byte


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself: its metadata, and every tensor in the header's order."""

    metadata: dict[str, str]
    entries: dict[str, TensorEntry]


# ---- writing


def layout(
    tensors: Mapping[str, HostTensor], *, metadata: Mapping[str, str] | None = None, aligned: bool = True
) -> Layout:
    """Lay out one file: the header's bytes, then the tensors' own memory.

    With `aligned` the first element stands at a multiple of 4096, else of 8, as in the library's own files.
    Raises UnrepresentableError for a name or metadata that JSON cannot carry, and for a header of more than
    100,000,000 bytes (see `split`).
    """
    stored = [(name, stored_form(tensor)) for name, tensor in tensors.items()]
    stored.sort(key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {}
    if metadata:
        for key, value in metadata.items():
            _check_text("metadata key", key)
            _check_text(f"metadata value of {_show(key)}", value)
        header[_METADATA] = dict(metadata)
    position = 0
    for name, tensor in stored:
        _check_name(name)
        header[name] = _fields(tensor, position, position + tensor.nbytes)
        position += tensor.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH + len(text)) % (ALIGNMENT if aligned else 8))
    if len(text) > HEADER_LIMIT:
        raise UnrepresentableError(
            f"the header of {len(stored)} tensors would have {len(text)} bytes, a safetensors file takes "
            f"{HEADER_LIMIT}; split the tensors into several files, shorten their names or the metadata"
        )
    head = Segment(len(text).to_bytes(_LENGTH, "little") + text)
    return Layout.of([head, *(Segment(tensor, name) for name, tensor in stored)])


def split(tensors: Mapping[str, HostTensor], *, limit: int = SPLIT_LIMIT) -> list[dict[str, HostTensor]]:
    """Part tensors, in order, into groups whose entries take at most `limit` bytes of header each.

    The bound is safe, not tight: offsets count with as many digits as the largest may have. No tensors give
    no groups. Raises UnrepresentableError where one name alone exceeds the limit.
    """
    groups: list[dict[str, HostTensor]] = []
    room = 0
    largest = sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        _check_name(name)
        size = len(msgspec.json.encode({name: _fields(stored_form(tensor), largest, largest)}))
        if size > limit:
            raise UnrepresentableError(
                f"tensor {_show(name)}: its header entry has {size} bytes, a file has room for {limit}"
            )
        if size > room:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= size
    return groups


def stored_form(tensor: HostTensor) -> HostTensor:
    """The tensor as the file holds it, on the same memory: complex128 [...] as float64 [..., 2]."""
    if tensor.dtype.name != "complex128":
        return tensor
    pairs = tensor.array[..., np.newaxis].view(np.dtype("<f8"))
    return HostTensor(DTYPES["float64"], pairs)


def logical_form(entry: TensorEntry, dtype: DType) -> TensorEntry:
    """The entry as the manifest means it: float64 [..., 2] as complex128 [...] where `dtype` says so.

    Raises MalformedError if what is stored cannot be meant as `dtype`.
    """
    if entry.dtype == dtype:
        return entry
    if (dtype.name, entry.dtype.name) == ("complex128", "float64") and entry.shape[-1:] == (2,):
        return TensorEntry(entry.name, dtype, entry.shape[:-1], entry.ranges)
    raise MalformedError(
        f"tensor {_show(entry.name)}: stored as {entry.dtype.name} {list(entry.shape)}, "
        f"which cannot stand for {dtype.name}",
        tensor=entry.name,
    )


def _fields(tensor: HostTensor, start: int, stop: int) -> dict[str, object]:
    return {"dtype": _CODES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": (start, stop)}


def _check_name(name: str) -> None:
    _check_text("tensor name", name)
    if name == _METADATA:
        raise UnrepresentableError(f"a tensor cannot be called {_METADATA!r}: safetensors keeps that name")


def _check_text(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise UnrepresentableError(f"{what} {_show(text)}: wanted a str, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnrepresentableError(f"{what} {_show(text)}: lone surrogates have no form in JSON") from None


# ---- reading


class _Key(str):
    """A JSON key; a type of its own so that the decoder reports each one that it meets."""

    __slots__ = ()


_Fields: TypeAlias = dict[str, str | list[int]]
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_INT64)]
_Schema: TypeAlias = dict[_Key, dict[_Key, str | list[_Number]]]


def scan(source: Source) -> Header:
    """Read and check the header; no element is read.

    Whatever it returns can be read: types known, ranges inside the file, without overlap or hole, the last
    ending with the file. Raises MalformedError saying what is wrong with which tensor, NotSupportedError for
    the library's packed types (F4, F6). Memory and time are linear in the header, which is bounded.
    """
    raw = _header_bytes(source)
    decoded = _decode(source, raw)
    metadata = _metadata(source, decoded.pop(_METADATA, {}))
    data_start = _LENGTH + len(raw)
    entries = {str(name): _entry(source, str(name), fields, data_start) for name, fields in decoded.items()}
    _check_coverage(source, entries.values(), data_start)
    return Header(metadata, entries)


def _header_bytes(source: Source) -> bytes:
    if source.size < _LENGTH:
        raise _malformed(source, f"has {source.size} bytes, a safetensors file begins with {_LENGTH}", 0)
    length = int.from_bytes(read(source, 0, _LENGTH), "little")
    if length > HEADER_LIMIT:
        raise _malformed(source, f"its header claims {length} bytes, at most {HEADER_LIMIT} are allowed", 0)
    if _LENGTH + length > source.size:
        raise _malformed(source, f"its header claims {length} bytes, the file has {source.size} in all", 0)
    raw = read(source, _LENGTH, length)
    if not raw.startswith(b"{"):
        raise _malformed(source, 'its header does not begin with "{"', _LENGTH)
    return raw


def _decode(source: Source, raw: bytes) -> dict[str, _Fields]:
    keys_met = 0

    def key(kind: type[_Key], text: str) -> _Key:
        nonlocal keys_met
        keys_met += 1
        return kind(text)

    try:
        header: dict[str, _Fields] = msgspec.json.decode(raw, type=_Schema, dec_hook=key)
    except msgspec.DecodeError as error:
        raise _malformed(source, f"its header is not what safetensors asks for: {error}", _LENGTH) from None
    # The decoder keeps the last of equal keys and says nothing; a key that it met and did not keep tells.
    if keys_met != len(header) + sum(map(len, header.values())):
        raise _malformed(
            source, f"its header has the key {_first_repeated(raw)} twice in one object", _LENGTH
        )
    return header


def _first_repeated(raw: bytes) -> str:
    """Name the repeated key of a header that has the right structure and at least one."""
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                repeated.append(name)
                return
            names.add(name)

    json.loads(raw, object_pairs_hook=note)
    return _show(repeated[0])


def _metadata(source: Source, fields: _Fields) -> dict[str, str]:
    metadata = {}
    for key, value in fields.items():
        if not isinstance(value, str):
            raise _malformed(source, f"its metadata {_show(str(key))} is not a string", _LENGTH)
        metadata[str(key)] = value
    return metadata


def _entry(source: Source, name: str, fields: _Fields, data_start: int) -> TensorEntry:
    def wrong(what: str) -> MalformedError:
        return _malformed(source, f"tensor {_show(name)}: {what}", _LENGTH, name)

    code, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if len(fields) != 3 or not (
        isinstance(code, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    ):
        raise wrong("wanted a dtype (string), a shape (list), data_offsets (list of two) and nothing else")
    if code in _PACKED:
        raise NotSupportedError(
            f"{source.path}: tensor {_show(name)} has elements of type {code}, several to a byte; "
            f"only types of whole bytes are read here"
        )
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise wrong(f"its dtype {_show(code)} is none of {', '.join(_DTYPES)}")
    if len(shape) > _DIMENSIONS:
        raise wrong(f"it has {len(shape)} dimensions, at most {_DIMENSIONS} are allowed")
    if math.prod(size for size in shape if size) * dtype.itemsize > _INT64:
        raise wrong(f"no memory holds its shape {shape}")
    start, stop = offsets
    want = math.prod(shape) * dtype.itemsize
    if stop - start != want:
        raise wrong(f"{code} {shape} takes {want} bytes, data_offsets {offsets} give {stop - start}")
    return TensorEntry(name, dtype, tuple(shape), ((data_start + start, data_start + stop),))


def _check_coverage(source: Source, entries: Iterable[TensorEntry], data_start: int) -> None:
    """Every byte after the header belongs to exactly one tensor; empty ones stand at an edge of others."""
    position = data_start
    for entry in sorted(entries, key=lambda entry: entry.ranges[0]):
        start, stop = entry.ranges[0]
        if start != position:
            what = "overlaps the tensor before it" if start < position else "leaves a hole before it"
            raise _malformed(
                source,
                f"tensor {_show(entry.name)} {what}: it begins at byte {start}, wanted {position}",
                min(start, position),
                entry.name,
            )
        position = stop
    if position != source.size:
        raise _malformed(
            source,
            f"its tensors end at byte {position}, the file at {source.size}",
            min(position, source.size),
        )


def _malformed(source: Source, what: str, offset: int, tensor: str | None = None) -> MalformedError:
    return MalformedError(
        f"{source.path}: {what}", path=source.path, file=source.path, offset=offset, tensor=tensor
    )


def _show(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 120 else f"{shown[:100]}... ({len(shown)} characters)"
