"""Checkpoints by policy, for loops that count steps: one writer, at once, old ones pruned after each."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from swansong.errors import SwansongWarning
from swansong.policy.keep import KeepPolicy
from swansong.policy.save import Never, SavePoint, SavePolicy
from swansong.store import naming
from swansong.store.checkpoint import Content, Kind, Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer, save_error


class Periodic:
    """Saves native directories named after their step."""

    def __init__(
        self,
        series: Series,
        save_policy: SavePolicy,
        keep_policy: KeepPolicy,
        *,
        key: Key | None,
        start: int,
        world_size: int,
    ) -> None:
        """`start` is the step at which the run begins."""
        self._series, self._save_policy, self._keep_policy = series, save_policy, keep_policy
        self._world_size = world_size
        self._options = SaveOptions(container="directory", key=key)
        self._writer = Writer(series.space.files)
        self._saved_step, self._saved_s = start, time.monotonic()

    def due(self, step: int) -> bool:
        """True if the policy wants this step, and it is not saved."""
        at = SavePoint(
            step=step,
            last_saved_step=self._saved_step,
            now_s=time.monotonic(),
            last_saved_s=self._saved_s,
        )
        return step != self._saved_step and self._save_policy.wants(at)

    def missing_at_end(self, step: int) -> bool:
        """True if the last step is yet to be saved; under a policy that never saves, it is not to be."""
        return step != self._saved_step and not isinstance(self._save_policy, Never)

    def save(self, content: Content, step: int, kind: Kind) -> Path:
        """Save, durably, then prune. Raises SaveError with nothing half-made visible."""
        began = time.monotonic()
        name = naming.step_name(self._series.stem, step)
        try:
            seq = self._series.draw()
        except OSError as error:
            raise save_error(error, self._series.directory / name, content.nbytes) from error
        point = Point(step=step, world_size=self._world_size)
        saved = save(
            self._series, self._writer, name, content, point, kind=kind, seq=seq, options=self._options
        )
        self._saved_step, self._saved_s = step, began
        try:
            self._series.prune(self._keep_policy, saved.id)
        except OSError as error:
            warnings.warn(
                f"{saved.path}: saved, but older checkpoints could not be removed: {error}",
                SwansongWarning,
                stacklevel=4,
            )
        return saved.path

    def close(self) -> None:
        """Give memory back."""
        self._writer.close()
