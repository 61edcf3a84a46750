"""Tens of thousands of incidents, each from a seed; `tools/simulate.py` runs as many more as one likes."""

from __future__ import annotations

import pytest

from simulation.sim_campaign import Summary, everywhere, explained, many
from simulation.sim_plan import Kind, random_plan
from simulation.sim_world import Recording, run
from swansong.protocol.states import Got, Mode

BATCHES = 5
SEEDS = 5_400
"""In each batch."""

ONLY_REFUSED = {(mode, Got.GIVEN_UP) for mode in (Mode.JOINED, Mode.TRAINING, Mode.FROZEN)}
"""Rows for a refusal of whom the controller knew, for which runs are too short; `tests/protocol` has it."""


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


def test_every_row_of_both_tables_is_taken(total: Summary) -> None:
    if not total.runs:  # run by itself
        total.add(many(range(SEEDS), 1, 8))
    assert set(total.unvisited()) <= ONLY_REFUSED
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
