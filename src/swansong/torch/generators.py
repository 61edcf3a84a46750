"""The states of everything random that a training loop draws from, as plain values.

A state is a dictionary that `state.tree.flatten` represents without tensors:

    python      {"words": 625 words, "gauss": float or null}      `random`'s own generator
    numpy       {"key": 624 words, "pos": int, "gauss": float or null}   the one behind `numpy.random.rand`
    torch       {"position": bytes, "words": 624 words, "store": bytes}   the default CPU generator
    cuda        list of bytes, by device                          only once CUDA is initialized
    named       {name: as for torch, or bytes}                    generators that were given by name

Words are bytes, 32 bits each, little-endian. PyTorch's position and store are as in `generator_memory`; other
bytes are what `Generator.get_state()` gives, as is torch's own state if it could not be read in parts.

A generator object of the user's own (`numpy.random.default_rng()`, `random.Random()`) cannot be found, and is
not among them; nor are the generators of a loader's worker processes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from swansong.errors import LoadError
from swansong.torch.generator_memory import (
    KEY_BYTES,
    PYTHON,
    NumpyReader,
    PythonReader,
    Reader,
    TorchReader,
    TorchState,
    told_by_torch,
)

GeneratorStates: TypeAlias = dict[str, Any]
"""See the module's documentation."""

_PYTHON_VERSION: Final = 3
_ROOT: Final = "generator states"


class Generators:
    """Captures and restores Python's, NumPy's legacy and PyTorch's generators, and those given by `named`."""

    def __init__(self, named: Mapping[str, torch.Generator] | None = None) -> None:
        self._named = dict(named or {})
        self.readers: dict[str, Reader] = {
            "python": PythonReader(),
            "numpy": NumpyReader(),
            "torch": TorchReader(torch.default_generator),
        }
        if self._named:
            self.readers["named"] = _Named(self._named)
        """What reads the states, one by one. CUDA's is among them once `capture` has found it initialized."""
        self._look_for_cuda()

    @property
    def named(self) -> Mapping[str, torch.Generator]:
        """The generators that were given by name."""
        return self._named

    def capture(self) -> GeneratorStates:
        """The states as they are now, some 10 KB; nothing is drawn.

        Raises NotSupportedError if `numpy.random` draws from another generator than MT19937.
        """
        self._look_for_cuda()
        return {name: reader.state() for name, reader in self.readers.items()}

    def _look_for_cuda(self) -> None:
        if "cuda" not in self.readers and torch.cuda.is_initialized():
            self.readers["cuda"] = _Cuda()

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
            _numpy_setter(_mapping(found.pop("numpy", None), f"{_ROOT}: numpy")),
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


class _Named:
    """Generators by name."""

    def __init__(self, named: Mapping[str, torch.Generator]) -> None:
        self._readers = {name: TorchReader(generator) for name, generator in named.items()}

    def mark(self) -> object:
        return [reader.mark() for reader in self._readers.values()]

    def state(self) -> dict[str, TorchState]:
        return {name: reader.state() for name, reader in self._readers.items()}


class _Cuda:
    """Those of the CUDA devices."""

    def mark(self) -> object:
        return self.state()

    def state(self) -> list[TorchState]:
        return [TorchReader(generator).state() for generator in torch.cuda.default_generators]


def _setter(generator: torch.Generator, state: object, name: str) -> Callable[[], object]:
    said = state
    if type(state) is dict:
        try:
            said = told_by_torch(state)
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise LoadError(f"{_ROOT}: {name}: malformed: {error!r}") from error
    if type(said) is not bytes or not said:
        raise LoadError(f"{_ROOT}: {name}: wanted bytes, or a state in parts, found {type(state).__name__}")
    tensor = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    try:
        torch.Generator(generator.device).set_state(tensor)
    except (RuntimeError, TypeError) as error:
        raise LoadError(
            f"{_ROOT}: {name}: these {len(said)} bytes are no state of a generator on {generator.device} in "
            f"PyTorch {torch.__version__}: {str(error).splitlines()[0]}"
        ) from error
    return lambda: generator.set_state(tensor)


def _python_setter(state: Mapping[str, object]) -> Callable[[], object]:
    words = PYTHON.unpack(_words(state, "words", PYTHON.size, "python"))
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


def _numpy_setter(state: Mapping[str, object]) -> Callable[[], object]:
    key, pos = _words(state, "key", KEY_BYTES, "numpy"), state.get("pos")
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
