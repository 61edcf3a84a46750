"""A device in a test: it carries out what was queued on its streams when it is told to, and not before."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

MAIN = "main"
SIDE = "side"


class QueuedDevice:
    """Streams of work, and the tensors that are said to lie on it (in truth on the CPU)."""

    def __init__(self) -> None:
        self.streams: dict[str, deque[Callable[[], object]]] = {}
        self.current = MAIN
        self.capturing = False
        self.failed = ""
        """What it says from now on to whoever asks it anything."""
        self.calls: Counter[str] = Counter()
        self._storages: set[int] = set()

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor, and all views of its memory, be on the device."""
        self._storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.untyped_storage().data_ptr() in self._storages
        )

    def queue(self, work: Callable[[], object], stream: str | None = None) -> None:
        self.streams.setdefault(stream or self.current, deque()).append(work)

    def run(self, count: int | None = None, stream: str = MAIN) -> int:
        """Carry out so many pieces of a stream's work (None: all); how many there were."""
        works = self.streams.get(stream, deque())
        done = 0
        while works and done != count:
            works.popleft()()
            done += 1
        return done

    def ask(self, what: str) -> None:
        self.calls[what] += 1
        if self.failed:
            raise RuntimeError(self.failed)


class QueuedCounters:
    """See `swansong.torch.device_clock.Counters`."""

    def __init__(self, device: QueuedDevice) -> None:
        self.device = device
        self._stream = device.current
        self._on_device, self._arrived = [0, 0], [0, 0]
        self._marks = self._reached = 0

    def capturing(self) -> bool:
        return self.device.capturing

    def adopt(self) -> None:
        self._stream = self.device.current

    def adopted(self) -> bool:
        return self._stream == self.device.current

    def raise_one(self, counter: int) -> None:
        self.device.ask("raise")

        def add() -> None:
            self._on_device[counter] += 1

        def copy() -> None:
            self._arrived[counter] = self._on_device[counter]

        self.device.queue(add, self._stream)
        self.device.queue(copy, self._stream)

    def arrived(self, counter: int) -> int:
        return self._arrived[counter]

    def mark(self) -> None:
        self.device.ask("mark")
        self._marks += 1
        number = self._marks

        def reach() -> None:
            self._reached = number

        self.device.queue(reach)

    def reached(self) -> bool:
        self.device.ask("reached")
        return self._reached == self._marks


class QueuedCopies:
    """See `swansong.torch.device_staging.Copies`. As a device it does not keep alive what it copies."""

    def __init__(self, device: QueuedDevice) -> None:
        self.device = device
        self.pinned: list[int] = []
        """Bytes of each piece."""
        self.sources: list[weakref.ReferenceType[torch.Tensor]] = []
        """What was ever copied."""
        self._begun = self._over = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.device.holds(tensor)

    def pin(self, nbytes: int) -> np.ndarray:
        self.device.ask("pin")
        self.pinned.append(nbytes)
        return np.full(nbytes, 0xEE, np.uint8)

    def unpin(self, memory: np.ndarray) -> None:
        self.device.ask("unpin")
        self.pinned.remove(len(memory))

    def start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.device.ask("start")
        self._begun += 1
        number = self._begun
        for source, target in pairs:
            assert source.dtype == target.dtype == torch.uint8
            assert source.dim() == target.dim() == 1
            assert source.is_contiguous()
            self.sources.append(weakref.ref(source))
            self.device.queue(_copying(self.sources[-1], weakref.ref(target)), SIDE)

        def mark() -> None:
            self._over = number

        self.device.queue(mark, SIDE)

    def over(self) -> bool:
        self.device.ask("over")
        return self._over == self._begun


def _copying(
    source: weakref.ReferenceType[torch.Tensor], target: weakref.ReferenceType[torch.Tensor]
) -> Callable[[], None]:
    def copy() -> None:
        read, written = source(), target()
        assert read is not None, "what is being copied was freed"
        assert written is not None, "where it is copied to was freed"
        written.copy_(read)

    return copy
