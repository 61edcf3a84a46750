"""The states of everything random that a training loop draws from, as plain values.

A state is a dictionary that `state.tree.flatten` represents without tensors:

    python      {"words": 625 words, "gauss": float or null}      `random`'s own generator
    numpy       {"key": 624 words, "pos": int, "gauss": float or null}   the one behind `numpy.random.rand`
    torch       bytes of `Generator.get_state()`                  the default CPU generator
    cuda        list of such bytes, by device                     only once CUDA is initialized
    named       {name: such bytes}                                generators that were given by name

Words are bytes, 32 bits each, little-endian. What `Generator.get_state()` gives is PyTorch's own and may
change with its version.

A generator object of the user's own (`numpy.random.default_rng()`, `random.Random()`) cannot be found, and is
not among them; nor are the generators of a loader's worker processes.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from swansong.errors import LoadError, NotSupportedError

GeneratorStates: TypeAlias = dict[str, Any]
"""See the module's documentation."""

_PYTHON_VERSION: Final = 3
_PYTHON: Final = struct.Struct("<625I")
_WORD: Final = 4
_KEY_BYTES: Final = 624 * _WORD
_POS_END: Final = _KEY_BYTES + 4
_ROOT: Final = "generator states"


class Generators:
    """Captures and restores Python's, NumPy's legacy and PyTorch's generators, and those given by `named`."""

    def __init__(self, named: Mapping[str, torch.Generator] | None = None) -> None:
        self._named = dict(named or {})
        self._numpy = _NumpyGenerator()
        self._python = _PythonMemory.of()

    @property
    def named(self) -> Mapping[str, torch.Generator]:
        """The generators that were given by name."""
        return self._named

    def capture(self) -> GeneratorStates:
        """The states as they are now, some 10 KB; nothing is drawn.

        Raises NotSupportedError if `numpy.random` draws from another generator than MT19937.
        """
        states: GeneratorStates = {
            "python": _python_state() if self._python is None else self._python.read(),
            "numpy": self._numpy.capture(),
            "torch": _bytes_of(torch.default_generator),
        }
        if torch.cuda.is_initialized():
            states["cuda"] = [_bytes_of(generator) for generator in torch.cuda.default_generators]
        if self._named:
            states["named"] = {name: _bytes_of(generator) for name, generator in self._named.items()}
        return states

    def check(self, states: object) -> list[str]:
        """What `restore` would return or raise; no generator is changed."""
        return self._plan(states)[1]

    def restore(self, states: object) -> list[str]:
        """Set every generator to `states`; return the names that could not be, each with the reason.

        These are CUDA devices that are not here, names that were not given here or are not in `states`, and
        sorts of generators that a later version may know. Raises LoadError for anything that `capture` does
        not give, and then no generator is changed.
        """
        setters, left_out = self._plan(states)
        for set_state in setters:
            set_state()
        return left_out

    def _plan(self, states: object) -> tuple[list[Callable[[], object]], list[str]]:
        found = dict(_mapping(states, _ROOT))
        python = _mapping(found.pop("python", None), f"{_ROOT}: python")
        setters = [
            _python_setter(python),
            self._numpy.setter(_mapping(found.pop("numpy", None), f"{_ROOT}: numpy")),
            _setter(torch.default_generator, found.pop("torch", None), "torch"),
        ]
        left_out: list[str] = []
        self._plan_cuda(found.pop("cuda", []), setters, left_out)
        named = dict(_mapping(found.pop("named", {}), f"{_ROOT}: named"))
        for name, generator in self._named.items():
            if name in named:
                setters.append(_setter(generator, named.pop(name), name))
            else:
                left_out.append(f"{name}: its state was not saved")
        left_out += [f"{name}: no generator of this name was given" for name in named]
        left_out += [f"{name}: unknown to this version" for name in found]
        return setters, left_out

    def _plan_cuda(self, states: object, setters: list[Callable[[], object]], left_out: list[str]) -> None:
        if not isinstance(states, list):
            raise LoadError(f"{_ROOT}: cuda: wanted a list, found {type(states).__name__}")
        here = torch.cuda.device_count() if states and torch.cuda.is_available() else 0
        if here:
            torch.cuda.init()
        for index, state in enumerate(states):
            if index < here:
                setters.append(_setter(torch.cuda.default_generators[index], state, f"cuda:{index}"))
            else:
                left_out.append(f"cuda:{index}: there is no such device")


@dataclass(frozen=True, slots=True)
class _PythonMemory:
    """The memory of `random`'s generator, of which `getstate` takes some 20 us: it makes 625 numbers."""

    state: ctypes.Array[ctypes.c_char]
    owner: Any
    """Whose memory it is; kept alive."""

    @classmethod
    def of(cls) -> _PythonMemory | None:
        """None if it is not laid out as CPython 3.11 to 3.13 do: a position, and the words after it."""
        owner, offset = random.getstate.__self__, object.__basicsize__  # type: ignore[attr-defined]
        fits = type(owner) is random.Random and type(owner).__basicsize__ >= offset + _PYTHON.size
        if not fits or sys.implementation.name != "cpython" or sys.byteorder != "little":
            return None
        memory = cls((ctypes.c_char * _PYTHON.size).from_address(id(owner) + offset), owner)
        return memory if memory.read() == _python_state() else None

    def read(self) -> dict[str, Any]:
        state = self.state.raw
        return {"words": state[_WORD:] + state[:_WORD], "gauss": self.owner.gauss_next}


def _python_state() -> dict[str, Any]:
    _, words, gauss = random.getstate()
    return {"words": _PYTHON.pack(*words), "gauss": gauss}


class _NumpyGenerator:
    """NumPy's legacy generator, whose `get_state` takes some 50 us: it builds its array word by word.

    So it is read where it lies. Of words and position NumPy says where that is (`BitGenerator.ctypes`). Of
    the normal deviate in store it does not: where a RandomState has that is found out from one made for it.
    If either is not found, `get_state` is used.
    """

    def __init__(self) -> None:
        self._source: np.random.BitGenerator | None = None
        self._memory: _NumpyMemory | None = None

    def capture(self) -> dict[str, Any]:
        source: np.random.BitGenerator = get_bit_generator()
        if source is not self._source:
            if type(source) is not np.random.MT19937:
                raise NotSupportedError(
                    f"numpy.random draws from {type(source).__name__} here (np.random.set_bit_generator); "
                    "only MT19937 can be saved. Use a numpy.random.Generator of your own, and save its state"
                )
            self._source, self._memory = source, _NumpyMemory.of(source)
        return _numpy_state() if self._memory is None else self._memory.read()

    def setter(self, state: Mapping[str, object]) -> Callable[[], object]:
        key, pos = _words(state, "key", _KEY_BYTES, "numpy"), state.get("pos")
        gauss = _gauss(state, "numpy")
        if type(pos) is not int or not 0 <= pos <= 624:
            raise LoadError(f"{_ROOT}: numpy: pos: wanted an integer from 0 to 624, found {str(pos)[:40]}")
        full = {
            "bit_generator": "MT19937",
            "state": {"key": np.frombuffer(key, dtype="<u4").astype(np.uint32), "pos": pos},
            "has_gauss": 0 if gauss is None else 1,
            "gauss": gauss or 0.0,
        }
        return lambda: np.random.set_state(full)


@dataclass(frozen=True, slots=True)
class _NumpyMemory:
    """The memory of the generator behind `numpy.random.rand`."""

    words: ctypes.Array[ctypes.c_char]
    stored: ctypes.c_int
    """Not 0: `gauss` is a deviate in store."""
    gauss: ctypes.c_double
    owners: tuple[object, ...]
    """Whose memory it is; kept alive."""

    @classmethod
    def of(cls, source: np.random.BitGenerator) -> _NumpyMemory | None:
        """None if it is not laid out as NumPy 1.26 to 2.4 do on little-endian machines."""
        offset = _gauss_offset()
        if offset is None or sys.byteorder != "little":
            return None
        legacy = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method of the global one
        memory = cls(
            words=(ctypes.c_char * _POS_END).from_address(source.ctypes.state_address),
            stored=ctypes.c_int.from_address(id(legacy) + offset - ctypes.sizeof(ctypes.c_double)),
            gauss=ctypes.c_double.from_address(id(legacy) + offset),
            owners=(source, legacy),
        )
        return memory if memory.read() == _numpy_state() else None

    def read(self) -> dict[str, Any]:
        words = self.words.raw
        return {
            "key": words[:_KEY_BYTES],
            "pos": int.from_bytes(words[_KEY_BYTES:], "little"),
            "gauss": self.gauss.value if self.stored.value else None,
        }


def _gauss_offset() -> int | None:
    """Where in a RandomState the deviate in store is: 8 bytes, and 8 before it whether there is one.

    None if it cannot be told: these are no published structures.
    """
    probe = np.random.RandomState(1)
    size = np.random.RandomState.__basicsize__
    state: dict[str, Any] = probe.get_state(legacy=False)
    offsets = set()
    for stored, mark in ((1, 0.7310585786300049), (0, -1.2345678912345678), (1, 3.0517578125e-05)):
        probe.set_state({**state, "has_gauss": stored, "gauss": mark})
        memory, pattern = ctypes.string_at(id(probe), size), struct.pack("d", mark)
        offset = memory.find(pattern)
        if (
            memory.count(pattern) != 1
            or offset < 8
            or memory[offset - 8 : offset - 4] != struct.pack("i", stored)
        ):
            return None
        offsets.add(offset)
    return offsets.pop() if len(offsets) == 1 else None


def _numpy_state() -> dict[str, Any]:
    full: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "key": full["state"]["key"].astype("<u4").tobytes(),
        "pos": int(full["state"]["pos"]),
        "gauss": float(full["gauss"]) if full["has_gauss"] else None,
    }


def _bytes_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _setter(generator: torch.Generator, state: object, name: str) -> Callable[[], object]:
    if type(state) is not bytes or not state:
        raise LoadError(f"{_ROOT}: {name}: wanted bytes, found {type(state).__name__}")
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    try:
        torch.Generator(generator.device).set_state(tensor)
    except (RuntimeError, TypeError) as error:
        raise LoadError(
            f"{_ROOT}: {name}: these {len(state)} bytes are no state of a generator on {generator.device} in "
            f"PyTorch {torch.__version__}: {str(error).splitlines()[0]}"
        ) from error
    return lambda: generator.set_state(tensor)


def _python_setter(state: Mapping[str, object]) -> Callable[[], object]:
    words = _PYTHON.unpack(_words(state, "words", _PYTHON.size, "python"))
    gauss = _gauss(state, "python")
    if words[-1] > 624:
        raise LoadError(f"{_ROOT}: python: wanted a position up to 624 as the last word, found {words[-1]}")
    return lambda: random.setstate((_PYTHON_VERSION, words, gauss))


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        raise LoadError(f"{where}: wanted a dictionary with names as keys, found {type(value).__name__}")
    return value


def _words(state: Mapping[str, object], key: str, size: int, where: str) -> bytes:
    value = state.get(key)
    if type(value) is not bytes or len(value) != size:
        found = f"{len(value)} bytes" if type(value) is bytes else type(value).__name__
        raise LoadError(f"{_ROOT}: {where}: {key}: wanted {size} bytes, found {found}")
    return value


def _gauss(state: Mapping[str, object], where: str) -> float | None:
    value = state.get("gauss")
    if value is not None and type(value) is not float:
        raise LoadError(f"{_ROOT}: {where}: gauss: wanted a float or None, found {type(value).__name__}")
    return value
