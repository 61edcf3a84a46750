"""Run the deterministic simulation of the protocol over many seeds, or one of them with its transcript.

python tools/simulate.py --seeds 100000 --ranks 2-64
python tools/simulate.py --seeds 100000 --json
python tools/simulate.py --seed 1234 --ranks 2-64
python tools/simulate.py --stories
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))  # the simulation lives with the tests

from simulation.sim_campaign import Summary, everywhere, explained  # noqa: E402
from simulation.sim_plan import random_plan  # noqa: E402
from simulation.sim_stories import STORIES, told  # noqa: E402
from simulation.sim_world import Recording, run  # noqa: E402


def main() -> int:
    """Return 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its transcript")
    parser.add_argument("--stories", action="store_true", help="write tests/golden/transcript_*.txt anew")
    parser.add_argument("--ranks", default="2-8", help="smallest and largest world: 2-8")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print what was counted as one JSON object")
    arguments = parser.parse_args()
    if arguments.stories:
        return write_stories()
    least, _, most = arguments.ranks.partition("-")
    sizes = int(least), int(most or least)
    if arguments.seed is not None:
        return replay(arguments.seed, sizes)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    total = campaign(seeds, sizes, arguments.processes)
    if arguments.json:
        print(json.dumps(total.as_json(), indent=2))
    else:
        report(total, sizes)
    return bool(total.violations)


def replay(seed: int, sizes: tuple[int, int]) -> int:
    """Run one seed and print everything."""
    plan = random_plan(seed, *sizes)
    result = run(plan, recording=Recording.EVERYTHING)
    print(plan, *result.transcript, sep="\n")
    print(result.violation or "every invariant held")
    return bool(result.violation)


def write_stories() -> int:
    """Write every story where the tests keep it."""
    for name, plan in STORIES.items():
        (TESTS / "golden" / f"transcript_{name}.txt").write_text(told(plan))
    return 0


def campaign(seeds: range, sizes: tuple[int, int], processes: int) -> Summary:
    """Run many seeds; tell on standard error how far it is."""
    total = Summary()
    for summary in everywhere(seeds, *sizes, processes):
        total.add(summary)
        print(f"\r{total}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return total


def report(total: Summary, sizes: tuple[int, int]) -> None:
    """Print how often what came about; explain the first seed that fails."""
    print(total.table())
    for seed, violation in sorted(total.violations)[1:20]:
        print(f"seed {seed}: {violation.splitlines()[0]}")
    if total.violations:
        seed = min(total.violations)[0]
        ranks = f"{sizes[0]}-{sizes[1]}"
        print(explained(random_plan(seed, *sizes), f"python tools/simulate.py --seed {seed} --ranks {ranks}"))
    print(total)


if __name__ == "__main__":
    sys.exit(main())
