"""Generators read where they lie in memory: their states in less time, and whether they were drawn from.

`random.getstate` takes some 20 us, for it makes 625 numbers; NumPy's `get_state` some 50, word by word.
Where they lie, and how they are laid out, is found out and tried when a reader is made; if it is not as
expected, the generators are asked as usual.

A **mark** tells a state from those before it. It is made of the position among the words, of the first
words, which are all drawn anew when the position has come to the end, and of deviates in store: so it is
another after whatever was drawn, and after any new seed.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator

from swansong.errors import NotSupportedError

Buffer: TypeAlias = bytes | memoryview
TorchState: TypeAlias = bytes | dict[str, Any]

WORD: Final = 4
PYTHON: Final = struct.Struct("<625I")
"""Its words, and the position among them."""
KEY_BYTES: Final = 624 * WORD

_MARK: Final = 64
"""So many bytes of the words, the position included, tell states apart."""
_DEVIATE: Final = struct.Struct("<i4xd")
"""Of NumPy: whether there is one in store, and which."""
_NEAR: Final = 512
"""The words of PyTorch's generator begin within so many bytes of the object, which are all its own."""
_FRONT: Final = struct.Struct("<Qi?3xI")
"""What comes before them there: seed, words left, whether seeded, position."""
_STORE: Final = struct.Struct("<4xf?3xd?7x")
"""What comes after: deviates in store, of single and double precision, and whether they count."""
_IMAGE: Final = _FRONT.size + KEY_BYTES + _STORE.size
"""Bytes of all that."""
_WORDS: Final = slice(_FRONT.size, _FRONT.size + KEY_BYTES)
_TOLD_FRONT: Final = struct.Struct("<QiiQ")
_TOLD_STORE: Final = struct.Struct("<8xd8xi4xf?3x")
"""The same in what `get_state` gives, where each word takes 8 bytes; the double comes first."""


class Reader(Protocol):
    """Reads one generator, or several of a kind. Draws nothing."""

    def mark(self) -> object:
        """What tells the present state from others. Raises as `state` does."""
        ...

    def state(self) -> Any:
        """The state, as `generators` says. Raises NotSupportedError."""
        ...


class PythonReader:
    """The generator behind `random`: in CPython 3.11 to 3.13 a position, and the words after it."""

    def __init__(self) -> None:
        self._owner: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method's
        self._memory: memoryview | None = None
        """Position and words."""
        self._head: memoryview | None = None
        """Position and first words."""
        offset, told = object.__basicsize__, self.state()
        fits = type(self._owner) is random.Random and random.Random.__basicsize__ >= offset + PYTHON.size
        if fits and sys.implementation.name == "cpython" and sys.byteorder == "little":
            self._memory = _memory(id(self._owner) + offset, PYTHON.size)
            self._head = self._memory[:_MARK]
            if self.state() != told:
                self._memory = self._head = None

    def mark(self) -> object:
        return random.getstate() if self._head is None else (bytes(self._head), self._owner.gauss_next)

    def state(self) -> dict[str, Any]:
        if self._memory is None:
            _, words, gauss = random.getstate()
            return {"words": PYTHON.pack(*words), "gauss": gauss}
        memory = bytes(self._memory)
        return {"words": memory[WORD:] + memory[:WORD], "gauss": self._owner.gauss_next}


class NumpyReader:
    """NumPy's legacy generator, the one behind `numpy.random.rand`.

    Of words and position NumPy says where they are (`BitGenerator.ctypes`). Of the deviate in store it does
    not: where a RandomState has that is found out from one made for it. So it is from NumPy 1.26 to 2.4.
    """

    def __init__(self) -> None:
        self._source: np.random.BitGenerator | None = None
        self._memory: tuple[memoryview, memoryview, memoryview, memoryview] | None = None
        """Words and position, the first of them, the position, the deviate in store."""
        self._owner: object = None

    def mark(self) -> object:
        self._find()
        if self._memory is None:
            return tuple(self.state().values())
        _, head, position, deviate = self._memory
        return bytes(head), bytes(position), bytes(deviate)

    def state(self) -> dict[str, Any]:
        self._find()
        if self._memory is None:
            return _told_by_numpy()
        words, _, _, deviate = self._memory
        memory, (stored, gauss) = bytes(words), _DEVIATE.unpack(deviate)
        return {
            "key": memory[:KEY_BYTES],
            "pos": int.from_bytes(memory[KEY_BYTES:], "little"),
            "gauss": gauss if stored else None,
        }

    def _find(self) -> None:
        """Notice another generator in its place (`np.random.set_bit_generator`)."""
        source: np.random.BitGenerator = get_bit_generator()
        if source is self._source:
            return
        if type(source) is not np.random.MT19937:
            raise NotSupportedError(
                f"numpy.random draws from {type(source).__name__} here (np.random.set_bit_generator); "
                "only MT19937 can be saved. Use a numpy.random.Generator of your own, and save its state"
            )
        self._source, self._memory = source, None
        offset = deviate_in_numpy()
        if offset is not None and sys.byteorder == "little":
            self._owner = np.random.get_state.__self__  # type: ignore[attr-defined]  # a bound method's
            words = _memory(source.ctypes.state_address, KEY_BYTES + WORD)
            deviate = _memory(id(self._owner) + offset - 8, _DEVIATE.size)
            self._memory = words, words[: _MARK - WORD], words[KEY_BYTES:], deviate
            if self.state() != _told_by_numpy():
                self._memory = None


class TorchReader:
    """A generator of PyTorch: on the CPU read where it lies, in parts, if that is as in PyTorch 2.13. If not,
    its state is what `Generator.get_state` says.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._memory: tuple[memoryview, memoryview, memoryview] | None = None
        """Position and first words; all words; what is in store."""
        offset = image_in_torch() if generator.device.type == "cpu" else None
        if offset is not None:
            image = _memory(generator._cdata + offset, _IMAGE)  # type: ignore[attr-defined]
            self._memory = image[:_MARK], image[_WORDS], image[_WORDS.stop :]

    def mark(self) -> object:
        if self._memory is None:
            return self.state()
        head, _, store = self._memory
        return bytes(head), bytes(store)

    def state(self) -> TorchState:
        if self._memory is None:
            return self._generator.get_state().numpy().tobytes()
        return _in_parts(*self._memory)


def _in_parts(head: Buffer, words: Buffer, store: Buffer) -> dict[str, bytes]:
    single, has_single, double, has_double = _STORE.unpack(store)  # what does not count may be anything
    counting = (single if has_single else 0.0, has_single, double if has_double else 0.0, has_double)
    return {
        "position": _FRONT.pack(*_FRONT.unpack_from(head)),
        "words": bytes(words),
        "store": _STORE.pack(*counting),
    }


def told_by_torch(state: Mapping[str, Any]) -> bytes:
    """What `Generator.get_state` says of a state in parts. Source: `CPUGeneratorImpl` of PyTorch.

    Raises KeyError, TypeError, ValueError, struct.error for anything else.
    """
    words = np.frombuffer(state["words"], "<u4", 624).astype("<u8").tobytes()
    single, has_single, double, has_double = _STORE.unpack(state["store"])
    store = _TOLD_STORE.pack(double, has_double, single, has_single)
    return _TOLD_FRONT.pack(*_FRONT.unpack(state["position"])) + words + store


def _memory(address: int, nbytes: int) -> memoryview:
    """To be read only; whoever has it keeps alive what lies there."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _told_by_numpy() -> dict[str, Any]:
    full: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "key": full["state"]["key"].astype("<u4").tobytes(),
        "pos": int(full["state"]["pos"]),
        "gauss": float(full["gauss"]) if full["has_gauss"] else None,
    }


def deviate_in_numpy() -> int | None:
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


def image_in_torch() -> int | None:
    """Where in a CPU generator its image begins, counted from its `_cdata`.

    None if it cannot be told, or is not laid out as expected, so that states or marks would be wrong.
    """
    probe = torch.Generator().manual_seed(1)
    address = getattr(probe, "_cdata", None)
    if type(address) is not int or sys.byteorder != "little":
        return None
    pattern = probe.get_state()[24:56].view(torch.int64).to(torch.int32).numpy().tobytes()
    at = ctypes.string_at(address, _NEAR).find(pattern) - _FRONT.size
    if at < 0:
        return None
    seen = set()
    for seed in (2**40 + 7, 3):
        probe.manual_seed(seed)
        for dtype in (torch.float32, torch.float64):
            for _ in range(3):  # every second deviate comes out of store, and leaves all else as it is
                image = ctypes.string_at(address + at, _IMAGE)
                state = _in_parts(image[:_MARK], image[_WORDS], image[_WORDS.stop :])
                if told_by_torch(state) != probe.get_state().numpy().tobytes():
                    return None
                seen.add(image[:_MARK] + image[_WORDS.stop :])
                torch.randn(1, generator=probe, dtype=dtype)
    return at if len(seen) == 12 else None
