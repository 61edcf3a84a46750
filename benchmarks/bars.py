"""What was found, held against the bar that it is to meet. A ratio is a finding without unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Bar:
    """How much a value may be at most; or at least."""

    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        """True if `value` will do."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    what: str
    value: float
    unit: str = ""
    bar: Bar | None = None
    """None: for information."""
    samples: tuple[float, ...] = ()
    """What `value` was made of, in `unit`, in the order in which it was measured."""

    @property
    def verdict(self) -> str:
        """In a word; empty without a bar."""
        if self.bar is None:
            return ""
        return "met" if self.bar.met(self.value) else "missed"

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "verdict": self.verdict}


def table(title: str, findings: Sequence[Finding]) -> Table:
    """The findings, for people."""
    rows = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("what", "measured", "bar", "verdict", "samples", "median", "p95", "max"):
        rows.add_column(heading, justify="left" if heading in ("what", "verdict") else "right")
    for finding in findings:
        bar = finding.bar
        limit = f"{'>=' if bar.at_least else '<='} {bar.limit:g}" if bar is not None else ""
        samples = finding.samples
        spread = [f"{percentile(samples, q):.3g}" for q in (50, 95, 100)] if len(samples) > 1 else []
        measured = f"{finding.value:.3g} {finding.unit}".strip()
        rows.add_row(finding.what, measured, limit, finding.verdict, f"{len(samples) or ''}", *spread)
    return rows


def percentile(samples: Sequence[float], q: float) -> float:
    """The smallest sample that at least `q` percent of all do not exceed (nearest rank); 0 < q <= 100."""
    return sorted(samples)[math.ceil(q / 100 * len(samples)) - 1]
