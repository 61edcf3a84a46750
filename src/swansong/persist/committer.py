"""What a controller has the store do: a place for parts, one checkpoint of them, a report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from swansong.engine.recorder_reading import Recorded
from swansong.engine.recorders import HostRecorders
from swansong.engine.storekeeper import StoreCalls
from swansong.errors import LoadError, SaveError
from swansong.persist import places
from swansong.persist.boundary import TENSORS, Assembled, assemble
from swansong.persist.incidents import document
from swansong.persist.loading import structures, structures_in
from swansong.persist.rank_files import RankFiles
from swansong.persist.records import from_objects, recorded_on
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind
from swansong.state.tensors import HostTensor
from swansong.store import naming, parts
from swansong.store.checkpoint import Content, Kind, Point, new_id, short
from swansong.store.crypt import Key
from swansong.store.merging import Taken
from swansong.store.opening import open_checkpoint
from swansong.store.parts import Objects, PartId, Staged
from swansong.store.series import Series
from swansong.store.writer import Writer

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


class Committer:
    """The store's side of a controller. All calls come from one thread."""

    def __init__(
        self,
        series: Series,
        host: HostRecorders,
        *,
        world_size: int,
        key: Key | None,
        resume_command: str,
        rank_files: RankFiles | None = None,
    ) -> None:
        """`host` has the records of ranks on this host; `resume_command`, told in reports, starts the job.

        `rank_files` says how a checkpoint lies on disk; None: as a native directory.
        """
        self._series, self._host, self._world_size, self._key = series, host, world_size, key
        self._resume_command, self._rank_files = resume_command, rank_files
        self._open: dict[str, _Open] = {}

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
        self._open[incident] = _Open(staged, resources)

    def commit(self, order: m.Commit) -> str:
        """Make a checkpoint of an incident's parts, durably; return its path.

        A checkpoint that this run has committed at that step already is as good. Raises SaveError.
        """
        path = self._committed(order.step)
        if path is None:
            path = self._commit(order)
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
        data = document(
            report,
            self._remains(report),
            inexact=self._inexact(report),
            resume_command=self._resume_command,
            stem=self._series.stem,
            run=self._series.run,
        )
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
        wanted = {PartId(GENERATION, attempt, rank): set(keys) for attempt, rank, keys in order.parts}
        taken = parts.read_parts(staged, wanted, key=self._key)
        gathered = self._gathered(taken, order.step)
        files = self._rank_files
        if gathered.tensors:
            taken += self._add_part(staged, gathered.tensors, order)
        point = Point(step=order.step, boundary_step=gathered.boundary_step, world_size=self._world_size)
        return parts.commit_parts(
            staged,
            taken,
            point if files is None else files.point(point),
            kind=_KINDS.get(order.cause, "fault"),
            seq=self._series.draw() if files is None else files.draw(self._series),
            key=self._key,
            objects=_objects(gathered, order, taken),
            names=None if files is None else files.file_names(order.step),
        ).path

    def _gathered(self, taken: Sequence[Taken], step: int) -> Assembled:
        """The boundary state of all ranks: as parts have it, or else as this host's recorders do."""
        records = recorded_on(self._host, step)
        for one in taken:
            records |= from_objects(one.part.objects)
        gathered = assemble(records, world_size=self._world_size, step=step)
        if self._rank_files is None:
            return gathered
        # They are in the savers' files, which say what of them is inexact.
        exact = tuple(entry for entry in gathered.inexact if entry.get("what") != TENSORS)
        return replace(gathered, tensors={}, inexact=exact)

    def _add_part(self, staged: Staged, tensors: Mapping[str, HostTensor], order: m.Commit) -> list[Taken]:
        """Write boundary tensors, as one more part."""
        attempt = 1 + max(attempt for attempt, _, _ in order.parts)
        part = PartId(GENERATION, attempt, 0)
        content = Content(tensors=tensors)
        with closing(Writer(self._series.space.files)) as writer:
            parts.write_part(staged.place, staged.id, writer, content, part, key=self._key)
        return parts.read_parts(staged, {part: None}, key=self._key)

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
            if self._rank_files is not None:
                name = self._rank_files.name(step, number)
            else:
                name = naming.step_name(self._series.stem, step, number)
            if not os.path.lexists(self._series.directory / name):
                return name
            number += 1

    def _remains(self, report: m.Report) -> dict[int, Recorded]:
        """What the recorders of this host say of the ranks that did not report."""
        found = {rank: self._host.read(rank) for rank in self._host.ranks() if rank not in report.reports}
        return {rank: recorded for rank, recorded in found.items() if recorded is not None}

    def _inexact(self, report: m.Report) -> list[dict[str, object]]:
        if report.path:
            with suppress(LoadError), open_checkpoint(Path(report.path), key=self._key) as checkpoint:
                if checkpoint.manifest is not None:
                    return [dict(entry) for entry in checkpoint.manifest.inexact]
        return []


def _objects(gathered: Assembled, order: m.Commit, taken: Sequence[Taken]) -> Objects:
    """What the manifest says besides tensors, in the form that single writers give it, too."""
    taken_keys = {key for _, _, keys in order.parts for key in keys}
    parts_states = [structures_in((one.part.objects or {}).get("state")) for one in taken]
    states = {key: of for found in parts_states for key, of in found.items() if key in taken_keys}
    return Objects(
        objects={"state": structures(states), "extra": gathered.shared},
        rank_objects={str(rank): {"state": None, "extra": own} for rank, own in gathered.own.items()},
        inexact=[entry for one in taken for entry in one.part.inexact]
        + [dict(entry) for entry in gathered.inexact],
        components=[{"key": key, "rank": rank} for _, rank, keys in order.parts for key in keys],
        append_info=parts.first_appended(taken),
    )
