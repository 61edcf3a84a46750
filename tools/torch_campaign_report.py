"""The page that tools/torch_campaign.py writes of its results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

INTRODUCTION = """# Steps lost

Measured by `tools/torch_campaign.py`, which has written this page: random faults at random moments of a
PyTorch job of four ranks (DistributedDataParallel, batch-norm, dropout, a scheduler, a gradient scaler, an
exponential average, a shuffled sampler) that saves no checkpoint but at faults. After each fault the job is
started again, goes on for 2 to 8 steps, and meets the next.

- **Steps lost** are counted by what the ranks themselves wrote of each step, those included that a dead rank
  had made: the last that any of them had completed, less the one that the job went on after.
- If every rank throws inside its update at once, no state is whole anywhere, and nothing can be saved: the
  report says so. It did not come about in these runs, and was seen once in others.
- **Bit-equal**: at every boundary until the next fault, or to the end, parameters, optimizer, average,
  statistics, scheduler, scaler and generators of each rank are those of a job that nobody disturbs.
- **Inexact**: the checkpoint itself says that something in it is not exactly as it was: all ranks failed
  after the update and before the next batch, so the scheduler is of the step before. The job is begun anew.
- Milliseconds are from the moment at which the fault became known to the commit, on a machine of two cores
  that was busy with other work besides.
"""
COLUMNS = ("fault", "how many", "steps lost", "bit-equal", "inexact", "median", "slowest")
LAUNCHERS = {
    "torchrun": "Under `torchrun --max-restarts`",
    "forked": "Under a launcher that ends and starts ranks as torchrun does, without its imports",
}


def page(results: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    parts = [INTRODUCTION]
    for launcher, title in LAUNCHERS.items():
        mine = [result for result in results if result["launcher"] == launcher]
        if mine:
            parts.append(f"## {title}: {len(mine)} faults\n\n{_table(mine)}")
    return "\n".join(parts)


def _table(results: Sequence[dict[str, Any]]) -> str:
    kinds = list(dict.fromkeys(result["kind"] for result in results))
    rows = [_row(kind, [one for one in results if one["kind"] == kind]) for kind in kinds]
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows, _row("all", results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(name: str, results: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    seconds = [result["seconds"] for result in results if result["seconds"] is not None]
    lost = sum(result["lost"] for result in results)
    equal = sum(not result["different"] for result in results)
    return (
        name,
        str(len(results)),
        str(lost),
        str(equal),
        str(sum(bool(result["inexact"]) for result in results)),
        f"{1000 * median(seconds):.0f} ms" if seconds else "",
        f"{1000 * max(seconds):.0f} ms" if seconds else "",
    )
