"""Tens of thousands of incidents, each from a seed; `tools/simulate.py` runs as many more as one likes."""

from __future__ import annotations

import json

import pytest

from simulation.sim_campaign import Summary, everywhere, explained, many
from simulation.sim_plan import Kind, random_plan
from simulation.sim_world import Recording, run
from swansong.protocol.states import NEXT, STEP

BATCHES = 5
SEEDS = 6_000
"""In each batch."""


@pytest.fixture(scope="module")
def total() -> Summary:
    """What all batches have found together."""
    return Summary()


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_invariant_holds_in_every_run(batch: int, total: Summary) -> None:
    seeds = range(batch * SEEDS, (batch + 1) * SEEDS)
    for summary in everywhere(seeds, 1, 8, processes=2):
        total.add(summary)
        for seed, _ in summary.violations[:1]:
            pytest.fail(
                explained(random_plan(seed, 1, 8), f"python tools/simulate.py --seed {seed} --ranks 1-8")
            )


def test_every_row_of_both_tables_is_taken_and_every_rare_situation_met(total: Summary) -> None:
    if not total.runs:  # run by itself
        total.add(many(range(SEEDS), 1, 8))
    assert total.unvisited() == []
    assert total.unmet() == []
    if total.runs == BATCHES * SEEDS:
        assert total.incidents >= 20_000


def test_large_worlds_hold_every_invariant() -> None:
    for seed in range(200):
        plan = random_plan(seed, 24, 64)
        assert not run(plan).violation, explained(
            plan, f"python tools/simulate.py --seed {seed} --ranks 24-64"
        )


def test_one_seed_gives_one_run() -> None:
    for seed in range(50):
        first, second = (run(random_plan(seed), recording=Recording.EVERYTHING) for _ in range(2))
        assert first.transcript == second.transcript


def test_plans_hold_every_kind_of_fault() -> None:
    kinds = {fault.kind for seed in range(3000) for fault in random_plan(seed).faults}
    assert kinds == set(Kind)


def test_what_was_counted_adds_up() -> None:
    total = many(range(300))
    counted = total.as_json()
    assert sum(total.outcomes.values()) == total.incidents == counted["incidents"]
    shapes = total.by_shape().values()
    assert sum(shape["runs"] for shape in shapes) == total.runs
    assert sum(sum(shape.values()) for shape in shapes) == total.runs + total.incidents
    assert {name: len(rows) for name, rows in total.rows().items()} == {
        "controller": len(NEXT),
        "processor": len(STEP),
    }
    assert json.loads(json.dumps(counted)) == counted
