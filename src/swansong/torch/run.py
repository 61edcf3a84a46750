"""A protected training loop in PyTorch, as `protect` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from swansong.engine.clock import UpdateClock
from swansong.errors import ConfigError, NotSupportedError
from swansong.persist.boundary import BoundaryState, Record, own_of
from swansong.persist.loading import Kept, structures
from swansong.persist.periodic import Schedule
from swansong.persist.rank import LiveComponent
from swansong.persist.session import Cells, Plan, Session, warn, went_well
from swansong.policy.save import EverySteps, Never
from swansong.state.components import component_key
from swansong.state.leaves import Json
from swansong.state.tree import Flat
from swansong.store.checkpoint import Content
from swansong.store.opening import Checkpoint
from swansong.torch.loading import restored
from swansong.torch.moved import Moved
from swansong.torch.on_device import OnDevice
from swansong.torch.position import NOT_POSITIONED, Feed
from swansong.torch.ranks import Ranks
from swansong.torch.state import TrainingState
from swansong.torch.updates import Updates

_CHECKED_EVERY = 100
"""Steps between looks at whether the optimizers still update the model's parameters."""


class Run:
    """One run of one loop; a context manager around it. For the thread that trains."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        state: TrainingState,
        updates: Updates,
        moved: Moved,
        feed: Feed | None,
        placement: str | None,
        device: torch.device | None = None,
    ) -> None:
        """See `protect`. `device` has the parameters, if it is not the CPU."""
        self._plan, self._ranks, self._state, self._updates = plan, ranks, state, updates
        self._moved, self._feed, self._placement = moved, feed, placement
        self._component = component_key(state.shapes(), placement=placement, rank=plan.rank)
        self._session = Session(plan, self._content)
        self._schedule: Schedule | None = None
        self._clock = UpdateClock(self._component)
        self._device = OnDevice(device, state.live) if device is not None and plan.controlled else None
        self._last: bytes | None = None
        """As recorded at the last boundary."""
        self._told: bytes | None = None
        """As recorded provisionally since."""
        self._forward: Any = None
        self._said_unseen = False
        self._recorded = False
        """What the loop moves goes into a flight recorder."""
        self._positioned = feed is None
        """Where the loop is in its data is known, or it was said that it is not."""
        self.inexact: list[str] = []
        """After `resume`: what is not exactly as it was, each with its reason."""

    def __enter__(self) -> Self:
        if self._plan.controlled and self._placement is None:
            warn(
                f"rank {self._plan.rank} is the only holder of its model and optimizer, as far as is known "
                "(no DistributedDataParallel, no replicas=): if its process is killed, nothing of the job "
                "after the last periodic checkpoint is left"
            )
        self._updates.attach(self._begin_if_need_be)
        self._forward = self._state.model.register_forward_hook(self._forwarded)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if went_well(error) and self._updates.pending:  # the loop was left before the next batch
                self.step_end()
        except BaseException as failure:
            self._session.end(failure)
            raise
        else:
            self._end(error)
        finally:
            self._forward.remove()
            self._updates.detach()
            if self._device is not None:
                self._device.close()

    # -- what can be asked ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps completed since the start of training; a step that a scaler left out counts."""
        return self._session.step

    @property
    def skipped_steps(self) -> int:
        """How many of these a gradient scaler left out."""
        return self._moved.progress.skipped

    @property
    def epoch(self) -> int:
        """The epoch of the next batch or, at its end, of the last one; from 1. Needs `loader`."""
        return self._fed().epoch

    @property
    def protected(self) -> bool:
        """True if the state would be saved if something went wrong now; soon after all ranks have begun."""
        return self._session.protected

    # -- the loop -------------------------------------------------------------------------------------

    def resume(self, *, allow_fresh: bool = False, allow_reshuffle: bool = False) -> int:
        """Take up the newest checkpoint that verifies, on all ranks; return its step, 0 if there is none.

        Before anything else. Parameters, optimizers, and all else that was given are set in place; generators
        when the first batch is asked for. Raises DamagedError if there are checkpoints and none is usable
        (unless `allow_fresh`), CrashLoopError, LoadError if it does not fit. If the data come in another
        order then, the first batch raises ConfigError, unless `allow_reshuffle`.
        """
        if self._session.begun:
            raise ConfigError("resume: comes first, before batches, updates and saves")
        self._begin(resuming=True, allow_fresh=allow_fresh, allow_reshuffle=allow_reshuffle)
        return self.step

    def batches(self, epochs: int | None = None) -> Iterator[Any]:
        """The batches that are left of the present epoch or, with `epochs`, (epoch, batch) up to that one.

        Asking for the next batch ends the step. Epochs are counted from 1.
        """
        if epochs is not None:
            for epoch in self.epochs(epochs):
                for batch in self.batches():
                    yield epoch, batch
            return
        feed = self._fed()
        self._begin_if_need_be()
        if self._updates.pending:  # the loop has left the epoch before its end
            feed.leave()
            self._end_pending()
        seen, taken = self._updates.seen, 0
        for batch in feed.batches():
            taken += 1
            yield batch
            self._end_pending()
        if taken and self._updates.seen == seen:
            self._warn_unseen(f"an epoch of {taken} batches has gone by")

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left up to number `count`, for loops with work between them."""
        feed = self._fed()
        self._begin_if_need_be()
        for epoch in feed.epochs(count):
            self._end_pending()  # of an epoch that the loop has left before its end
            yield epoch
        self._end_pending()

    def step_end(self) -> None:
        """The step is complete. For loops that do not take their batches from this run.

        Without an update since the last one, nothing happens. Raises TrainingInterrupted once the job ends.
        """
        self._begin_if_need_be()
        self._end_pending()

    def save(self) -> Path | None:
        """Save now; to be called on all ranks. The path, on rank 0. Raises SaveError.

        This ends the step, as `step_end` does: what the loop moves until the next is not in there.
        """
        if self._schedule is None and self._plan.config is None:
            raise NotSupportedError("save: needs a config (or save=), which says what to keep")
        self.step_end()
        if self._schedule is not None:
            self._schedule.asked(self.step)
        if self._plan.rank != 0:
            self._gather()
        return self._session.save()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around work that is no step, such as evaluation: no lack of progress in there is a stall."""
        self._begin_if_need_be()
        return self._session.phase(name)

    def persist_and_stop(self) -> None:
        """Have the state of all ranks saved and the job ended, with exit code 0.

        This ends the step, as `step_end` does. Raises TrainingInterrupted, here and on the other ranks; let
        it pass.
        """
        self.step_end()
        self._session.persist_and_stop()

    # -- boundaries -----------------------------------------------------------------------------------

    def _end_pending(self) -> None:
        if not self._updates.pending:
            return
        if self._updates.boundary():
            self._moved.progress.skipped += 1
        if not self._positioned:
            self._check_position()
        step = self._session.step + 1
        if step % _CHECKED_EVERY == 1:
            self._state.check()
        payload = self._moved.boundary()
        due = self._schedule is not None and self._due(step)
        self._last = self._told if payload is None else payload
        if due and self._plan.rank != 0:
            self._gather()
        if self._device is not None:
            self._device.boundary()
        self._session.boundary(payload, due=due)

    def _check_position(self) -> None:
        self._positioned = True
        if not self._fed().begun:
            warn(NOT_POSITIONED)

    def _due(self, step: int) -> bool:
        """Whether a checkpoint is due, on which all ranks agree: what it takes of each is gathered."""
        schedule = self._schedule
        if schedule is None:
            return False
        due = schedule.due(step)
        if self._ranks.size > 1 and not isinstance(schedule.policy, EverySteps | Never):
            due = self._ranks.word_of_0(due)
        if due:
            schedule.asked(step)
        return due

    def _forwarded(self, module: nn.Module, args: Any, output: Any) -> None:
        """The root module's forward pass is done, and with it everything random in a step, as a rule."""
        if module.training and self._recorded:
            session = self._session
            self._told = self._moved.provisional(None if self._last is None else session.step)
            session.provisional(self._told)

    def _gather(self) -> dict[int, Json]:
        """What each rank has of its own, on rank 0."""
        payloads = self._ranks.gather(own_of(self._last or self._moved.capture()))
        states = {rank: Record(0, False, payload).state() for rank, payload in enumerate(payloads)}
        return {rank: state.own for rank, state in states.items() if state is not None}

    def _content(self) -> Content:
        """What a periodic checkpoint of this moment consists of, on rank 0."""
        own = self._gather()
        live = self._state.live()
        state = Record(self.step, False, self._last or self._moved.capture()).state() or BoundaryState()
        return Content(
            tensors=live.tensors | state.host_tensors(),
            aliases=live.aliases,
            skeleton=structures({self._component: live.skeleton}),
            extra=state.shared,
            rank_objects=own,
        )

    # -- beginning and end ----------------------------------------------------------------------------

    def _begin_if_need_be(self) -> None:
        if not self._session.begun:
            self._begin(resuming=False)

    def _begin(self, *, resuming: bool, allow_fresh: bool = False, allow_reshuffle: bool = False) -> None:
        plan = self._plan
        with Kept(Checkpoint.map_all) as kept:
            facts = self._session.agree(resuming=resuming, allow_fresh=allow_fresh, examine=kept.examine)
            if facts.checkpoint is not None:
                saved = restored(kept.open(Path(facts.checkpoint), plan.key), self._component, plan.rank)
                reasons = self._moved.restore(saved, allow_reshuffle=allow_reshuffle)
                self.inexact = [*saved.inexact, *reasons]
            for reason in self.inexact:
                warn(f"resumed at step {facts.step}, not exactly: {reason}")
        if plan.config is not None:
            self._schedule = Schedule(plan.config.save_policy, facts.step)

        def components(cells: Cells) -> tuple[LiveComponent, ...]:
            key, device = self._component, self._device
            live: Callable[[], Flat] = self._state.live
            behind = self._state.behind
            if device is None:
                clock = UpdateClock(key, step=facts.step, cells=cells.get(key))
            else:
                clock, live = device.begin(key, facts.step, cells.get(key)), device.show
            self._clock = clock
            return (
                LiveComponent("model and optimizer", clock, live, behind if self._state.averages else None),
            )

        self._session.begin(facts, [self._component], components)
        self._updates.use(self._clock, self._session.gate)
        self._recorded = self._session.gate is not None

    def _end(self, error: BaseException | None) -> None:
        if went_well(error):
            if not self._updates.seen and not self.step:
                self._warn_unseen("training has ended")
            if self._unsaved() and self._plan.rank != 0:
                self._gather()
        else:
            self._updates.abandon()
        self._session.end(error)

    def _unsaved(self) -> bool:
        """Whether the last step is to be saved, on which all ranks agree."""
        schedule, step = self._schedule, self.step
        if schedule is None:
            return False
        if self._plan.on_error == "warn" and self._ranks.size > 1:  # only rank 0 knows what has failed
            return self._ranks.word_of_0(self._session.unsaved)
        return schedule.last != step and schedule.wants_end(step)

    def _warn_unseen(self, when: str) -> None:
        if not self._said_unseen:
            self._said_unseen = True
            warn(
                f"{when}, and no update was seen: nothing is saved that way. Are the optimizers given to "
                "protect() those whose step() the loop calls?"
            )

    def _fed(self) -> Feed:
        if self._feed is None:
            raise ConfigError("batches: give protect() the loader")
        return self._feed
