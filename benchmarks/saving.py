"""How fast a durable save is: ours, the disk's limit, and what people use today.

Every candidate writes the same tensors, and its clock stops when file and directory are on disk. The limit is
the best of {1, 2, 4} threads x {4, 16} MiB pieces of O_DIRECT writes of as many bytes, found in the same run.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import limits, mindspore_savers, ours, peers
from benchmarks.bars import Bar, Finding
from benchmarks.small import per_step
from benchmarks.states import nbytes, state
from benchmarks.turns import Progress, Times, alternate, best, seconds_of, speed_ratio

TITLE = "Durable save of {:g} MiB in {:,} tensor{}"
MINDSPORE_TITLE = "Durable save of a .ckpt of {:g} MiB in 64 tensors, end of a step with ModelCheckpoint"
SMALL_TITLE = "A small model, saved durably at every step"
_SPREAD = 64
_SMALL_TENSORS = 10_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. Sizes are in MiB."""

    sizes: tuple[float, ...] = (1, 100, 1024)
    """In 64 tensors each; the last of them is judged."""
    once: float | None = 4096
    """Once without most peers; None: not at all."""
    counts: tuple[int, ...] = (1, 1000, 10_000)
    """Numbers of tensors, other than 64, that hold `counted` together."""
    counted: float = 100
    ckpt: tuple[float, ...] = (100, 400)
    """Of .ckpt files; the first is judged as "at 100 MB", the last as "from 400 MB"."""
    steps: int = 100
    """Saves of the small model."""
    slow: bool = True
    """Also what takes long: torch.distributed.checkpoint of many tensors, all of MindSpore's schemes."""
    rounds: int = 5
    doubt: str = ""
    """Why bars that depend on the size are not judged."""


def findings(plan: Plan, progress: Progress, directory: Path | None = None) -> dict[str, list[Finding]]:
    """Measure everything; a table per size."""
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=directory) as folder:
        place = Path(folder)
        found = {}
        for size in plan.sizes:
            found[_title(size, _SPREAD)] = _spread(size, plan, place, progress, judged=size == plan.sizes[-1])
            gc.collect()
        if plan.once is not None:
            found[_title(plan.once, _SPREAD) + ", once"] = _once(plan.once, place, progress)
        for count in plan.counts:
            found[_title(plan.counted, count)] = _counted(count, plan, place, progress)
        found[SMALL_TITLE] = per_step(plan.steps, place, progress)
        for size in plan.ckpt:
            found[MINDSPORE_TITLE.format(size)] = _ckpt(size, plan, place, progress)
            gc.collect()
    return found


def _title(size: float, count: int) -> str:
    return TITLE.format(size, count, "" if count == 1 else "s")


def _spread(size: float, plan: Plan, place: Path, progress: Progress, *, judged: bool) -> list[Finding]:
    arrays = state(int(size * 2**20), _SPREAD)
    total = nbytes(arrays)
    raw = limits.raw_writes(total)
    entries = [*ours.natives(arrays), *raw, limits.cached_write(arrays), *peers.savers(arrays)]
    times = alternate(entries, place, plan.rounds, progress)
    limit = best(times, [one.name for one in raw])
    ratios = []
    if judged:
        two = peers.DISTRIBUTED.format(2, "s")
        ratios = [
            speed_ratio(f"durable save with digests / {what}", times, ours.NATIVE, of, least, plan.doubt)
            for what, of, least in (
                (f"raw limit ({limit.removeprefix('raw ')})", limit, 0.85),
                (peers.TORCH, peers.TORCH, 2.0),
                (peers.SAFETENSORS, peers.SAFETENSORS, 1.5),
                (two, two, 1.25),
            )
        ]
        ratios.append(
            speed_ratio(
                "encrypted (AES-256-GCM) / unencrypted durable save",
                *(times, ours.SEALED, ours.NATIVE, 0.9, plan.doubt),
            )
        )
    return ratios + seconds_of(times, total)


def _once(size: float, place: Path, progress: Progress) -> list[Finding]:
    arrays = state(int(size * 2**20), _SPREAD)
    total = nbytes(arrays)
    entries = [ours.natives(arrays)[0], limits.raw_writes(total)[3], peers.savers(arrays)[0]]
    return seconds_of(alternate(entries, place, 1, progress, warm_up=False), total)


def _counted(count: int, plan: Plan, place: Path, progress: Progress) -> list[Finding]:
    arrays = state(int(plan.counted * 2**20), count)
    others = peers.savers(arrays)[: None if plan.slow else 2]
    times = alternate([*ours.natives(arrays), *others], place, plan.rounds, progress)
    ratios = []
    if count == _SMALL_TENSORS:
        what = "10,000 tensors of 10 KB / torch.save + fsync"
        ratios = [speed_ratio(what, times, ours.NATIVE, peers.TORCH, 1.8, plan.doubt)]
    return ratios + seconds_of(times, nbytes(arrays))


def _ckpt(size: float, plan: Plan, place: Path, progress: Progress) -> list[Finding]:
    arrays = state(int(size * 2**20), _SPREAD)
    large = size == plan.ckpt[-1]
    schemes: tuple[str, ...] = ("plain", "AES-GCM") if large else ("plain",)
    if large and plan.slow:
        schemes = tuple(mindspore_savers.SCHEMES)
    with tempfile.TemporaryDirectory(dir=place) as own:
        entries = mindspore_savers.pairs(arrays, Path(own), schemes)
        times = alternate(entries, place, plan.rounds, progress)
    bars = {"plain": 3.0, "AES-GCM": 10.0} if large else {"plain": 1.4}
    ratios = [_against_mindspore(scheme, size, times, bars.get(scheme), plan.doubt) for scheme in schemes]
    return ratios + seconds_of(times, nbytes(arrays))


def _against_mindspore(scheme: str, size: float, times: Times, least: float | None, doubt: str) -> Finding:
    theirs, mine = mindspore_savers.THEIRS.format(scheme), mindspore_savers.OURS.format(scheme)
    what = f".ckpt of {size:g} MiB, {scheme}, through ModelCheckpoint / MindSpore's + fsync"
    return speed_ratio(what, times, mine, theirs, least, doubt if least is not None else "")


MERGED = Finding(
    what="merged save by 4 processes, axis-0 splits / one plain save of the same bytes",
    value=None,
    unit="x time",
    bar=Bar(1.2),
    doubt="not supported yet",
)
"""Of what cannot be measured before it exists."""
