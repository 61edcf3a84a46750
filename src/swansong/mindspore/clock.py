"""Update clocks for MindSpore: counted inside the optimizer where that can be, else at the steps' borders.

MindSpore dispatches forward pass, backward pass and update as one, and in PyNative mode long before the
kernels run, so what Python has passed says nothing of what is written. Two Parameters in the optimizer do:
one written when all gradients are there, before the update, the other after it, by kernels in the same order
as those that write the state (tried in PyNative and graph mode, MindSpore 2.10, CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim as experimental
from numpy.typing import NDArray

from swansong.engine.clock import UNKNOWN, Clock, ExternalClock, UpdateClock
from swansong.errors import NotSupportedError
from swansong.mindspore.parameters import CLOCK
from swansong.persist.session import warn

_OPTIMIZERS: Final = (nn.Optimizer, experimental.Optimizer)
SILENT: Final = 10
"""Steps without an update that are worth a warning; with loss scaling the first ones may well overflow."""
_BEGUN: Final = "swansong_begun"
_DONE: Final = "swansong_done"


class StepClock(Protocol):
    """The clock of everything that one call of the train network updates."""

    @property
    def clock(self) -> Clock:
        """What the gate queues and other threads read."""
        ...

    def dispatching(self, steps: int) -> None:
        """The gate is about to be passed for so many steps at once."""
        ...

    def dispatched(self) -> None:
        """It was passed."""
        ...

    def boundary(self, step: int) -> None:
        """Step `step` is complete. Raises NotSupportedError for what this clock cannot count."""
        ...

    def abandon(self) -> None:
        """Nothing more is dispatched: take back what was queued and has not begun."""
        ...

    def finished(self) -> bool:
        """True if what was queued is done. Waits for kernels under way."""
        ...


class Counters:
    """The two Parameters in one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer` has been made by `install`."""
        self._begun, self._done = getattr(optimizer, _BEGUN), getattr(optimizer, _DONE)
        self.offset = 0
        """What is added to them, since they count from their installation."""
        self.refresh()

    def refresh(self) -> None:
        """Look where they are now. Waits for the kernels that were dispatched; their RuntimeError passes."""
        self._views: tuple[NDArray[Any], NDArray[Any]] = (self._begun.asnumpy(), self._done.asnumpy())

    @property
    def begun(self) -> int:
        """Updates begun. Does not wait: on the CPU this is the Parameter's own memory."""
        return int(self._views[0]) + self.offset

    @property
    def done(self) -> int:
        """Updates done."""
        return int(self._views[1]) + self.offset


class OptimizerClock(ExternalClock):
    """A clock that is read from the Parameters in all optimizers of a train network. A StepClock."""

    def __init__(
        self, key: str, counters: Sequence[Counters], *, step: int, cells: memoryview | None
    ) -> None:
        """`step` is where training stands; nothing is under way."""
        self._counters = counters
        self._steps = 1
        self._silent: int | None = 0
        """Boundaries without any update, as where what runs has no counters in it; None: one was seen. Until
        then nothing follows from counters that stand still."""
        for one in counters:
            one.offset = 0
            one.refresh()
            one.offset = step - one.done
        super().__init__(
            key,
            read_begun=lambda: max(one.begun for one in counters),
            read_done=lambda: min(one.done for one in counters),
            step=step,
            cells=cells,
        )

    @property
    def clock(self) -> Clock:
        """See StepClock."""
        return self

    def queue(self) -> None:
        """Count the steps that are dispatched at once."""
        self._cells[0] += self._steps

    def dispatching(self, steps: int) -> None:
        """See StepClock."""
        self._steps = steps

    def dispatched(self) -> None:
        """See StepClock."""

    def boundary(self, step: int) -> None:
        """See StepClock. A step of which an optimizer saw nothing, such as one that overflowed, counts."""
        for one in self._counters:
            one.refresh()
        if all(one.begun == one.done == step for one in self._counters) and self._cells[0] == step:
            self._silent = None
            return
        for one in self._counters:
            if one.begun != one.done or one.done > step:
                raise NotSupportedError(
                    f"step {step}: an optimizer is at update {one.done}; several updates in one step cannot "
                    "be told from one that is half done"
                )
        if self._silent is not None:
            self._silent += 1
            if self._silent == SILENT:
                warn(
                    f"no update of an optimizer was seen in {SILENT} steps: until one is, the state can be "
                    "saved only between steps, not when one is interrupted"
                )
        self._cells[0] = UNKNOWN  # so that nothing read meanwhile is whole
        for one in self._counters:
            one.offset += step - one.done
        self._cells[0] = step

    def abandon(self) -> None:
        """See StepClock. Within steps that were dispatched together there is nothing to go back to."""
        before = self._cells[0] - self._steps
        if self._silent is None and self._settled() and self._whole_at() == before:
            self._cells[0] = before

    def finished(self) -> bool:
        """See StepClock."""
        return self._silent is None and self._settled() and self._whole_at() == self._cells[0]

    def _whole_at(self) -> int | None:
        """The update at which all optimizers are; None if one is inside of one, or ahead of another."""
        begun, done = self._counts()
        return done if begun == done else None

    def _settled(self) -> bool:
        """Wait for kernels under way; False if even then it cannot be told."""
        for _ in range(2):  # the first time, the error of a kernel that failed may come out here
            try:
                for one in self._counters:
                    one.refresh()
            except RuntimeError:
                continue
            return True
        return False


class BorderClock(UpdateClock):
    """A clock for what cannot be counted inside: whole only between two calls of the network. A StepClock."""

    def __init__(self, key: str, *, step: int, cells: memoryview | None) -> None:
        self._steps = 1
        super().__init__(key, step=step, cells=cells)

    @property
    def clock(self) -> Clock:
        """See StepClock."""
        return self

    def queue(self) -> None:
        """Count the steps that are dispatched at once."""
        self._cells[0] += self._steps

    def dispatching(self, steps: int) -> None:
        """See StepClock."""
        self._steps = steps

    def dispatched(self) -> None:
        """See StepClock."""
        self._cells[1] = self._cells[0]

    def boundary(self, step: int) -> None:
        """See StepClock."""
        self.reset(step)

    def finished(self) -> bool:
        """See StepClock. It cannot be told."""
        return False


def optimizers(network: nn.Cell) -> list[nn.Cell]:
    """The optimizers in a train network."""
    return [cell for _, cell in network.cells_and_names() if isinstance(cell, _OPTIMIZERS)]


def install(optimizer: nn.Cell, number: int) -> bool:
    """Put the Parameters into an optimizer, and the writing of them around its update.

    Returns False if they are there already. Before the network is compiled, which is when it runs first. The
    update itself is the same, bit for bit. `number` tells the Parameters from those of other optimizers.
    """
    if hasattr(optimizer, _BEGUN):
        return False
    for attribute in (_BEGUN, _DONE):
        name = f"{CLOCK}{attribute.removeprefix('swansong_')}.{number}"
        parameter = Parameter(Tensor(np.array(0, np.int64)), name=name, requires_grad=False)
        setattr(optimizer, attribute, parameter)
    optimizer.swansong_add, optimizer.swansong_one = ops.Add(), Tensor(np.array(1, np.int64))
    optimizer.__class__ = _counted(type(optimizer))
    return True


def _counted(kind: Any) -> type[nn.Cell]:
    """`kind`, counting its updates."""

    # The parser of MindSpore's graph mode reads the source of this method. It must call `super().construct`:
    # anything else loses what optimizers assign to attributes of their own.
    class Counted(kind):  # type: ignore[misc]
        def construct(self, gradients):  # type: ignore[no-untyped-def]
            count = ops.depend(self.swansong_add(self.swansong_done, self.swansong_one), gradients)
            begun = ops.assign(self.swansong_begun, count)
            gradients = ops.depend(gradients, begun)
            result = super().construct(gradients)
            done = ops.assign(self.swansong_done, ops.depend(count, result))
            return ops.depend(result, done)

    Counted.__name__, Counted.__qualname__ = kind.__name__, kind.__qualname__
    return Counted
