"""Checkpoints by policy, for loops that count steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from swansong.config import AsyncMode
from swansong.persist.saver import OnError, Request, Saver
from swansong.policy.keep import KeepPolicy
from swansong.policy.save import Never, SavePoint, SavePolicy
from swansong.store import naming
from swansong.store.checkpoint import Content, Kind, Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.series import Series


class Schedule:
    """When checkpoints are due. The same on all ranks, unless the policy looks at the time."""

    def __init__(self, policy: SavePolicy, start: int) -> None:
        """`start` is the step at which the run begins."""
        self.policy, self._start = policy, start
        self._asked_step, self._asked_s = start, time.monotonic()

    def due(self, step: int) -> bool:
        """True if the policy wants this step, and no save of it was asked for."""
        at = SavePoint(
            step=step,
            last_saved_step=self._asked_step,
            now_s=time.monotonic(),
            last_saved_s=self._asked_s,
        )
        return step != self._asked_step and self.policy.wants(at)

    def asked(self, step: int) -> None:
        """A save of this step begins."""
        self._asked_step, self._asked_s = step, time.monotonic()

    def wants_end(self, step: int) -> bool:
        """True if the last step is to be saved at all, even if no save of it was due."""
        return step != self._start and not isinstance(self.policy, Never)

    @property
    def last(self) -> int:
        """The step of which a save was asked for last."""
        return self._asked_step


class Periodic:
    """Saves native directories named after their step, at once or in the background; prunes after each."""

    def __init__(
        self,
        series: Series,
        save_policy: SavePolicy,
        keep_policy: KeepPolicy,
        *,
        key: Key | None,
        start: int,
        world_size: int,
        background: AsyncMode | None = None,
        on_error: OnError = "raise",
    ) -> None:
        """`start` is the step at which the run begins."""
        self._series, self._world_size = series, world_size
        options = SaveOptions(container="directory", key=key)
        self._saver = Saver(
            series.space.files, keep_policy, options, background=background, on_error=on_error
        )
        self._schedule = Schedule(save_policy, start)

    def due(self, step: int) -> bool:
        """True if the policy wants this step, and it is not saved, nor was to be."""
        return self._schedule.due(step)

    def missing_at_end(self, step: int) -> bool:
        """True if the last step is yet to be saved; under a policy that never saves, it is not to be."""
        return step != self._saver.step and self._schedule.wants_end(step)

    def save(self, content: Callable[[], Content], step: int, kind: Kind) -> None:
        """Save, or begin to, with nothing half-made visible, whatever happens.

        Raises SaveError, unless that is to be warned of, of this save or of the one in the background before.
        """
        self._schedule.asked(step)
        name = naming.step_name(self._series.stem, step)

        def request() -> Request:
            point = Point(step=step, world_size=self._world_size)
            return Request(series=self._series, name=name, content=content(), point=point, kind=kind)

        self._saver.save(request)

    def poll(self) -> None:
        """Raise the error of a background save that has failed meanwhile, or warn of it."""
        self._saver.poll()

    def wait(self) -> Path | None:
        """Wait for the save under way; the newest checkpoint that is on disk. Raises as `poll` does."""
        self._saver.wait()
        return self._saver.latest

    def close(self) -> None:
        """Wait for the save under way, and give memory back. Raises its error, or warns of it."""
        try:
            self._saver.wait()
        finally:
            self._saver.close()
