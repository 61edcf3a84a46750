"""Many seeds, over several processes; and what to do about one that fails."""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from simulation.sim_plan import Plan, random_plan
from simulation.sim_situations import SITUATIONS
from simulation.sim_world import Recording, run
from swansong.protocol.states import NEXT, STEP


@dataclass(slots=True)
class Summary:
    """What came of many runs."""

    runs: int = 0
    incidents: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    visits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each row of both tables was taken."""
    met: Counter[str] = field(default_factory=Counter)
    """Rare situations, as in `sim_situations`."""
    shapes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(who holds what, outcome) -> incidents; with "runs" for an outcome, runs."""
    violations: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what)."""

    def add(self, other: Summary) -> None:
        """Take in the outcome of other runs."""
        self.runs += other.runs
        self.incidents += other.incidents
        self.outcomes += other.outcomes
        self.visits += other.visits
        self.met += other.met
        self.shapes += other.shapes
        self.violations += other.violations

    def unmet(self) -> list[str]:
        """Rare situations that never came about."""
        return [situation for situation in SITUATIONS if not self.met[situation]]

    def unvisited(self) -> list[tuple[str, str]]:
        """Rows of both tables that were never taken."""
        return [row for row in [*NEXT, *STEP] if not self.visits[row]]

    def rows(self) -> dict[str, dict[str, int]]:
        """Machine -> row, as "state, event" -> how often it was taken; in the tables' order."""
        tables: tuple[tuple[str, Mapping[tuple[StrEnum, StrEnum], StrEnum]], ...] = (
            ("controller", NEXT),
            ("processor", STEP),
        )
        return {
            name: {f"{state.value}, {event.value}": self.visits[state, event] for state, event in table}
            for name, table in tables
        }

    def by_shape(self) -> dict[str, dict[str, int]]:
        """Who holds what -> runs, and incidents by outcome; the most frequent first."""
        runs = Counter({shape: count for (shape, what), count in self.shapes.items() if what == "runs"})
        outcomes = ["runs", *(outcome for outcome, _ in self.outcomes.most_common())]
        return {
            shape: {outcome: self.shapes[shape, outcome] for outcome in outcomes}
            for shape, _ in runs.most_common()
        }

    def as_json(self) -> dict[str, object]:
        """Everything, in plain values."""
        return {
            "runs": self.runs,
            "incidents": self.incidents,
            "outcomes": dict(self.outcomes),
            "rows": self.rows(),
            "shapes": self.by_shape(),
            "situations": {situation: self.met[situation] for situation in SITUATIONS},
            "violations": [{"seed": seed, "what": what} for seed, what in sorted(self.violations)],
        }

    def table(self) -> str:
        """The same for people, but for violations."""
        lines = []
        for machine, rows in self.rows().items():
            lines += [f"rows of the {machine}", *_counted(rows)]
        lines.append("who holds what")
        for shape, outcomes in self.by_shape().items():
            said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
            lines.append(f"  {shape}: {said}")
        lines += ["situations", *_counted({situation: self.met[situation] for situation in SITUATIONS})]
        return "\n".join(lines)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        return f"{self.runs} runs, {self.incidents} incidents ({outcomes}), {len(self.violations)} violations"


def _counted(counts: Mapping[str, int]) -> list[str]:
    return [f"{count:9}  {what}" if count else f"    never  {what}" for what, count in counts.items()]


def many(seeds: range, least: int = 2, most: int = 8) -> Summary:
    """Run a range of seeds, here."""
    summary = Summary()
    for seed in seeds:
        plan = random_plan(seed, least, most)
        result = run(plan)
        summary.shapes[plan.shape, "runs"] += 1
        for outcome, count in result.outcomes.items():
            summary.shapes[plan.shape, outcome] += count
        summary.met += result.met
        summary.runs += 1
        summary.incidents += result.incidents
        summary.outcomes += result.outcomes
        summary.visits += result.visits
        if result.violation:
            summary.violations.append((seed, result.violation))
    return summary


def everywhere(seeds: range, least: int, most: int, processes: int) -> Iterator[Summary]:
    """Run a range of seeds over processes; yield the outcome of each hundred."""
    pieces = [(seeds[at : at + 100], least, most) for at in range(0, len(seeds), 100)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_many, pieces)


def _many(piece: tuple[range, int, int]) -> Summary:
    return many(*piece)


# -- a failing seed ---------------------------------------------------------------------------------------


def explained(plan: Plan, replay: str) -> str:
    """A failing plan made small, its transcript, and how to run it again."""
    small = shrunk(plan)
    result = run(small, recording=Recording.EVERYTHING)
    lines = [f"seed {plan.seed}: {run(plan).violation}", f"again: {replay}", "", "shrunk to:", str(small), ""]
    return "\n".join([*lines, *result.transcript[-200:]])


def shrunk(plan: Plan, tries: int = 300) -> Plan:
    """A smaller plan that violates the same invariant: fewer faults, ranks and steps."""
    what = _class_of(run(plan).violation)
    progress = bool(what)
    while progress:
        progress = False
        for smaller in _smaller(plan):
            tries -= 1
            if tries < 0:
                return plan
            if _class_of(run(smaller).violation) == what:
                plan, progress = smaller, True
                break
    return plan


def _class_of(violation: str) -> str:
    """The same for violations that differ in numbers only."""
    return re.sub(r"\d+", "#", violation)[:40]


def _smaller(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    if plan.ranks > 1:
        last = plan.ranks - 1
        faults = (replace(f, ranks=tuple(r for r in f.ranks if r != last)) for f in plan.faults)
        kept = tuple(f for f, old in zip(faults, plan.faults, strict=True) if f.ranks or not old.ranks)
        yield replace(plan, layout=plan.layout[:-1], hosts=plan.hosts[:-1], faults=kept)
    for index, fault in enumerate(plan.faults):
        for rank in fault.ranks if len(fault.ranks) > 1 else ():
            less = replace(fault, ranks=tuple(r for r in fault.ranks if r != rank))
            yield replace(plan, faults=(*plan.faults[:index], less, *plan.faults[index + 1 :]))
    if len(set(plan.hosts)) > 1:
        yield replace(plan, hosts=(0,) * plan.ranks)
    if plan.evaluate_s:
        yield replace(plan, evaluate_s=0.0)
    if plan.skips or plan.uneven:
        yield replace(plan, skips=frozenset(), uneven=False)
    if plan.steps > 1:
        yield replace(plan, steps=plan.steps - 1)
