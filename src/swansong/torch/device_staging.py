"""Reading state from a CUDA device whose streams may hang: copies in page-locked host memory. Experimental.

At an incident, bytes are copied on a stream of their own, by the device's copy engines. No kernel is launched
for it, and nothing is allocated or registered: each of these may wait for the whole device, and that for a
collective that never ends. So a tensor is copied as it lies, from its first byte to its last, whatever its
strides; and the host memory is taken, and grown, before: at start and at boundaries.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from swansong.engine.clock import Clock, Reading
from swansong.errors import ClockNotReadableError, ConfigError, NotSupportedError, UnrepresentableError
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.state.tree import Flat
from swansong.torch.device_setup import available_memory
from swansong.torch.tensors import NAMES, host_tensor

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""What is copied and where to: equally long 1-dim uint8 tensors, on the device and in host memory."""
Flatten: TypeAlias = Callable[[Callable[[object], HostTensor | None]], Flat]
"""Takes the live state apart, asking how to show each tensor, as `state.tree.flatten` does."""

_ALIGNED: Final = 512
"""Bytes at a multiple of which a tensor's copy begins."""
_LOOK_S: Final = 0.001
"""Between looks at whether a copy is over."""
_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for all contexts of the process."""
_POOL: Final = 32
"""Streams of one priority that PyTorch has per device; it hands them out in turn."""


class Copies(Protocol):
    """Copying from one device to host memory. What waits for the device is for the thread that trains."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if it is on the device."""
        ...

    def pin(self, nbytes: int) -> NDArray[np.uint8]:
        """New page-locked memory. May wait for the device. Raises ConfigError if it cannot be had."""
        ...

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Let it be ordinary memory, which it stays as long as it is shown. May wait for the device."""
        ...

    def start(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy, after what was begun before; in any thread. RuntimeError: the device has failed."""
        ...

    def over(self) -> bool:
        """True once all that was begun is done. Does not wait; in any thread. RuntimeError as `start`."""
        ...


class CudaCopies:
    """Copying from a CUDA device, on a stream that training does not use."""

    def __init__(self, device: torch.device) -> None:
        """`device` has an index. Raises NotSupportedError if all streams are in use."""
        self._device = device
        self._stream = _side_stream(device)
        self._event = torch.cuda.Event()
        self._event.record(self._stream)  # which makes it

    def holds(self, tensor: torch.Tensor) -> bool:
        """See Copies."""
        return tensor.device == self._device

    def pin(self, nbytes: int) -> NDArray[np.uint8]:
        """See Copies. Exactly so many bytes: PyTorch's own allocator would round up to a power of two."""
        # Shared and not inherited: a page that is copied on write after a fork would not be the device's any
        # more.
        memory = mmap.mmap(-1, nbytes)
        memory.madvise(mmap.MADV_DONTFORK)
        array = np.frombuffer(memory, np.uint8)
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, nbytes, _PORTABLE))
        if code:
            raise ConfigError(
                f"{self._device}: {nbytes} bytes of host memory cannot be page-locked (CUDA error {code}); "
                "protect less state per host, or give ttp=None"
            )
        return array

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """See Copies."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)))

    def start(self, pairs: Sequence[Pair]) -> None:
        """See Copies. Both sides are contiguous and of one type, for which PyTorch takes no temporaries."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._event.record(self._stream)

    def over(self) -> bool:
        """See Copies."""
        return bool(self._event.query())


class DeviceStaging:
    """The live state of one component on a device, shown in host memory.

    Tensors on the CPU among it are shown in place. What is shown stays as it is until the next copy begins,
    which is when the clock says another step than it did, or after `forget`.
    """

    def __init__(
        self,
        copies: Copies,
        clock: Clock,
        flatten: Flatten,
        *,
        patience_s: float = 1.0,
        available: Callable[[], int] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`patience_s` is how long `show` may take; `available` tells how many bytes of host memory are to be
        had (default: `available_memory`). Nothing is allocated before `prepare`.
        """
        self._copies, self._clock, self._flatten = copies, clock, flatten
        self._patience_s, self._monotonic, self._pause = patience_s, monotonic, pause
        self._available = available or available_memory
        self._pieces: tuple[NDArray[np.uint8], ...] = ()
        self._lock = threading.Lock()
        self._age = 0
        self._under_way: _Copy | None = None
        self._sources: Sequence[Pair] = ()
        """What is being copied: it must not be freed before that is over."""
        self._shown: _Copy | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of page-locked memory taken."""
        return sum(map(len, self._pieces))

    def prepare(self) -> None:
        """Take what memory the state needs that has none yet; in the thread that trains, at start and at
        boundaries.

        Optimizers make their tensors at their first step. Raises ConfigError if there is not so much,
        UnrepresentableError for state that cannot be shown; what was taken stays.
        """
        survey = _Survey(self._copies, self._pieces)
        self._flatten(survey.as_tensor)
        if survey.lacking:
            available = self._available()
            if survey.lacking > available:
                raise ConfigError(
                    f"state on the device: wanted {survey.lacking} bytes of host memory for copies of it, "
                    f"{available} are available; protect less state per host, or give ttp=None"
                )
            self._pieces = (*self._pieces, self._copies.pin(survey.lacking))
        self.forget()

    def forget(self) -> None:
        """Copy anew when the state is wanted next, whatever the clock says; in the thread that trains."""
        self._age += 1

    def show(self, within_s: float | None = None) -> Flat:
        """Copy the state and show the copy; in any thread. Ask the clock afterwards whether it holds.

        Raises ClockNotReadableError if the component is not whole, moved meanwhile, has outgrown the memory
        taken, if the device has failed, or if it takes longer than `within_s` (default: the staging's
        patience). A copy that takes longer goes on, and the next call waits for the same one.
        """
        patience_s = self._patience_s if within_s is None else within_s
        ends = self._monotonic() + patience_s
        if not self._lock.acquire(timeout=patience_s):
            raise ClockNotReadableError("the state on the device is being copied in another thread")
        try:
            return self._copied(ends).flat
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give the memory back, unless a copy that hangs may still write to it; in the thread that trains."""
        pieces, self._pieces = self._pieces, ()
        with self._lock:
            if self._under_way is None:
                for piece in pieces:
                    self._copies.unpin(piece)

    def _copied(self, ends: float) -> _Copy:
        reading = self._clock.read()
        if reading.step is None:
            raise ClockNotReadableError("the state on the device is being updated")
        if self._shown is not None and self._shown.is_of(reading, self._age):
            return self._shown
        copy = self._under_way
        if copy is not None and not copy.is_of(reading, self._age):
            self._await(ends)  # so that no more than one is ever queued
            copy = None
        if copy is None:
            copy = self._start(reading)
        self._await(ends)
        if self._clock.read() != reading:
            raise ClockNotReadableError("the state on the device was updated while it was copied")
        self._shown = copy
        return copy

    def _start(self, reading: Reading) -> _Copy:
        self._shown = None
        survey = _Survey(self._copies, self._pieces)
        age = self._age
        flat = self._flatten(survey.as_tensor)
        if survey.lacking:
            raise ClockNotReadableError(
                f"{survey.lacking} bytes of state on the device have appeared since the last boundary, and "
                "there is no host memory to copy them to"
            )
        copy = self._under_way = _Copy(reading, age, flat)
        self._sources = survey.pairs
        with _asking():
            self._copies.start(survey.pairs)
        return copy

    def _await(self, ends: float) -> None:
        """Return when the copy under way is over. A device that hangs is not waited for."""
        while True:
            with _asking():
                over = self._copies.over()
            if over:
                self._under_way, self._sources = None, ()
                return
            if self._monotonic() >= ends:
                raise ClockNotReadableError("the state on the device is not copied yet; the device may hang")
            self._pause(_LOOK_S)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of the state, under way or over."""

    reading: Reading
    """Of the clock, before."""
    age: int
    """How often the staging had been told to forget."""
    flat: Flat
    """Shows the memory that is copied to."""

    def is_of(self, reading: Reading, age: int) -> bool:
        return (self.reading, self.age) == (reading, age)


class _Survey:
    """One walk through the state: for each tensor a place, first fit in the order in which they come.

    The same state is given the same places again, so what `lacking` says, in one more piece, suffices.
    """

    def __init__(self, copies: Copies, pieces: Sequence[NDArray[np.uint8]]) -> None:
        self._copies, self._pieces = copies, pieces
        self._used = [0] * len(pieces)
        self._places: dict[tuple[int, int], NDArray[np.uint8]] = {}
        """By address and size: tied tensors are copied once, and stay tied."""
        self.pairs: list[Pair] = []
        self.lacking = 0
        """Bytes that no piece had room for."""

    def as_tensor(self, value: object) -> HostTensor | None:
        """For `state.tree.flatten`. What it shows of the device has yet to be copied, by `pairs`."""
        if not isinstance(value, torch.Tensor):
            return None
        if self._copies.holds(value):
            return self._staged(value)
        if value.device.type != "cpu":
            raise UnrepresentableError(
                f"a tensor on {value.device}; wanted all state on the CPU and on the device of the parameters"
            )
        return host_tensor(value, "tensor")

    def _staged(self, tensor: torch.Tensor) -> HostTensor:
        dtype = DTYPES[_checked(tensor)]
        shape, span = tuple(tensor.shape), _span(tensor)
        if not span:
            return HostTensor(dtype, np.empty(shape, dtype.carrier))
        strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
        place = self._place(tensor, span)
        return HostTensor(dtype, np.ndarray(shape, dtype.carrier, place, 0, strides))

    def _place(self, tensor: torch.Tensor, span: int) -> NDArray[np.uint8]:
        nbytes = span * tensor.element_size()
        known = self._places.get((tensor.data_ptr(), nbytes))
        if known is not None:
            return known
        place = self._fit(nbytes)
        if place is None:
            self.lacking += _rounded(nbytes)
            # Never written or read: nothing is copied as long as something is lacking.
            place = np.empty(nbytes, np.uint8)
        else:
            source = tensor.detach().as_strided((span,), (1,)).view(torch.uint8)
            self.pairs.append((source, torch.from_numpy(place)))
        self._places[tensor.data_ptr(), nbytes] = place
        return place

    def _fit(self, nbytes: int) -> NDArray[np.uint8] | None:
        for number, piece in enumerate(self._pieces):
            begin = self._used[number]
            if begin + nbytes <= len(piece):
                self._used[number] = begin + _rounded(nbytes)
                return piece[begin : begin + nbytes]
        return None


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is neither the default nor the current one, of the pool that training rarely uses."""
    taken = (torch.cuda.default_stream(device), torch.cuda.current_stream(device))
    for _ in range(_POOL):
        stream = torch.cuda.Stream(device, priority=-1)
        if stream not in taken:
            return stream
    raise NotSupportedError(f"{device}: there is no stream that training does not use")


def _checked(tensor: torch.Tensor) -> str:
    """The name of its element type. Raises UnrepresentableError for what does not lie there as it is."""
    dtype = NAMES.get(tensor.dtype)
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    if (
        dtype is None
        or not plain
        or type(tensor).__name__ == "DTensor"
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise UnrepresentableError(
            f"a {type(tensor).__name__} of type {tensor.dtype} and layout {tensor.layout} on {tensor.device} "
            "cannot be copied as it lies; wanted a dense tensor with memory of its own"
        )
    return dtype


def _span(tensor: torch.Tensor) -> int:
    """Elements from its first to its last in memory; 0 for none. Strides are never negative in PyTorch."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


@contextmanager
def _asking() -> Iterator[None]:
    """Around calls of the device, which say RuntimeError whatever is wrong with it."""
    try:
        yield
    except RuntimeError as error:
        raise ClockNotReadableError(f"the device cannot be read any more: {error}") from error
