"""A 250 KB model that is saved at every step: what a save costs that has next to nothing to write."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from benchmarks.bars import Bar, Finding
from benchmarks.states import State, content, state
from benchmarks.turns import Progress, make_durable, timed

from swansong.persist.saver import Request, Saver
from swansong.policy.keep import KeepLast
from swansong.store.checkpoint import Point, SaveOptions
from swansong.store.files import Files
from swansong.store.series import Series

_BYTES = 250_000
_TENSORS = 10
_BAR_MS = 10.0
_KEPT = 5
_WARM_UP = 3


def per_step(steps: int, place: Path, progress: Progress) -> list[Finding]:
    """Milliseconds of each save, old ones pruned (five stay); torch.save does the same as far as it can."""
    folder = place / "small"
    folder.mkdir()
    arrays = state(_BYTES, _TENSORS)
    what = "a 250 KB model, saved at every step: one durable save"
    ways = {
        what: _ours(arrays, folder / "ours"),
        "  torch.save + fsync + rename + fsync": _torch(arrays, folder),
        "  write + fsync + fsync of the directory": _least(folder),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(1, _WARM_UP + steps + 1):
        progress(f"small model, save {step} of {_WARM_UP + steps}")
        for name, save in ways.items():
            milliseconds = timed(partial(save, step)) * 1e3
            if step > _WARM_UP:
                taken[name].append(milliseconds)
    shutil.rmtree(folder)
    return [
        Finding(
            what=name,
            value=statistics.median(times),
            unit="ms",
            bar=Bar(_BAR_MS) if name == what else None,
            samples=tuple(times),
        )
        for name, times in taken.items()
    ]


def _ours(arrays: State, folder: Path) -> Callable[[int], None]:
    files = Files()
    saver = Saver(files, KeepLast(_KEPT), SaveOptions(), background=None, on_error="raise")
    series = Series.fresh(folder, "bench", files)
    shown = content(arrays)

    def save(step: int) -> None:
        name, point = f"bench-{step}", Point(step=step)
        request = Request(series=series, name=name, content=shown, point=point, kind="periodic")
        saver.save(lambda: request)

    return save


def _torch(arrays: State, folder: Path) -> Callable[[int], None]:
    shared = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def save(step: int) -> None:
        temporary = folder / "new.pt"
        torch.save(shared, temporary)
        make_durable(temporary)
        temporary.rename(folder / f"bench-{step}.pt")
        make_durable(folder)
        (folder / f"bench-{step - _KEPT}.pt").unlink(missing_ok=True)

    return save


def _least(folder: Path) -> Callable[[int], None]:
    def save(_: int) -> None:
        path = folder / "least"
        path.write_bytes(b"\xa5" * _BYTES)
        make_durable(path, folder)
        path.unlink()

    return save
