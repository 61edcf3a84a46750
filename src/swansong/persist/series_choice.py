"""Which series a start of a job belongs to, as rank 0 finds it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from swansong.errors import DamagedError
from swansong.persist import crash_loop
from swansong.persist.job import JobFacts, SeriesFacts
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.latest import Examine, choose
from swansong.store.series import Series
from swansong.store.verify import usable
from swansong.store.writing import await_writers


def fresh(directory: Path, prefix: str, incarnation: bytes, world_size: int, files: Files) -> JobFacts:
    """Begin a series. Raises OSError."""
    series = Series.fresh(directory, prefix, files)
    return _facts(series, incarnation, world_size, None, 0)


def resumed(
    directory: Path,
    prefix: str,
    incarnation: bytes,
    world_size: int,
    files: Files,
    *,
    key: Key | None,
    allow_fresh: bool,
    crash_loop_limit: int,
    examine: Examine = usable,
) -> JobFacts:
    """Continue with the newest checkpoint that verifies; without any, begin; unless that is a crash loop.

    Those passed over are warned of. Raises DamagedError if there are checkpoints and none is usable, unless
    `allow_fresh`; LoadError, OSError.
    """
    await_writers(directory, prefix, files)
    choice = choose([directory], prefix, key=key, examine=examine)
    if choice.newest is None and choice.passed_over and not allow_fresh:
        reasons = "\n  ".join(f"{found.path}: {reason}" for found, reason in choice.passed_over)
        raise DamagedError(
            f"there are checkpoints, but none can be used (allow_fresh=True begins at step 0):\n  {reasons}",
            path=str(choice.passed_over[0][0].path),
        )
    choice.warn()
    if choice.newest is None or choice.newest.manifest is None:
        facts = fresh(directory, prefix, incarnation, world_size, files)
    else:
        series = Series.resumed(choice.newest, files)
        path, step = str(choice.newest.path), choice.newest.manifest.step
        facts = _facts(series, incarnation, world_size, path, step)
    found = crash_loop.look_for(directory, facts.series.stem, step=facts.step, limit=crash_loop_limit)
    return msgspec.structs.replace(facts, crash_loop=found)


def _facts(series: Series, incarnation: bytes, world_size: int, path: str | None, step: int) -> JobFacts:
    series.sweep()
    series = replace(series, run=incarnation.hex())
    return JobFacts(
        world_size=world_size,
        series=SeriesFacts.of(series),
        checkpoint=path,
        step=step,
        resume_command=shlex.join(sys.orig_argv),
    )
