"""One run of a training loop under protection: its clock, its boundaries, its end."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import mindspore as ms
from mindspore import nn

from swansong.engine.address import Address
from swansong.errors import ConfigError, SwansongError
from swansong.mindspore import ttp_start
from swansong.mindspore.clock import BorderClock, Counters, OptimizerClock, StepClock, install, optimizers
from swansong.mindspore.content import RunRecord, forgotten, irreproducible
from swansong.mindspore.ranks import Ranks
from swansong.mindspore.seeds import gathered_seeds
from swansong.mindspore.trained import TrainedState
from swansong.mindspore.ttp_start import Begin
from swansong.persist.boundary import BoundaryState, pack
from swansong.persist.rank import LiveComponent
from swansong.persist.session import Cells, Plan, Session, warn
from swansong.state.components import component_key
from swansong.store.checkpoint import Content, Mode
from swansong.store.saving import plain_skeleton


class Installed:
    """The counters in a network's optimizers, if they are in what runs."""

    def __init__(self, network: nn.Cell) -> None:
        """Put them in, where they are not yet; before the network runs first."""
        found = optimizers(network)
        compiled = ms.get_context("mode") == ms.GRAPH_MODE and bool(network.compile_cache)
        fresh = [install(optimizer, number) for number, optimizer in enumerate(found)]
        self.missing = "no optimizer was found in the train network" if not found else ""
        if compiled and any(fresh):
            self.missing = "the graph was compiled before training began with this callback"
        self.optimizers = [] if self.missing else found


class ProtectedRun:
    """From the first epoch's begin until training has ended, however it does. For the thread that trains."""

    def __init__(
        self,
        plan: Plan,
        address: Address,
        params: Any,
        installed: Installed,
        begin: Begin,
        mode: Mode,
    ) -> None:
        """Register. All ranks must. Raises SwansongError, OSError."""
        network, ranks = params.train_network, Ranks(plan.rank, plan.world_size)
        self._state = TrainedState(network)
        self._clock: StepClock
        self._pending = 0
        """Steps that were dispatched since the last boundary."""
        record = RunRecord(
            seeds=gathered_seeds(ranks),
            steps_per_epoch=begin.steps_per_epoch,
            sink=bool(params.get("dataset_sink_mode")),
        )
        self._shared = plain_skeleton(record.objects, "mindspore")
        callbacks = params.get("list_callback") or ()
        self._session = Session(plan, _no_content)
        told = self._session.agree_on(
            lambda: ttp_start.facts(
                plan.directory,
                callbacks,
                begin,
                address=address,
                world_size=ranks.size,
                run=plan.incarnation.hex(),
                mode=mode,
                crash_loop_limit=plan.options.crash_loop_limit or 0,
                inexact=irreproducible(network) + forgotten(callbacks),
            )
        )
        ttp_start.check(told, begin)
        place = ttp_start.placement(ranks.size)
        key = component_key(self._state.shapes(), placement=place, rank=ranks.rank)
        _warn_of_weakness(params, installed, alone=place is None and ranks.size > 1, rank=ranks.rank)

        def components(cells: Cells) -> tuple[LiveComponent, ...]:
            self._clock = _clock(installed, key, begin.step, cells.get(key))
            return (LiveComponent("network and optimizer", self._clock.clock, self._state.show),)

        self._session.begin(told, [key], components)

    @property
    def step(self) -> int:
        """The last boundary, or where the run began."""
        return self._session.step

    @property
    def protected(self) -> bool:
        """True if the state would be saved if something went wrong now."""
        return self._session.protected

    def dispatch(self, steps: int) -> None:
        """Before the network is called, for so many steps; waits while a fault is dealt with.

        Raises TrainingInterrupted if the job ends.
        """
        self._clock.dispatching(steps)
        gate = self._session.gate
        if gate is not None:
            gate.enter((self._clock.clock,))
        else:
            self._clock.clock.queue()
        self._clock.dispatched()
        self._pending = steps

    def boundary(self, step: int) -> None:
        """Step `step` is complete. Raises TrainingInterrupted once the job is to end, NotSupportedError."""
        steps = step - self.step
        if steps < 1:
            raise ConfigError(f"step {step} ends, but step {self.step} has ended already")
        self._clock.boundary(step)
        self._pending = 0
        state = BoundaryState(shared=self._shared, tensors=self._state.moved())
        self._session.boundary(pack(state), steps=steps)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around work that is no step: no lack of progress in there is a stall."""
        return self._session.phase(name)

    def persist_and_stop(self) -> None:
        """Have the state of all ranks saved and the job ended. Raises TrainingInterrupted."""
        self._session.persist_and_stop()

    def end(self, error: BaseException | None) -> None:
        """Training has ended. Raises as `Session.end`."""
        if self._pending:
            self._catch_up()
        self._session.end(error)

    def _catch_up(self) -> None:
        """The step that was dispatched has no boundary: it is complete all the same, or never will be."""
        if self._clock.finished():
            # What is raised here is said by the session; the error that ended training counts.
            with suppress(SwansongError, RuntimeError):
                self.boundary(self.step + self._pending)
        else:
            self._clock.abandon()


def _clock(installed: Installed, key: str, step: int, cells: memoryview | None) -> StepClock:
    if not installed.optimizers:
        return BorderClock(key, step=step, cells=cells)
    counters = [Counters(optimizer) for optimizer in installed.optimizers]
    return OptimizerClock(key, counters, step=step, cells=cells)


def _warn_of_weakness(params: Any, installed: Installed, *, alone: bool, rank: int) -> None:
    """Say at the begin what is not protected as well as it could be."""
    if alone:
        warn(
            f"rank {rank} is the only holder of its state, as far as is known (parallel mode "
            f"{ms.get_auto_parallel_context('parallel_mode')!r}): if its process is killed, nothing of the "
            "job after the last periodic checkpoint is left"
        )
    if installed.missing:
        warn(
            f"the clock is not in the optimizer ({installed.missing}): the state can be saved only between "
            "steps, not when one is interrupted"
        )
    if params.get("dataset_sink_mode") and int(params.get("sink_size", 1) or 1) != 1:
        warn(
            "data are sunk, sink_size is not 1: steps within a sink cannot be seen, so the state is that of "
            "the sink's end"
        )


def _no_content() -> Content:
    raise ConfigError("periodic checkpoints are ModelCheckpoint's")
