"""A fault's checkpoint as MindSpore's users know it: one .ckpt of a whole component from each saver.

Names are by epoch and step in epoch, and what moves outside of updates stands in the file itself, since who
loads it by path reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from swansong.persist import boundary
from swansong.persist.boundary import Record
from swansong.store import naming
from swansong.store.checkpoint import Content, Mode, Point
from swansong.store.merging import FileNames
from swansong.store.series import Series
from swansong.store.workspace import Workspace

_Count = Annotated[int, msgspec.Meta(ge=0)]


class RankFiles(msgspec.Struct, frozen=True, kw_only=True):
    """How such checkpoints are called, numbered and encrypted."""

    steps_per_epoch: Annotated[int, msgspec.Meta(ge=1)]
    first_step: int = 0
    """The step after which the first epoch of this run began (or would have, where it goes on in one)."""
    first_epoch: _Count = 0
    """Epochs that are counted before that one."""
    numbered_in: str
    """Directory of the series whose numbers they get, in order with its other checkpoints."""
    own: bool = False
    """True: no two ranks hold the same, though their tensors have the same names."""
    inexact: tuple[dict[str, str], ...] = ()
    """What no checkpoint of this job gives back exactly, each with its reason."""
    mode: Mode = "AES-GCM"
    """Of the cipher, with a key."""

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, step in epoch) of a step, both from 1."""
        epochs, before = divmod(step - self.first_step - 1, self.steps_per_epoch)
        return self.first_epoch + epochs + 1, before + 1

    def name(self, step: int, number: int) -> str:
        """The directory's; `number` tells it from others of that step."""
        return naming.fault_name(*self.place(step), number)

    def file_names(self, step: int) -> FileNames:
        """What its files are called."""
        return lambda rank, number, _: naming.rank_file(rank, number, *self.place(step))

    def point(self, point: Point) -> Point:
        """`point` with its place in the epoch."""
        epoch, step_in_epoch = self.place(point.step)
        return replace(point, epoch=epoch, step_in_epoch=step_in_epoch)

    def draw(self, series: Series) -> int:
        """The next number, for a checkpoint of `series`. Raises OSError."""
        floor = max((f.manifest.seq for f in series.found() if f.manifest is not None), default=0)
        space = Workspace(Path(self.numbered_in), series.space.files)
        space.prepare()
        return replace(series, space=space, floor=max(series.floor, floor)).draw()

    def whole(self, content: Content, records: Mapping[int, Record], step: int, rank: int) -> Content:
        """What `rank` writes: its components, and with them what `records` say of their surroundings."""
        if self.own:
            records = {of: record for of, record in records.items() if of == rank}
        tensors, reason = boundary.tensors(records, step, authority=rank if self.own else 0)
        components = {key: list(names) for key, names in content.components.items()}
        first = next(iter(components))
        held = {name for names in components.values() for name in names}
        components[first] += [name for name in tensors if name not in held]
        inexact: tuple[Mapping[str, str], ...] = self.inexact
        if reason:
            inexact += ({"what": boundary.TENSORS, "reason": reason},)
        return replace(
            content,
            tensors={**content.tensors, **tensors},
            components=components,
            scope=f"{naming.rank_directory(rank)}/" if self.own else "",
            inexact=(*content.inexact, *inexact),
            append_info={
                name: value
                for name, value in self._append_info(step, rank).items()
                if name not in content.tensors
            },
        )

    def _append_info(self, step: int, rank: int) -> dict[str, int]:
        """As MindSpore's own adapter appends it."""
        epoch, step_in_epoch = self.place(step)
        counted = (epoch, step_in_epoch, rank, self.steps_per_epoch, step)
        return dict(zip(_APPENDED, counted, strict=True))


_APPENDED: Final = ("cur_epoch_num", "cur_step_num", "cur_rank", "batch_num", "global_step")
