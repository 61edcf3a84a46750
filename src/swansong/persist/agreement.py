"""How the processes of one start of a job come to agree on where it begins: rank 0 finds out, and tells."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swansong.engine.token import job_token
from swansong.errors import ConfigError, SwansongError
from swansong.persist import job, series_choice
from swansong.persist.job import JobFacts, JobRefused
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.latest import Examine
from swansong.store.verify import usable
from swansong.store.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job, as a rank sees it."""

    directory: Path
    """Of the checkpoints, absolute."""
    prefix: str
    incarnation: bytes
    rank: int
    world_size: int
    controlled: bool
    """True if there is, or will be, a controller."""
    key: Key | None
    crash_loop_limit: int
    """0: no limit."""
    patience_s: float
    """How long rank 0 is waited for."""
    await_former: Callable[[], object]
    """Waits for the controller of an earlier start, whose checkpoint is to be found. Called on rank 0."""
    examine: Examine = usable
    """Finds out whether a checkpoint is sound. Called on rank 0."""


def agree(start: Start, files: Files, *, resuming: bool, allow_fresh: bool) -> JobFacts:
    """What all ranks begin with. Each rank calls it, with the same `resuming`.

    Raises DamagedError if there are checkpoints and none is usable (unless `allow_fresh`), CrashLoopError,
    UnreachableError if rank 0 said nothing in time, LoadError if it cannot begin, ConfigError if the ranks
    do not agree, OSError.
    """
    facts = agree_on(start, files, lambda: _found(start, files, resuming, allow_fresh))
    if facts.checkpoint is not None and not resuming:
        raise ConfigError("resume: rank 0 called it, so every rank must, before anything else")
    return facts


def agree_on(start: Start, files: Files, find: Callable[[], JobFacts]) -> JobFacts:
    """What rank 0 finds, for all ranks. Each rank calls it; `find` is called on rank 0.

    Raises what `find` raises, CrashLoopError, UnreachableError if rank 0 said nothing in time, LoadError if
    it cannot begin, ConfigError for another world size, OSError.
    """
    facts = _decide(start, files, find) if start.rank == 0 else _learn(start)
    if facts.crash_loop is not None:
        raise facts.crash_loop.error()
    return facts


def _learn(start: Start) -> JobFacts:
    facts = job.learn(start.directory, start.incarnation, timeout_s=start.patience_s)
    if facts.world_size != start.world_size:
        raise ConfigError(f"world_size: rank 0 has {facts.world_size}, this rank {start.world_size}")
    return facts


def _decide(start: Start, files: Files, find: Callable[[], JobFacts]) -> JobFacts:
    Workspace(start.directory, files).prepare()
    try:
        if start.controlled:
            start.await_former()
        facts = find()
        if start.controlled:
            job_token(start.directory, os.environ, create=True)  # before the others look for it
    except (SwansongError, OSError) as error:
        _tell(start, JobRefused(reason=f"{type(error).__name__}: {error}"), files)
        raise
    _tell(start, facts, files)
    return facts


def _found(start: Start, files: Files, resuming: bool, allow_fresh: bool) -> JobFacts:
    arguments = (start.directory, start.prefix, start.incarnation, start.world_size, files)
    if not resuming:
        return series_choice.fresh(*arguments)
    return series_choice.resumed(
        *arguments,
        key=start.key,
        allow_fresh=allow_fresh,
        crash_loop_limit=start.crash_loop_limit,
        examine=start.examine,
    )


def _tell(start: Start, what: JobFacts | JobRefused, files: Files) -> None:
    if start.world_size > 1 or start.controlled:  # a controller may want to know, too
        job.announce(start.directory, start.incarnation, what, files)
