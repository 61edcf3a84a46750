"""Where a protected run begins: what rank 0 finds out of series and place, for all ranks."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mindspore as ms
import msgspec
import numpy as np
from mindspore import ParallelMode

from swansong.engine.address import Address
from swansong.errors import ConfigError
from swansong.mindspore.callback import ModelCheckpoint
from swansong.mindspore.position import Counters, Resumption, steps_per_epoch
from swansong.mindspore.ranks import Ranks
from swansong.persist import crash_loop
from swansong.persist.job import JobFacts, SeriesFacts
from swansong.persist.launch import is_local
from swansong.persist.rank_files import RankFiles
from swansong.store.checkpoint import Mode
from swansong.store.files import Files
from swansong.store.series import Series
from swansong.store.workspace import Workspace

SERIES: Final = "ttp"
"""Of a job without a ModelCheckpoint."""
_HALF: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What this rank knows of the place where `Model.train` begins."""

    step: int
    """Completed when it began."""
    epoch: int
    """Of the next step, from 1."""
    before: int
    """Steps of that epoch that were completed before."""
    steps_per_epoch: int
    resumed: Resumption | None

    @classmethod
    def of(cls, params: Any, counters: Counters, resumed: Resumption | None, *, done: int) -> Begin:
        """`done` is MindSpore's count of steps when it began."""
        per_epoch = steps_per_epoch(params)
        return cls(
            step=done + counters.step_offset,
            epoch=int(params.cur_epoch_num) + counters.epoch_offset,
            before=done % per_epoch,
            steps_per_epoch=per_epoch,
            resumed=resumed,
        )


def shared_incarnation(ranks: Ranks) -> bytes:
    """16 random bytes that rank 0 draws. All ranks must call it."""
    drawn = np.frombuffer(secrets.token_bytes(2 * _HALF), "<i8")
    first = ranks.gather([int(half) for half in drawn])[0]
    return np.array(first, "<i8").tobytes()


def placement(world_size: int) -> str | None:
    """Who holds equal state, as far as is known: all ranks of a data-parallel job; None: nobody else."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    sharded = bool(ms.get_auto_parallel_context("enable_parallel_optimizer"))
    return "data parallel" if mode == ParallelMode.DATA_PARALLEL and not sharded and world_size > 1 else None


def facts(
    directory: Path,
    callbacks: Iterable[Any],
    begin: Begin,
    *,
    address: Address,
    world_size: int,
    run: str,
    mode: Mode,
    crash_loop_limit: int,
    inexact: tuple[Mapping[str, Any], ...],
) -> JobFacts:
    """What rank 0 tells all. The series is that of the first ModelCheckpoint. Raises OSError, SaveError.

    ConfigError if this machine does not have the controller's address.
    """
    if not is_local(address):
        raise ConfigError(
            f"controller address {address}: this machine has no such address; the controller runs on the "
            "host of rank 0, whose address is wanted here"
        )
    series, numbered_in = _series(directory, callbacks, begin.resumed, Files())
    with suppress(OSError):
        series.sweep()
    files = RankFiles(
        steps_per_epoch=begin.steps_per_epoch,
        first_step=begin.step - begin.before,
        first_epoch=begin.epoch - 1,
        numbered_in=str(numbered_in),
        mode=mode,
        own=world_size > 1 and placement(world_size) is None,
        inexact=tuple({name: str(value) for name, value in entry.items()} for entry in inexact),
    )
    loop = None
    if begin.resumed is not None:
        loop = crash_loop.look_for(directory, series.stem, step=begin.step, limit=crash_loop_limit)
    return JobFacts(
        world_size=world_size,
        series=msgspec.structs.replace(SeriesFacts.of(replace(series, run=run)), rank_files=files),
        checkpoint=str(begin.resumed.found.path) if begin.resumed is not None else None,
        step=begin.step,
        resume_command=shlex.join(sys.orig_argv),
        crash_loop=loop,
    )


def check(told: JobFacts, begin: Begin) -> None:
    """Compare with where this rank begins. Raises ConfigError."""
    if told.step != begin.step:
        raise ConfigError(
            f"training begins at step {told.step} on rank 0, but at step {begin.step} here; resume all "
            "ranks, or none"
        )


def _series(
    directory: Path, callbacks: Iterable[Any], resumed: Resumption | None, files: Files
) -> tuple[Series, Path]:
    """The series that a fault's checkpoint belongs to, in `directory`, and where its numbers are drawn."""
    for callback in callbacks:
        periodic = callback.series() if isinstance(callback, ModelCheckpoint) else None
        if periodic is not None:
            space = Workspace(directory, files)
            space.prepare()
            return replace(periodic, space=space), periodic.directory
    if resumed is not None:
        return Series.resumed(resumed.found, files, directory=directory), directory
    return Series.fresh(directory, SERIES, files), directory
