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

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    what: str
    value: float | None
    """None: could not be measured, for the reason that `doubt` gives."""
    unit: str = ""
    bar: Bar | None = None
    """None: for information."""
    samples: tuple[float, ...] = ()
    """What `value` was made of, in `unit`, in the order in which it was measured."""
    doubt: str = ""
    """Why this value does not decide whether the bar is met; empty if it does."""
    key: str = ""
    """Candidate whose `samples` these are, for plots."""

    @property
    def verdict(self) -> str:
        """In a word or two; empty without a bar."""
        if self.doubt or self.value is None:
            return self.doubt or "not measured"
        if self.bar is None:
            return ""
        return "met" if self.bar.met(self.value) else "missed"

    @property
    def measured(self) -> str:
        """The value with its unit, for people."""
        return "" if self.value is None else f"{self.value:.3g} {self.unit}".strip()

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "verdict": self.verdict}


def table(title: str, findings: Sequence[Finding]) -> Table:
    """The findings, for people."""
    rows = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("what", "measured", "bar", "verdict", "samples", "median", "p95", "max"):
        rows.add_column(heading, justify="left" if heading in ("what", "verdict") else "right")
    for finding in findings:
        limit = "" if finding.bar is None else str(finding.bar)
        samples = finding.samples
        spread = [f"{percentile(samples, q):.3g}" for q in (50, 95, 100)] if len(samples) > 1 else []
        rows.add_row(finding.what, finding.measured, limit, finding.verdict, f"{len(samples) or ''}", *spread)
    return rows


def summary(found: dict[str, list[Finding]]) -> Table:
    """Every bar, for people."""
    rows = Table(title="All bars", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("what", "measured", "bar", "verdict"):
        rows.add_column(heading, justify="right" if heading in ("measured", "bar") else "left")
    for finding in barred(found):
        rows.add_row(finding.what, finding.measured, str(finding.bar), finding.verdict)
    return rows


def barred(found: dict[str, list[Finding]]) -> list[Finding]:
    """The findings that have a bar."""
    return [finding for findings in found.values() for finding in findings if finding.bar is not None]


def last_line(found: dict[str, list[Finding]]) -> str:
    """How many bars were met and missed."""
    verdicts = [finding.verdict for finding in barred(found)]
    return f"{verdicts.count('met')} bars met, {verdicts.count('missed')} missed"


def percentile(samples: Sequence[float], q: float) -> float:
    """The smallest sample that at least `q` percent of all do not exceed (nearest rank); 0 < q <= 100."""
    return sorted(samples)[math.ceil(q / 100 * len(samples)) - 1]
