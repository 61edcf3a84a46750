"""A save, and what it removes: what threads and the writer process do in the same way."""

from __future__ import annotations

from dataclasses import dataclass

from swansong.policy.keep import KeepPolicy
from swansong.store.checkpoint import Content, Kind, Point, Saved, SaveOptions
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One checkpoint to be saved."""

    series: Series
    name: str
    """The file's full name, or the directory's."""
    content: Content
    point: Point
    kind: Kind
    seq: int
    """Drawn when the content was captured."""
    options: SaveOptions
    keep: KeepPolicy | None
    """What older ones stay; None: nothing is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A checkpoint that is on disk."""

    saved: Saved
    unpruned: str | None
    """Why older checkpoints are still there, though they should have gone."""


def carry_out(task: Task, writer: Writer) -> Done:
    """Save, then remove what need not stay. Raises what `saving.save` does."""
    saved = save(
        task.series,
        writer,
        task.name,
        task.content,
        task.point,
        kind=task.kind,
        seq=task.seq,
        options=task.options,
    )
    unpruned = prune(task.series, task.keep, saved) if task.keep is not None else None
    return Done(saved=saved, unpruned=unpruned)


def prune(series: Series, keep: KeepPolicy, newest: Saved) -> str | None:
    """Remove what `keep` lets go; why that failed, since it is no reason to call the save a failure."""
    try:
        series.prune(keep, newest.id)
    except OSError as error:
        return str(error)
    return None
