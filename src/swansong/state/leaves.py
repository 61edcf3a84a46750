"""Plain values as tagged JSON: the leaves and the keys of a nested state, exactly.

`state.tree` documents the form. Decoding is strict: a value has one form, anything else is a ValueError.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from types import NoneType
from typing import Any, Final, TypeAlias

import numpy as np

from swansong.state.dtypes import DTYPES

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Key: TypeAlias = "bool | int | float | str | tuple[Key, ...] | None"

KEY_DEPTH: Final = 8
"""Tuples within tuples that a dictionary's key may have."""

_SMALL: Final = range(-(2**63), 2**63)  # what every JSON reader in use keeps exact as an integer
_HEX: Final = re.compile(r"-?0x[1-9a-f][0-9a-f]*")


def is_leaf(value: object) -> bool:
    """True for what `encode_leaf` takes. Subclasses of the plain types are not: they would come back bare."""
    return type(value) in _ENCODERS or (
        isinstance(value, np.generic) and value.dtype.name in DTYPES and DTYPES[value.dtype.name].exact
    )


def encode_leaf(value: Any) -> Json:
    """A leaf's JSON form."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    dtype = DTYPES[value.dtype.name]
    return {"numpy": [dtype.name, np.asarray(value, dtype.carrier).tobytes().hex()]}


def is_key(key: object, depth: int = 0) -> bool:
    """True for what `encode_key` takes: a plain key that equals itself, or a tuple of such."""
    if type(key) is tuple:
        return depth < KEY_DEPTH and all(is_key(item, depth + 1) for item in key)
    return type(key) in _KEY_TYPES and key == key  # unlike NaN, which could never be looked up again


def encode_key(key: Any) -> Json:
    """A key's JSON form: a leaf's, or `{"tuple": [keys]}`."""
    return {"tuple": [encode_key(item) for item in key]} if type(key) is tuple else encode_leaf(key)


def decode_plain(node: object) -> Any:
    """The inverse of `encode_leaf`. Raises ValueError."""
    kind = type(node)
    if kind is dict:
        tag, body = untag(node)
        decoder = _DECODERS.get(tag)
        if decoder is None:
            raise ValueError(f"wanted a plain value, found the tag {tag[:40]!r}")
        return decoder(body)
    if kind is int and node not in _SMALL:
        raise ValueError("an integer beyond 64 bits must be tagged")
    if kind is float and not math.isfinite(node):  # type: ignore[arg-type]
        raise ValueError("a float that is not finite must be tagged")
    if kind not in (NoneType, bool, int, float, str):
        raise ValueError(f"wanted a plain value, found a {kind.__name__}")
    return node


def decode_key(node: object, depth: int = 0) -> Key:
    """The inverse of `encode_key`. Raises ValueError."""
    if type(node) is dict and "tuple" in node:
        _, body = untag(node)
        if type(body) is not list or depth >= KEY_DEPTH:
            raise ValueError(f"wanted a list of keys in at most {KEY_DEPTH} tuples")
        return tuple(decode_key(item, depth + 1) for item in body)
    key: Key = decode_plain(node)
    if not is_key(key, depth):
        raise ValueError(f"a {type(key).__name__} cannot be a key, nor can NaN")
    return key


def untag(node: Any) -> tuple[str, object]:
    """The one tag of a tagged node and what it holds. Raises ValueError."""
    if len(node) != 1:
        raise ValueError(f"wanted an object with one tag, found {len(node)} fields")
    tag, body = next(iter(node.items()))
    if type(tag) is not str:
        raise ValueError("wanted a tag that is a string")
    return tag, body


def _same(value: Any) -> Json:
    return value  # type: ignore[no-any-return]


def _encode_int(value: int) -> Json:
    # Hexadecimal, because Python refuses to convert long decimals, and is slow at it.
    return value if value in _SMALL else {"int": hex(value)}


def _encode_float(value: float) -> Json:
    return value if math.isfinite(value) else {"float": str(value)}


def _encode_text(value: str) -> Json:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return value


def _encode_bytes(value: bytes) -> Json:
    return {"bytes": base64.b64encode(value).decode()}


def _encode_complex(value: complex) -> Json:
    return {"complex": [_encode_float(value.real), _encode_float(value.imag)]}


def _decode_int(body: object) -> int:
    if type(body) is not str or not _HEX.fullmatch(body):
        raise ValueError("int: wanted hexadecimal digits after 0x")
    value = int(body, 16)
    if value in _SMALL:
        raise ValueError("int: a number of 64 bits must not be tagged")
    return value


def _decode_float(body: object) -> float:
    if body not in ("nan", "inf", "-inf"):
        raise ValueError("float: wanted nan, inf or -inf")
    return float(str(body))


def _decode_bytes(body: object) -> bytes:
    if type(body) is not str:
        raise ValueError("wanted a string of base64")
    try:
        value = base64.b64decode(body, validate=True)
    except ValueError:  # binascii.Error is one; not ASCII is another
        value = b""
    if base64.b64encode(value).decode() != body:
        raise ValueError("wanted a string of base64")
    return value


def _decode_text(body: object) -> str:
    value = _decode_bytes(body).decode("utf-8", "surrogatepass")
    if type(_encode_text(value)) is str:
        raise ValueError("text: a string without lone surrogates must not be tagged")
    return value


def _decode_complex(body: object) -> complex:
    parts = [decode_plain(part) for part in body] if type(body) is list and len(body) == 2 else []
    if len(parts) != 2 or not all(type(part) is float for part in parts):
        raise ValueError("complex: wanted two floats")
    return complex(*parts)


def _decode_numpy(body: object) -> np.generic:
    if type(body) is not list or len(body) != 2 or not all(type(item) is str for item in body):
        raise ValueError("numpy: wanted a dtype and the bytes in hexadecimal")
    dtype = DTYPES.get(body[0])
    if dtype is None or not dtype.exact:
        raise ValueError(f"numpy: unknown dtype {body[0][:40]!r}")
    raw = bytes.fromhex(body[1])
    if len(raw) != dtype.itemsize or raw.hex() != body[1] or (dtype.name == "bool" and raw[0] > 1):
        raise ValueError(f"numpy: these are not the {dtype.itemsize} bytes of a {dtype.name}")
    scalar: np.generic = np.frombuffer(raw, dtype.carrier)[0]
    return scalar


_ENCODERS: Final[dict[type, Callable[[Any], Json]]] = {
    NoneType: _same,
    bool: _same,
    int: _encode_int,
    float: _encode_float,
    str: _encode_text,
    bytes: _encode_bytes,
    complex: _encode_complex,
}
_DECODERS: Final[dict[str, Callable[[object], Any]]] = {
    "int": _decode_int,
    "float": _decode_float,
    "text": _decode_text,
    "bytes": _decode_bytes,
    "complex": _decode_complex,
    "numpy": _decode_numpy,
}
_KEY_TYPES: Final = (NoneType, bool, int, float, str)
