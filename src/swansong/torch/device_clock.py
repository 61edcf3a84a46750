"""The update clock of a component on a CUDA device: counted on the stream, read in host memory. Experimental.

Python runs ahead of the device, so what it has passed says nothing of what is written. Two integers on the
device do. Before an update's kernels one is raised and copied to page-locked host memory, after them the
other, on the stream of the kernels: it carries its work out in order, so whoever has seen a byte that an
update wrote finds `begun` raised. To read the clock is to read host memory: no call of CUDA, nothing
allocated, nothing waited for, in any thread, even while the stream hangs in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swansong.engine.clock import UNKNOWN, Gate, GateState, UpdateClock
from swansong.errors import ConfigError, NotSupportedError

BEGUN: Final = 0
"""Which counter: updates whose first write may have happened."""
DONE: Final = 1
"""Which counter: updates whose last write has happened."""
_QUEUED: Final = 0
"""In the cells of a clock, as `engine.clock.CELLS` orders them; the other two stay UNKNOWN here."""
_LOOK_S: Final = 50e-6
"""Between looks at whether the device has come to the update."""


class Counters(Protocol):
    """Two counters on one device that only grow, from 0. For the thread that trains, but for `arrived`."""

    def capturing(self) -> bool:
        """True if kernels are recorded into a CUDA graph now instead of being carried out."""
        ...

    def adopt(self) -> None:
        """From now on, raise on the stream that kernels are dispatched to now."""
        ...

    def adopted(self) -> bool:
        """True if kernels are dispatched to the stream that was adopted last."""
        ...

    def raise_one(self, counter: int) -> None:
        """Have the adopted stream add one to a counter and copy it to host memory. Does not wait for it."""
        ...

    def arrived(self, counter: int) -> int:
        """The count that was copied last. Reads host memory only; in any thread."""
        ...

    def mark(self) -> None:
        """Note how much was dispatched to the current stream up to now."""
        ...

    def reached(self) -> bool:
        """True once all that was dispatched before the last `mark` has been carried out. Does not wait."""
        ...


class CudaCounters:
    """Counters on a CUDA device. All that they need is made, and each kernel has run, when this returns.

    The latter matters: the first launch of a kernel may load it, and that can wait for the whole device.
    """

    def __init__(self, device: torch.device) -> None:
        """`device` has an index. Waits for it."""
        self._device = device
        on_device = torch.zeros(2, dtype=torch.int64, device=device)
        in_host = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
        self._on_device, self._in_host = on_device.unbind(), in_host.unbind()
        self._arrived: NDArray[np.int64] = in_host.numpy()
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()
        for counter in (BEGUN, DONE):
            self._on_device[counter].add_(0)
            self._in_host[counter].copy_(self._on_device[counter], non_blocking=True)
        self.mark()
        self.reached()
        self._stream.synchronize()

    def capturing(self) -> bool:
        """See Counters."""
        return torch.cuda.is_current_stream_capturing()

    def adopt(self) -> None:
        """See Counters."""
        self._stream = torch.cuda.current_stream(self._device)

    def adopted(self) -> bool:
        """See Counters."""
        return bool(torch.cuda.current_stream(self._device) == self._stream)

    def raise_one(self, counter: int) -> None:
        """See Counters. Two launches."""
        if self.adopted():
            self._raise(counter)
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._raise(counter)

    def arrived(self, counter: int) -> int:
        """See Counters. One aligned load of 64 bits, which the device writes whole."""
        return int(self._arrived[counter])

    def mark(self) -> None:
        """See Counters."""
        self._event.record(torch.cuda.current_stream(self._device))

    def reached(self) -> bool:
        """See Counters. Raises RuntimeError if the device has failed."""
        return bool(self._event.query())

    def _raise(self, counter: int) -> None:
        self._on_device[counter].add_(1)
        self._in_host[counter].copy_(self._on_device[counter], non_blocking=True)


class DeviceClock(UpdateClock):
    """A clock for updates that a device carries out after the call that dispatches them has returned.

    `queued` is counted by the host as ever; `begun` and `done` are what has arrived from the device, each
    with an offset that the host keeps. The host moves an offset before it dispatches anything that the change
    is about: an update that goes on is not whole from that moment on, not only once the device comes to it.
    In the cells, such as those of a flight recorder, `begun` and `done` are UNKNOWN: the device's memory does
    not outlive the process.
    """

    def __init__(
        self,
        key: str,
        counters: Counters,
        *,
        step: int = 0,
        cells: memoryview | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`counters` are this clock's alone. The component is whole at `step` once the device has carried out
        what was dispatched up to now, which has made or loaded it.
        """
        self._counters, self._pause = counters, pause
        self._dispatched = [counters.arrived(BEGUN), counters.arrived(DONE)]
        """By counter: how often the device was told to raise it."""
        self._offset = [0, 0]
        """By counter: what is added to what has arrived."""
        super().__init__(key, step=step, cells=cells)

    def await_device(self, gate: Gate | None = None) -> None:
        """Wait until the device has carried out what was dispatched to the current stream; before the gate.

        Otherwise an update would be queued behind a collective that may never end, and the component would
        be at no step for ever, though nothing was written. While `gate` is closed this waits there, and
        raises TrainingInterrupted as `Gate.wait` does: a loop whose stream hangs can be ended.
        """
        self._refuse_capture()
        self._counters.mark()
        while not self._counters.reached():
            if gate is not None and gate.state() is not GateState.OPEN:
                gate.wait()
            self._pause(_LOOK_S)

    def begin(self) -> None:
        """Before the first kernel of an update is dispatched, with its stream the current one.

        Raises RuntimeError if the update was not queued, NotSupportedError while a graph is captured.
        """
        self._refuse_capture()
        if self._begun >= self._cells[_QUEUED]:
            raise RuntimeError(f"component {self.key}: an update begins that has not passed the gate")
        self._counters.adopt()
        self._raise(BEGUN)

    def check_stream(self) -> None:
        """Before more kernels of the update are dispatched, by another optimizer.

        Raises NotSupportedError if they go to another stream than its first ones: nothing would say when they
        are over.
        """
        self._refuse_capture()
        if not self._counters.adopted():
            raise NotSupportedError(
                f"component {self.key}: the optimizers of one step run on different CUDA streams, so it "
                "cannot be told when the step's update is over; call step() of all of them on one stream"
            )

    def finish(self) -> None:
        """After the last kernel of an update was dispatched. The current stream may be another by now."""
        self._raise(DONE)

    def reopen(self) -> None:
        """See UpdateClock."""
        self._offset[DONE] -= 1

    def abandon(self) -> None:
        """See UpdateClock. What was dispatched is carried out, sooner or later, and stays."""
        self._cells[_QUEUED] = self._begun

    def skip(self) -> None:
        """See UpdateClock."""
        self.queue()
        self.begin()
        self.finish()

    def reset(self, step: int) -> None:
        """Say that the component is whole at `step` once the device has carried out what was dispatched up to
        now, having made or loaded it. Outside of any window.
        """
        if step < 0:
            raise ConfigError(f"step of component {self.key}: wanted 0 or more, got {step}")
        cells = self._cells
        for cell in range(len(cells)):
            cells[cell] = UNKNOWN  # `queued` for the moment, so that nothing read meanwhile is whole
        self._counters.adopt()
        for counter in (BEGUN, DONE):
            self._raise(counter)
            self._offset[counter] = step - self._dispatched[counter]
        cells[_QUEUED] = step

    @property
    def _begun(self) -> int:
        """Updates whose beginning was dispatched."""
        return self._dispatched[BEGUN] + self._offset[BEGUN]

    def _raise(self, counter: int) -> None:
        self._counters.raise_one(counter)
        self._dispatched[counter] += 1

    def _counts(self) -> tuple[int, int]:
        # What has arrived is read before its offset, which only an update that goes on lowers.
        begun = self._counters.arrived(BEGUN) + self._offset[BEGUN]
        return begun, self._counters.arrived(DONE) + self._offset[DONE]

    def _refuse_capture(self) -> None:
        if self._counters.capturing():
            raise NotSupportedError(
                f"component {self.key}: an update is being captured into a CUDA graph, whose replays pass "
                "no hook, so that they can neither be held back nor be counted; leave optimizer.step() out "
                "of the graph, or do not protect this loop"
            )
