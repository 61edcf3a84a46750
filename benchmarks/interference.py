"""What training pays while a checkpoint is captured or written beside it.

Slowed by a background save: a compute-bound loop of one thread, with and without a save going on, in turns;
the mean step of each. Overlapped capture: a training loop in PyTorch whose step is longer than the copy; what
a step at which a save begins takes longer than others, with the step that follows it.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
from benchmarks import limits
from benchmarks.bars import Bar, Finding
from benchmarks.blocking import SavingLoop, await_that, saving_loop
from benchmarks.states import State, state
from benchmarks.turns import Progress, timed
from torch import nn

import swansong.torch
from swansong.config import CheckpointConfig
from swansong.errors import NotSupportedError
from swansong.policy.keep import KeepLast
from swansong.policy.save import EverySteps
from swansong.store import catalog
from swansong.store.writer import WriterOptions

TITLE = "Training beside a save of {:g} MiB"
_SLOWED_BAR = 5.0
_OVERLAP_BAR = 0.1
_NOT_YET = "not supported yet"
_WIDTH = 640
_EVERY = 6


def findings(
    mebibytes: float, rounds: int, progress: Progress, directory: Path | None = None, doubt: str = ""
) -> list[Finding]:
    """Measure with a state of so many MiB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=directory) as folder:
        arrays = state(int(mebibytes * 2**20))
        found = []
        for mode in ("thread", "process"):
            found += _slowed(arrays, mode, rounds, progress, Path(folder) / mode, doubt)
        del arrays
        return found + _overlapped(mebibytes, rounds, progress, Path(folder) / "overlap", doubt)


def _slowed(
    arrays: State, mode: str, rounds: int, progress: Progress, place: Path, doubt: str
) -> list[Finding]:
    matrix = torch.rand(_WIDTH, _WIDTH)
    alone, beside, before = [], [], _children()
    with saving_loop(arrays, place, mode) as loop:
        loop.blocked()
        in_process = _children() != before
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}: training beside a save, {mode}")
            loop.begin()
            taken = _while_saving(loop, matrix)
            beside.append(statistics.mean(taken))
            loop.wait()
            alone.append(statistics.mean(timed(lambda: _step(matrix)) for _ in taken))
    what = f"training slowed by a background save, async_save={mode!r}"
    if mode == "process" and not in_process:
        return [Finding(what=what, value=None, unit="%", bar=Bar(_SLOWED_BAR), doubt=_NOT_YET)]
    slowed = [(with_save / without - 1) * 100 for with_save, without in zip(beside, alone, strict=True)]
    return [
        Finding(
            what=what,
            value=statistics.median(slowed),
            unit="%",
            bar=Bar(_SLOWED_BAR),
            samples=tuple(slowed),
            doubt=doubt,
        ),
        Finding(
            what="  step alone", value=statistics.median(alone) * 1e3, unit="ms", samples=_milliseconds(alone)
        ),
        Finding(
            what="  step beside a save",
            value=statistics.median(beside) * 1e3,
            unit="ms",
            samples=_milliseconds(beside),
        ),
    ]


def _while_saving(loop: SavingLoop, matrix: torch.Tensor) -> list[float]:
    """Seconds of each step until the save is on disk."""
    taken: list[float] = []
    while not taken or not loop.saved:
        taken.append(timed(lambda: _step(matrix)))
    return taken


def _step(matrix: torch.Tensor) -> None:
    """Some ten milliseconds of a processor, next to nothing of the memory."""
    torch.mm(matrix, matrix)


def _children() -> set[str]:
    """Process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def _overlapped(mebibytes: float, rounds: int, progress: Progress, place: Path, doubt: str) -> list[Finding]:
    """Only what an update changes: no batch-norm."""
    bar = Bar(_OVERLAP_BAR)
    what = "whole-step time added by overlapped capture / plain copy"
    with limits.plain_copies(state(int(mebibytes * 2**20)), WriterOptions().threads) as copy:
        copied = [timed(copy.prepare(place)) for _ in range(rounds + 1)][1:]
    plain = statistics.median(copied)
    try:
        ordinary, added = _steps(mebibytes, rounds, progress, place)
    except NotSupportedError:
        return [Finding(what=what, value=None, bar=bar, doubt=_NOT_YET)]
    step = statistics.median(ordinary)
    if step < plain:
        doubt = doubt or "not judged: step too short"
    return [
        Finding(what=what, value=statistics.median(added) / plain, bar=bar, doubt=doubt),
        Finding(what="  step", value=step * 1e3, unit="ms", samples=_milliseconds(ordinary)),
        Finding(
            what="  added where a save begins",
            value=statistics.median(added) * 1e3,
            unit="ms",
            samples=_milliseconds(added),
        ),
        Finding(what="  plain copy", value=plain * 1e3, unit="ms", samples=_milliseconds(copied)),
    ]


def _steps(mebibytes: float, rounds: int, progress: Progress, place: Path) -> tuple[list[float], list[float]]:
    """Seconds of steps that are alone, and what a step with a save and its next take longer, in turns."""
    width = max(8, int((mebibytes * 2**20 / 4 / 4) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.rand(16, width)

    def train() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.step_end()

    config = CheckpointConfig.of(save=EverySteps(_EVERY), keep=KeepLast(1), async_save=True)
    ordinary, added = [], []
    with swansong.torch.protect(
        model=model, optimizer=optimizer, directory=place, prefix="bench", config=config, overlap=True
    ) as run:
        train()
        for number in range(-1, rounds):
            progress(f"round {number + 1} of {rounds}: overlapped capture")
            alone = [timed(train) for _ in range(_EVERY - 2)]
            begun = timed(train), timed(train)
            await_that(lambda: _on_disk(place, run.step - 1))
            if number >= 0:
                ordinary += alone
                added.append(sum(begun) - 2 * statistics.median(alone))
    return ordinary, added


def _on_disk(place: Path, step: int) -> bool:
    return any(one.manifest is not None and one.manifest.step == step for one in catalog.scan(place))


def _milliseconds(seconds: list[float]) -> tuple[float, ...]:
    return tuple(one * 1e3 for one in seconds)
