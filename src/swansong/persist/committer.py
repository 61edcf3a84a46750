"""What a controller has the store do: a place for parts, one checkpoint of them, a report."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from swansong.engine.storekeeper import StoreCalls
from swansong.errors import LoadError, SaveError
from swansong.persist import places
from swansong.persist.incidents import Timing, document
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind
from swansong.store import naming, parts
from swansong.store.checkpoint import Kind, Point, new_id, short
from swansong.store.crypt import Key
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, Staged
from swansong.store.series import Series

GENERATION: Final = 0
"""In the names of parts: each incident of each controller has a place of its own, so one is enough."""

_KINDS: Final[dict[FaultKind, Kind]] = {FaultKind.SIGNALLED: "preemption", FaultKind.REQUESTED: "requested"}
"""By what began the incident; anything else leaves a "fault"."""


@dataclass(slots=True)
class _Open:
    """The place of an incident under way."""

    staged: Staged
    resources: ExitStack
    """Holds the place; what is left in it goes when this closes."""
    since: float
    """When it was made, monotonic."""


class Committer:
    """The store's side of a controller. All calls come from one thread."""

    def __init__(self, series: Series, *, world_size: int, key: Key | None, resume_command: str) -> None:
        """`resume_command` is told in reports: what starts the job again."""
        self._series, self._world_size, self._key = series, world_size, key
        self._resume_command = resume_command
        self._open: dict[str, _Open] = {}
        self._timings: dict[str, Timing] = {}

    @property
    def calls(self) -> StoreCalls:
        """What the engine needs."""
        return StoreCalls(prepare=self.prepare, commit=self.commit, discard=self.discard, report=self.report)

    def prepare(self, incident: str, step: int) -> None:
        """Make the place of an incident's parts, if it is not there. Raises SaveError."""
        if incident in self._open:
            return
        resources = ExitStack()
        identity = places.checkpoint_id(incident)
        staged = resources.enter_context(parts.staged(self._series, self._series.stem, identity=identity))
        self._open[incident] = _Open(staged, resources, time.monotonic())

    def commit(self, order: m.Commit) -> str:
        """Make a checkpoint of an incident's parts, durably; return its path.

        A checkpoint that this run has committed at that step already is as good. Raises SaveError.
        """
        began = time.monotonic()
        path = self._committed(order.step)
        if path is None:
            path = self._commit(order)
        opened = self._open.get(order.incident)
        if opened is not None:
            self._timings[order.incident] = Timing(
                save_s=began - opened.since, commit_s=time.monotonic() - began
            )
        self.discard(order.incident)
        return str(path)

    def discard(self, incident: str) -> None:
        """Remove an incident's place and what is left in it."""
        opened = self._open.pop(incident, None)
        if opened is not None:
            opened.resources.close()

    def report(self, report: m.Report) -> None:
        """Write an incident's report, durably. Raises OSError."""
        self.discard(report.incident)
        timing = self._timings.pop(report.incident, Timing())
        data = document(report, timing, inexact=self._inexact(report), resume_command=self._resume_command)
        space, files = self._series.space, self._series.space.files
        target = places.incident_file(self._series.directory, report.incident)
        files.ensure_directory(target.parent, 0o700)
        with space.reserve(target.name, short(new_id())) as place:
            files.write_small(place, data)
            files.rename(place, target)
        files.sync_directory(target.parent)

    def _commit(self, order: m.Commit) -> Path:
        opened = self._open.get(order.incident)
        if opened is None:
            raise SaveError(f"incident {order.incident}: not saved: no place was prepared for its parts")
        staged = replace(opened.staged, name=self._free_name(order.step))
        wanted = [PartId(GENERATION, attempt, rank) for attempt, rank, _ in order.parts]
        point = Point(step=order.step, world_size=self._world_size)
        kind = _KINDS.get(order.cause, "fault")
        seq = self._series.draw()
        return parts.commit_parts(staged, wanted, point, kind=kind, seq=seq, key=self._key).path

    def _committed(self, step: int) -> Path | None:
        """The checkpoint of this run at a step, if there is one."""
        for found in self._series.found():
            manifest = found.manifest
            if manifest is not None and (manifest.run, manifest.step) == (self._series.run, step):
                return found.path
        return None

    def _free_name(self, step: int) -> str:
        number = 0
        while True:
            name = naming.step_name(self._series.stem, step, number)
            if not os.path.lexists(self._series.directory / name):
                return name
            number += 1

    def _inexact(self, report: m.Report) -> list[dict[str, object]]:
        if report.path:
            with suppress(LoadError), open_checkpoint(Path(report.path), key=self._key) as checkpoint:
                if checkpoint.manifest is not None:
                    return [dict(entry) for entry in checkpoint.manifest.inexact]
        return []
