"""Nested state <-> flat tensors by name, and the rest as tagged JSON.

## Names

A tensor is called after its path: `model/conv1.weight`, `optimizer/state/0/exp_avg`. Components are joined by
"/"; each stands for one key of a dictionary or one position in a list or tuple, and can be read back:

    0, -3               an integer of 64 bits, decimal: a position or an int key
    conv1.weight        a string, with "~" written ~0 and "/" written ~1 (as in RFC 6901)
    ~s0, ~s             a string that would read as an integer, or is empty
    ~k{"float":"inf"}   any other key: its JSON form below (compact, ASCII), with ~0 and ~1 for "~" and "/"
    ~                   alone: the state is itself a tensor

## The skeleton

JSON. null, true, false, strings without lone surrogates, integers of 64 bits (signed) and finite floats stand
for themselves; a float MUST have a point or an exponent, an integer MUST NOT. A list stands for a list. An
object has exactly one field, its tag:

    {"tensor": NAME}            a tensor, by the name it is stored under (a tied one: by the first's)
    {"array": NAME}             the same, and the state has a NumPy array there
    {"dict": PAIRS}             a dictionary; PAIRS is [[KEY, NODE]...] in the dictionary's order; KEY is
                                null, a bool, integer, float, string in its form here, or {"tuple": [KEY...]},
                                such tuples 8 deep at most; keys MUST differ
    {"ordered": PAIRS}          collections.OrderedDict
    {"counter": PAIRS}          collections.Counter
    {"default": [FACTORY, PAIRS]}   collections.defaultdict; FACTORY is null or one of "dict", "list", "set",
                                "tuple", "int", "float", "str", "bool"
    {"tuple": [NODE...]}
    {"set": [LEAF...]}          sorted by their JSON text; LEAF is any node that is none of those above
    {"frozenset": [LEAF...]}    the same
    {"int": "-0x1f..."}         an integer that 64 bits do not hold, lower-case hexadecimal
    {"float": "nan"}            or "inf", "-inf"
    {"complex": [RE, IM]}       two floats in their form here
    {"bytes": BASE64}
    {"text": BASE64}            a string with lone surrogates, as UTF-8 that lets them pass
    {"numpy": [DTYPE, HEX]}     a NumPy scalar: canonical dtype name, little-endian bytes, lower-case

Nodes nest 100 deep at most. What has no form here (any other type, subclasses included) is refused when the
state is flattened, never approximated.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from swansong.errors import MalformedError, UnrepresentableError
from swansong.state.leaves import (
    Json,
    Key,
    decode_key,
    decode_plain,
    encode_key,
    encode_leaf,
    is_key,
    is_leaf,
    untag,
)
from swansong.state.tensors import HostTensor

DEPTH: Final = 100
"""How deep a state may nest."""

T = TypeVar("T")
Path: TypeAlias = tuple[Key, ...]

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")
_FACTORIES: Final[dict[str, type]] = {
    kind.__name__: kind for kind in (dict, list, set, tuple, int, float, str, bool)
}
_MAPPINGS: Final[dict[type, str]] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "default",
}
_SEQUENCES: Final = (list, tuple)
_SETS: Final[dict[type, str]] = {set: "set", frozenset: "frozenset"}


@dataclass(frozen=True, slots=True)
class Flat:
    """A nested state, taken apart."""

    tensors: dict[str, HostTensor]
    """Each tensor once, on the memory that the state shows, in the state's order."""
    aliases: dict[str, str]
    """Name of each further tensor on the very same elements -> the name in `tensors`."""
    skeleton: Json
    """Everything else; see the module's documentation."""


def flatten(state: object, as_tensor: Callable[[object], HostTensor | None]) -> Flat:
    """Take a nested state apart without copying a tensor.

    `as_tensor` is asked about everything that is neither a plain value nor a container, and returns None for
    what is not a tensor of its framework; NumPy arrays are tensors in any case. Two tensors are tied if
    address, dtype, shape and strides agree. Raises UnrepresentableError that says where in the state
    (`optimizer['state'][0]['exp_avg']`) something stands that has no exact form.
    """
    run = _Flattening(as_tensor)
    skeleton = run.node(state, ())
    return Flat(run.tensors, run.aliases, skeleton)


def unflatten(
    skeleton: object, tensors: Mapping[str, T], *, as_array: Callable[[T], object] = lambda tensor: tensor
) -> Any:
    """Put a state together again from its skeleton and its tensors, whatever the caller holds them in.

    Where the state had a NumPy array, `as_array` of the tensor is put. Tied tensors come back as one object.
    Raises MalformedError that says where the skeleton is not what `flatten` writes or names a tensor that is
    not there. Nothing in a skeleton is ever evaluated or imported.
    """
    return _Unflattening(tensors, as_array).node(skeleton, ())


def join_path(path: Sequence[Key]) -> str:
    """The flat name of a path; different paths have different names."""
    return "/".join(map(_component, path)) if path else "~"


def split_path(name: str) -> Path:
    """The path of a flat name. Raises MalformedError unless `join_path` gives that name."""
    try:
        path = () if name == "~" else tuple(map(_key, name.split("/")))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{name[:200]!r} is no name of a tensor in a state: {error}") from None
    if join_path(path) != name:
        raise MalformedError(f"{name[:200]!r} is no name of a tensor in a state")
    return path


def show_path(path: Sequence[Key]) -> str:
    """A path as one writes it in Python, for messages: `optimizer['state'][0]`."""
    if not path:
        return "the state"
    first, *rest = path
    head = first if isinstance(first, str) and first.isidentifier() else f"state[{_short(first)}]"
    return head + "".join(f"[{_short(key)}]" for key in rest)


def _short(key: Key) -> str:
    try:
        shown = repr(key)
    except ValueError:  # Python writes no decimals of more than some thousand digits
        shown = "<a very large number>"
    return shown if len(shown) <= 80 else f"{shown[:60]}..."


def _component(key: Key) -> str:
    if type(key) is int and type(encode_key(key)) is int:
        return str(key)
    if type(key) is str and type(encode_key(key)) is str:
        marker = "~s" if not key or _INTEGER.fullmatch(key) else ""
        return marker + _escape(key)
    return "~k" + _escape(json.dumps(encode_key(key), separators=(",", ":")))


def _key(component: str) -> Key:
    if component.startswith("~k"):
        return decode_key(json.loads(_unescape(component[2:])))
    if component.startswith("~s"):
        return _unescape(component[2:])
    return int(component) if _INTEGER.fullmatch(component) else _unescape(component)


def _escape(text: str) -> str:
    return text.replace("~", "~0").replace("/", "~1")


def _unescape(text: str) -> str:
    return text.replace("~1", "/").replace("~0", "~")


class _Flattening:
    def __init__(self, as_tensor: Callable[[object], HostTensor | None]) -> None:
        self._as_tensor = as_tensor
        self.tensors: dict[str, HostTensor] = {}
        self.aliases: dict[str, str] = {}
        self._names: dict[tuple[object, ...], str] = {}
        self._open: set[int] = set()

    def node(self, value: Any, path: Path) -> Json:
        if is_leaf(value):
            return encode_leaf(value)
        kind = type(value)
        if kind in _SETS:
            return self._set(value, path)
        if kind not in _MAPPINGS and kind not in _SEQUENCES:
            return self._tensor(value, path)
        if id(value) in self._open:
            raise UnrepresentableError(f"{show_path(path)}: this {kind.__name__} contains itself")
        if len(path) >= DEPTH:
            raise UnrepresentableError(f"{show_path(path[:3])}...: nested more than {DEPTH} deep")
        self._open.add(id(value))
        body: Json = self._items(value, path) if kind in _SEQUENCES else self._pairs(value, path)
        self._open.remove(id(value))
        if kind is defaultdict:
            body = [self._factory(value, path), body]
        return body if kind is list else {_MAPPINGS.get(kind, "tuple"): body}

    def _items(self, value: Sequence[object], path: Path) -> list[Json]:
        return [self.node(item, (*path, index)) for index, item in enumerate(value)]

    def _pairs(self, value: Mapping[Any, object], path: Path) -> list[Json]:
        pairs: list[Json] = []
        for key, item in value.items():
            if not is_key(key):
                raise UnrepresentableError(
                    f"{show_path(path)}: a key of type {type(key).__qualname__} cannot be stored; "
                    "wanted str, int, float (not NaN), bool, None or a tuple of these"
                )
            pairs.append([encode_key(key), self.node(item, (*path, key))])
        return pairs

    def _factory(self, value: defaultdict[Any, Any], path: Path) -> str | None:
        factory = value.default_factory
        if factory is None:
            return None
        name = getattr(factory, "__name__", "")
        if _FACTORIES.get(name) is not factory:
            raise UnrepresentableError(
                f"{show_path(path)}: a defaultdict of {name or type(factory).__name__} cannot be stored; "
                f"wanted one of {', '.join(_FACTORIES)}"
            )
        return name

    def _set(self, value: set[Any] | frozenset[Any], path: Path) -> Json:
        for item in value:
            if not is_leaf(item):
                raise UnrepresentableError(
                    f"{show_path(path)}: a {type(item).__qualname__} in a {type(value).__name__} cannot be "
                    "stored; wanted plain values"
                )
        return {_SETS[type(value)]: sorted(map(encode_leaf, value), key=json.dumps)}

    def _tensor(self, value: object, path: Path) -> Json:
        tag = "tensor"
        try:
            tensor = self._as_tensor(value)
            if tensor is None and type(value) is np.ndarray:
                tag, tensor = "array", HostTensor.of(value, name="array")
        except UnrepresentableError as error:
            raise UnrepresentableError(f"{show_path(path)}: {error}") from error
        if tensor is None:
            kind = type(value)
            raise UnrepresentableError(
                f"{show_path(path)}: {kind.__module__}.{kind.__qualname__} has no exact form here; wanted "
                "tensors, None, bool, int, float, complex, str, bytes, NumPy scalars, and dict, OrderedDict, "
                "defaultdict, Counter, list, tuple, set, frozenset of these"
            )
        return {tag: self._store(tensor, join_path(path))}

    def _store(self, tensor: HostTensor, name: str) -> str:
        array = tensor.array
        place = (array.__array_interface__["data"][0], tensor.dtype.name, array.shape, array.strides)
        first = self._names.setdefault(place, name) if array.size else name
        if first == name:
            self.tensors[name] = tensor
        else:
            self.aliases[name] = first
        return first


class _Unflattening:
    def __init__(self, tensors: Mapping[str, Any], as_array: Callable[[Any], object]) -> None:
        self._tensors = tensors
        self._as_array = as_array

    def node(self, node: object, path: Path) -> Any:
        if len(path) > DEPTH:
            raise _malformed(path[:3], f"nested more than {DEPTH} deep")
        if type(node) is list:
            return self._items(node, path)
        try:
            if type(node) is not dict:
                return decode_plain(node)
            tag, body = untag(node)
            if tag not in _TAGS:
                return decode_plain(node)
        except ValueError as error:
            raise _malformed(path, str(error)) from None
        return _TAGS[tag](self, body, path)

    def _items(self, body: object, path: Path) -> list[Any]:
        return [self.node(item, (*path, index)) for index, item in enumerate(_list(body, path))]

    def _tuple(self, body: object, path: Path) -> tuple[Any, ...]:
        return tuple(self._items(body, path))

    def _dict(self, body: object, path: Path) -> dict[Key, Any]:
        result: dict[Key, Any] = {}
        for pair in _list(body, path):
            key_node, node = _list(pair, path, 2)
            try:
                key = decode_key(key_node)
            except ValueError as error:
                raise _malformed(path, f"a key is wrong: {error}") from None
            if key in result:
                raise _malformed(path, f"the key {_short(key)} stands there twice")
            result[key] = self.node(node, (*path, key))
        return result

    def _ordered(self, body: object, path: Path) -> OrderedDict[Key, Any]:
        return OrderedDict(self._dict(body, path))

    def _counter(self, body: object, path: Path) -> Counter[Any]:
        return Counter(self._dict(body, path))

    def _default(self, body: object, path: Path) -> defaultdict[Key, Any]:
        name, pairs = _list(body, path, 2)
        if name is not None and (type(name) is not str or name not in _FACTORIES):
            raise _malformed(path, f"unknown factory {str(name)[:40]!r} of a defaultdict")
        return defaultdict(None if name is None else _FACTORIES[name], self._dict(pairs, path))

    def _set(self, body: object, path: Path) -> set[Any]:
        nodes = _list(body, path)
        try:
            result = set(map(decode_plain, nodes))
        except ValueError as error:
            raise _malformed(path, str(error)) from None
        if len(result) != len(nodes):
            raise _malformed(path, "a set has an element twice")
        return result

    def _frozenset(self, body: object, path: Path) -> frozenset[Any]:
        return frozenset(self._set(body, path))

    def _tensor(self, body: object, path: Path) -> Any:
        if type(body) is not str:
            raise _malformed(path, "wanted the name of a tensor")
        if body not in self._tensors:
            raise _malformed(path, f"there is no tensor {body[:200]!r}", tensor=body)
        return self._tensors[body]

    def _array(self, body: object, path: Path) -> object:
        return self._as_array(self._tensor(body, path))


_TAGS: Final[dict[str, Callable[[_Unflattening, object, Path], Any]]] = {
    "tuple": _Unflattening._tuple,
    "dict": _Unflattening._dict,
    "ordered": _Unflattening._ordered,
    "counter": _Unflattening._counter,
    "default": _Unflattening._default,
    "set": _Unflattening._set,
    "frozenset": _Unflattening._frozenset,
    "tensor": _Unflattening._tensor,
    "array": _Unflattening._array,
}


def _list(body: object, path: Path, length: int | None = None) -> list[Any]:
    if type(body) is not list or (length is not None and len(body) != length):
        wanted = "a list" if length is None else f"a list of {length}"
        found = f"one of {len(body)}" if type(body) is list else f"a {type(body).__name__}"
        raise _malformed(path, f"wanted {wanted}, found {found}")
    return body


def _malformed(path: Path, what: str, tensor: str | None = None) -> MalformedError:
    return MalformedError(f"skeleton of {show_path(path)}: {what}", tensor=tensor)
