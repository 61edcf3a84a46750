"""Seeing updates through the optimizers' own hooks: the gate before each, the clock around it.

A step is one update of a component, whatever it is made of. The update begins with the first optimizer's
pre-hook, which comes before its first write, and is over

- when each optimizer has stepped as often as it ever did in a step before, and at least once: between two of
  them the state is of no one step;
- or at the boundary. If an optimizer steps once more than ever, the update goes on.

An average of the model (`beside.Averaged`) takes part likewise, but is not awaited before it was ever updated
in a step. Until it is updated, or the boundary, the state may be `behind`, and other ranks are preferred.

`step(closure)`: the pre-hook comes before the closure's backward pass, so the update begins when the closure
has returned for the first time. A step that a gradient scaler left out is an empty update at the boundary.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from swansong.engine.clock import Gate, UpdateClock
from swansong.errors import ConfigError, SwansongWarning
from swansong.torch.beside import Averaged
from swansong.torch.device_clock import DeviceClock
from swansong.torch.vote import Vote

_MARK: Final = "_swansong_protected"
_UPDATE: Final = "update_parameters"
_MANY: Final = 100
"""Updates after which a loop without a single boundary is told of it."""


class AverageWatch:
    """In place of the `update_parameters` of one average, from when it is made until `remove`.

    In a copy of the average, and in a pickle, the method itself is in that place.
    """

    def __init__(self, average: Averaged, around: Callable[[Averaged, Callable[[], Any]], Any]) -> None:
        """`around` is given the average and the call to make."""
        self._average, self._around = average, around
        own = vars(average.module)
        self._former: Any = own.get(_UPDATE)
        self._update: Callable[..., Any] = getattr(average.module, _UPDATE)
        own[_UPDATE] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._average, lambda: self._update(*args, **kwargs))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (self._average.module, _UPDATE)

    def remove(self) -> None:
        """Leave the average as it was, unless something else has taken the place meanwhile."""
        own = vars(self._average.module)
        if own.get(_UPDATE) is self:
            del own[_UPDATE]
            if self._former is not None:
                own[_UPDATE] = self._former


class Updates:
    """Hooks on the optimizers of one run, from `attach` to `detach`."""

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        scaler: Any = None,
        vote: Vote | None = None,
        averages: Sequence[Averaged] = (),
    ) -> None:
        """`vote` is taken before each update. Raises ConfigError for an optimizer that another run has."""
        self._optimizers, self._scaler, self._vote = dict(optimizers), scaler, vote
        self._averages = tuple(averages)
        self._clock = UpdateClock("")
        self._gate: Gate | None = None
        self._on_device: DeviceClock | None = None
        """The clock, if its updates are carried out after they were dispatched."""
        self._begin: Callable[[], object] | None = None
        self._handles: list[Any] = []
        self._scaler_step: tuple[Any, Any] = (None, None)
        """Ours, while it is in place of the scaler's own, and what it is in place of."""
        self._watches: list[AverageWatch] = []
        self._usual = {id(optimizer): 1 for optimizer in self._optimizers.values()}
        """How often each steps in a step, as far as is known."""
        self._taken: dict[int, int] = {}
        """How often each has stepped in this one, if at all."""
        self._empty = 0
        """Of these, how often a scaler had it write nothing."""
        self._inside = 0
        """Optimizers that are inside their `step`: one may call another's."""
        self._over = False
        """The update is over, as far as is known."""
        self._passed = False
        """The step's update has passed the gate."""
        self._attempted = False
        """A scaler was asked for an update, and may have left it out."""
        self._boundaries = 0
        self.seen = 0
        """Updates so far, by any optimizer, those that a scaler left out included."""
        self._check_free()

    def attach(self, begin: Callable[[], object]) -> None:
        """See updates from now on. `begin` is called before the first that is seen. Raises ConfigError."""
        self._check_free()
        self._begin = begin
        for optimizer in self._optimizers.values():
            setattr(optimizer, _MARK, True)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))
        if self._scaler is not None:
            self._scaler_step = self._watched(self._scaler.step), vars(self._scaler).get("step")
            self._scaler.step = self._scaler_step[0]
        for average in self._averages:
            self._watches.append(AverageWatch(average, self._average))

    def use(self, clock: UpdateClock, gate: Gate | None) -> None:
        """The run has begun: the clock that counts, and the gate to pass; None: updates need not ask."""
        self._clock, self._gate, self._begin = clock, gate, None
        self._on_device = clock if isinstance(clock, DeviceClock) else None

    def detach(self) -> None:
        """Leave optimizers and scaler as they were. Again, or if not attached: nothing."""
        if self._handles:
            for optimizer in self._optimizers.values():
                delattr(optimizer, _MARK)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for watch in self._watches:
            watch.remove()
        self._watches.clear()
        ours, former = self._scaler_step
        if ours is not None and vars(self._scaler).get("step") is ours:
            del self._scaler.step
            if former is not None:
                self._scaler.step = former
        self._scaler_step = (None, None)

    @property
    def pending(self) -> bool:
        """True if the loop has updated, or has tried to, since the last boundary."""
        return bool(self._taken) or self._attempted

    def boundary(self) -> bool:
        """The step is complete; True if its update was left out by a scaler. Passes the gate for that."""
        if not self._taken:
            self._pass()
            self._clock.begin()
            for average in self._averages:
                average.begin()
        for average in self._averages:
            average.boundary()
        if not self._over:  # or an optimizer stepped less often, or its step raised, and the loop went on
            self._clock.finish()
        skipped = self._empty == sum(self._taken.values())
        if self._taken != self._usual:
            self._usual = {key: max(usual, self._taken.get(key, 0)) for key, usual in self._usual.items()}
        self._taken = {}
        self._inside = self._empty = 0
        self._over = self._passed = self._attempted = False
        self._boundaries += 1
        return skipped

    def abandon(self) -> None:
        """An exception has ended the loop. What only averages were awaited for is whole, if `behind`."""
        if self._averages and not self._over and not self._inside and self._done():
            self._clock.finish()
            self._over = True

    # -- hooks ----------------------------------------------------------------------------------------

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._enter(optimizer)
            return None
        later = self._after_first(optimizer, closure)
        if len(args) > 1:
            return (args[0], later, *args[2:]), kwargs
        return args, kwargs | {"closure": later}

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inside:  # its closure was never called
            return
        self._inside -= 1
        if getattr(optimizer, "found_inf", None) is not None:
            self._empty += _wrote_nothing(optimizer)
        if self._taken == self._usual and not self._inside and not self._averages:
            self._clock.finish()
            self._over = True
        else:
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._inside or not self._done():
            return
        if self._averages and any(average.taken < average.usual for average in self._averages):
            return
        self._clock.finish()
        self._over = True

    def _done(self) -> bool:
        """Each optimizer has stepped as often as it ever did in a step."""
        return all(self._taken.get(key, 0) >= usual for key, usual in self._usual.items())

    def _average(self, average: Averaged, update: Callable[[], Any]) -> Any:
        """Around the update of an average."""
        if self._begin is not None:  # the run has not begun: no state is of any step yet
            return update()
        if not self._taken:
            self._when_open(average.keep)
            return update()
        if self._over:
            self._go_on()
        self._inside += 1
        result = update()
        self._inside -= 1
        average.updated()
        self._finish_if_done()
        return result

    def _after_first(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with the update beginning when it has returned for the first time."""
        entered = False

        @functools.wraps(closure)
        def run() -> Any:
            nonlocal entered
            result = closure()
            if not entered:
                entered = True
                self._enter(optimizer)
            return result

        return run

    def _enter(self, optimizer: Optimizer) -> None:
        if self._begin is not None:
            self._begin()
        taken, key = self._taken, id(optimizer)
        if not taken:
            self._pass()
            self._clock.begin()
            for average in self._averages:
                average.begin()
        else:
            if self._on_device is not None:
                self._on_device.check_stream()
            if self._over:
                self._go_on()
        self._inside += 1
        taken[key] = taken.get(key, 0) + 1
        self.seen += 1
        if self.seen == _MANY and not self._boundaries:
            warnings.warn(
                f"{_MANY} updates were seen, and no step's end: nothing is saved that way. Take the batches "
                "from run.batches(), or call run.step_end() after each step",
                SwansongWarning,
                stacklevel=6,
            )

    def _pass(self) -> None:
        """Queue the step's update, once the gate lets it pass, and those of all ranks if they vote."""
        if self._passed:
            return
        if self._on_device is not None and self._gate is not None:
            self._on_device.await_device(self._gate)
        if self._gate is None:
            self._clock.queue()
        elif self._vote is None:
            self._gate.enter((self._clock,))
        else:
            self._vote.enter(self._gate, self._clock)
        self._passed = True

    def _go_on(self) -> None:
        """Go on with the step's update, once the gate lets that pass."""
        self._when_open(self._clock.reopen)
        self._over = False

    def _when_open(self, act: Callable[[], None]) -> None:
        """Act while the gate is open, and cannot be closed."""
        gate = self._gate
        if gate is None:
            act()
            return
        while not gate.try_enter((), lambda admitted: act() if admitted else None):
            gate.wait()

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._begin is not None:
                self._begin()
            before = self.seen
            self._attempted = True
            result = step(*args, **kwargs)
            if self.seen == before:
                self.seen += 1
                if self._vote is not None:  # others may have updated, and wait for this rank's voice
                    self._pass()
            return result

        return run

    def _check_free(self) -> None:
        for name, optimizer in self._optimizers.items():
            if getattr(optimizer, _MARK, False):
                raise ConfigError(f"{name}: it is protected already; one optimizer belongs to one protect()")
        for average in self._averages:
            if isinstance(vars(average.module).get(_UPDATE), AverageWatch):
                raise ConfigError(f"{average.name}: it is protected already, by another protect()")


def _wrote_nothing(optimizer: Optimizer) -> bool:
    """True if a scaler had a fused optimizer find out that it is to leave the update out.

    Only known on the CPU: to look at a device's memory would wait for it.
    """
    found: object = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found)
