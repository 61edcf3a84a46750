"""For how long an asynchronous save blocks training, held against a plain copy of the same memory.

Ours is driven through `swansong.arrays`: what is timed is the `step_end` at which a save is due. Each save is
on disk before the next begins. The first one, which also takes and touches the memory for the copy, is
reported apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import limits, mindspore_savers, peers
from benchmarks.bars import Bar, Finding
from benchmarks.states import State, nbytes, state
from benchmarks.turns import Candidate, Progress, alternate, seconds_of

import swansong.arrays
from swansong.config import CheckpointConfig
from swansong.policy.keep import KeepLast
from swansong.policy.save import EverySteps
from swansong.store import catalog
from swansong.store.writer import WriterOptions

TITLE = "Blocked by an asynchronous save of {:g} MiB in 64 tensors"
_BAR = 1.3
_PATIENCE_S = 120.0
_OURS = "swansong, async_save='thread'"


def findings(
    mebibytes: float, rounds: int, progress: Progress, directory: Path | None = None, doubt: str = ""
) -> list[Finding]:
    """Measure with a state of so many MiB."""
    arrays = state(int(mebibytes * 2**20))
    threads = WriterOptions().threads
    with (
        tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=directory) as folder,
        limits.plain_copies(arrays, threads) as copy,
        saving_loop(arrays, Path(folder) / "ours", "thread") as loop,
    ):
        progress("the first asynchronous save")
        first = loop.blocked()
        entries = [
            copy,
            Candidate(_OURS, lambda _: loop.blocked),
            peers.distributed_async(arrays),
            *mindspore_savers.asynchronous(arrays),
        ]
        times = alternate(entries, Path(folder), rounds, progress)
    ratio = statistics.median(times[_OURS]) / statistics.median(times[copy.name])
    return [
        Finding(
            what="time blocked by an asynchronous save / plain copy with as many threads",
            value=ratio,
            bar=Bar(_BAR),
            doubt=doubt,
        ),
        *seconds_of(times, nbytes(arrays)),
        Finding(what="  swansong, the first save of a run", value=first, unit="s"),
    ]


class SavingLoop:
    """A loop that saves whenever it is told to."""

    def __init__(self, run: swansong.arrays.Run, directory: Path) -> None:
        self._run, self._directory = run, directory

    def blocked(self) -> float:
        """Seconds for which a step's end blocks at which a save is due; returns when the save is on disk."""
        seconds = self.begin()
        self.wait()
        return seconds

    def begin(self) -> float:
        """The same, but the save goes on."""
        began = time.perf_counter()
        self._run.step_end()
        return time.perf_counter() - began

    @property
    def saved(self) -> bool:
        """True if the last step is on disk, and nothing else is."""
        steps = [one.manifest.step for one in catalog.scan(self._directory) if one.manifest is not None]
        return steps == [self._run.step]

    def wait(self) -> None:
        """Until the last step is on disk and the one before is gone."""
        await_that(lambda: self.saved)


@contextmanager
def saving_loop(arrays: State, directory: Path, mode: str) -> Iterator[SavingLoop]:
    """A loop over arrays that is saved asynchronously at each step."""
    save, keep = EverySteps(1), KeepLast(1)
    config: Any = CheckpointConfig.of(save=save, keep=keep, async_save=mode)
    with swansong.arrays.protect(arrays, directory=directory, prefix="bench", config=config) as run:
        yield SavingLoop(run, directory)


def await_that(what: Callable[[], bool]) -> None:
    """Wait, with a limit."""
    ends = time.monotonic() + _PATIENCE_S
    while not what():
        if time.monotonic() > ends:
            raise TimeoutError("a save did not end")
        time.sleep(0.002)
