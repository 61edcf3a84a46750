"""Every small world, and many larger ones, against the definition in `cut_oracle`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cut_oracle import Case, best_load, completions, judge, loads, right_step, world_of
from swansong.policy.cut import Cut, Held, NoCut, Report, choose
from swansong.state.components import Component, WorldMap

N = 7

# One letter says how a component stands on a rank that has reported.
TORN = {"t": Held(None)}
AT_N = {"n": Held(N, "a"), "N": Held(N, "b")}
BEFORE = {"m": Held(N - 1, "a"), "M": Held(N - 1, "b")}
UNKNOWN = {"u": Held(N)}
STANDS = {**TORN, **AT_N, **BEFORE, **UNKNOWN}


@dataclass(frozen=True)
class Shape:
    """Component -> holders, and what is tried on each rank."""

    holders: Mapping[str, tuple[int, ...]]
    stands: str = "tnNmM"
    failing: bool = True
    """Whether each component may have failed to save on each rank."""

    def cases(self) -> Iterator[Case]:
        """Every case, one of each two that differ only in the names of the values."""
        world = world_of(self.holders)
        for per_rank in itertools.product(*(self._rank(world.members[rank]) for rank in world.members)):
            if self._renamed(per_rank):
                continue
            reports = {r: Report(r, state) for r, (state, _, _) in enumerate(per_rank) if state is not None}
            expected = frozenset(r for r, (_, expected, _) in enumerate(per_rank) if expected)
            failed = frozenset((r, key) for r, (_, _, failed) in enumerate(per_rank) for key in failed)
            yield Case(world, reports, expected, failed)

    def _rank(self, components: Sequence[Component]) -> list[tuple[dict[str, Held] | None, bool, tuple]]:
        keys = [component.key for component in components]
        failures = [
            tuple(key for key, failed in zip(keys, which, strict=True) if failed)
            for which in itertools.product([False, True] if self.failing else [False], repeat=len(keys))
        ]
        states = [
            {key: STANDS[letter] for key, letter in zip(keys, letters, strict=True)}
            for letters in itertools.product(self.stands, repeat=len(keys))
        ]
        return [
            (None, False, ()),
            *((None, True, failed) for failed in failures),
            *(
                (state, False, failed)
                for state in states
                for failed in failures
                # It makes no difference to a torn copy.
                if all(state[key].step is not None for key in failed)
            ),
        ]

    def _renamed(self, per_rank: Sequence[tuple[dict[str, Held] | None, bool, tuple]]) -> bool:
        first: dict[str, str] = {}
        for state, _, _ in per_rank:
            for key, held in (state or {}).items():
                if held.step is not None and held.values:
                    first.setdefault(key, held.values)
        return "b" in first.values()


SHAPES = {
    "one_component_on_four_ranks": Shape({"X": (0, 1, 2, 3)}),
    "one_component_some_values_unknown": Shape({"X": (0, 1, 2, 3)}, "tunNm"),
    "two_pairs": Shape({"X": (0, 2), "Y": (1, 3)}),
    "both_on_both_ranks": Shape({"X": (0, 1), "Y": (0, 1)}),
    "a_chain": Shape({"X": (0, 1), "Y": (1, 2)}),
    "one_everywhere_and_a_sole_holder": Shape({"X": (0, 1, 2), "Y": (2,)}),
    "a_ring_of_three": Shape({"X": (0, 1), "Y": (1, 2), "Z": (0, 2)}, "tnm", failing=False),
    "three_on_one_rank": Shape({"X": (0,), "Y": (0,), "Z": (0,)}),
    "three_on_both_ranks": Shape({"X": (0, 1), "Y": (0, 1), "Z": (0, 1)}, "tnm", failing=False),
    "three_stages_and_a_replica_of_one": Shape({"X": (0,), "Y": (1,), "Z": (2, 3)}, "tnm"),
    "triple_and_its_rest": Shape({"X": (0, 1, 2), "Y": (3,)}, "tnNm"),
    "nobody_holds_anything": Shape({}),
}


def decide(case: Case) -> Cut | NoCut:
    return choose(
        case.world,
        case.reports,
        expected=case.expected,
        excluded=case.excluded,
        only_step=case.only_step,
    )


def check(case: Case) -> None:
    got = decide(case)
    try:
        judge(case, got)
    except AssertionError as error:
        pytest.fail(f"{case}\n-> {got}\n{error}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_small_world_gives_the_cut_of_the_definition(shape: Shape) -> None:
    for case in shape.cases():
        check(case)


@pytest.mark.parametrize("only", [N, N - 1, N + 1], ids=["the_newer", "the_older", "one_unheard_of"])
@pytest.mark.parametrize("name", ["both_on_both_ranks", "a_chain", "three_stages_and_a_replica_of_one"])
def test_every_small_world_with_the_step_given(name: str, only: int) -> None:
    for case in SHAPES[name].cases():
        check(replace(case, only_step=only))


# -- larger worlds, at random -----------------------------------------------------------------------------

# Repeated as often as makes both outcomes frequent.
STATES = [
    *[Held(N, "a")] * 6,
    *[Held(N - 1, "a")] * 4,
    *[Held(N, "b")] * 2,
    Held(N - 1, "b"),
    Held(N),
    Held(N - 1),
    Held(None),
    None,
]
"""None: left out of the report."""


@st.composite
def random_cases(
    draw: st.DrawFn, ranks: int = 7, components: int = 5, per_rank: int = 5, late: int = 1
) -> Case:
    """Odd worlds: reports that lack components or bring strange ones, ranks that nobody knows."""
    size = draw(st.integers(1, ranks))
    holders: dict[str, list[int]] = {}
    for key in "VWXYZ"[: draw(st.integers(1, components))]:
        wanted = draw(st.sets(st.integers(0, size - 1), min_size=1))
        holders[key] = [r for r in wanted if sum(r in others for others in holders.values()) < per_rank]
    holders = {key: ranks for key, ranks in holders.items() if ranks}
    world = world_of(holders, {key: draw(st.integers(0, 5)) for key in holders})
    fates = {r: draw(st.sampled_from(["reports"] * 5 + ["lost"] + ["late"] * late)) for r in range(size + 1)}
    reports, excluded = {}, set()
    for rank, fate in fates.items():
        keys = [key for key, ranks in holders.items() if rank in ranks]
        excluded |= {(rank, key) for key in keys if draw(st.sampled_from([False] * 5 + [True]))}
        if fate == "reports":
            keys += ["other"] if draw(st.booleans()) else []
            found = {key: draw(st.sampled_from(STATES)) for key in keys}
            reports[rank] = Report(rank, {key: held for key, held in found.items() if held is not None})
    expected = {r for r, fate in fates.items() if fate == "late"} | draw(st.sets(st.sampled_from([0, 99])))
    only = draw(st.sampled_from([None] * 6 + [N + 1, N, N - 1]))
    return Case(world, reports, frozenset(expected), frozenset(excluded), only)


@settings(max_examples=1500, deadline=None)
@given(random_cases())
def test_larger_worlds_give_the_cut_of_the_definition(case: Case) -> None:
    check(case)


def coming(case: Case) -> frozenset[int]:
    return case.expected & case.world.members.keys() - case.reports.keys()


@settings(max_examples=300, deadline=None)
@given(
    random_cases(ranks=4, components=3, per_rank=2, late=4).filter(
        lambda case: right_step(case) is None and 0 < len(coming(case)) < 3
    )
)
def test_a_refusal_waits_for_nobody_exactly_if_no_reports_could_help(case: Case) -> None:
    waiting = decide(case).waiting_for
    assert coming(case).issuperset(waiting)
    possible = any(right_step(later) is not None for later in completions(case, coming(case)))
    assert bool(waiting) == possible
    without = completions(case, coming(case).difference(waiting))
    assert not any(right_step(later) is not None for later in without), "others alone could bring a cut"


@settings(max_examples=300, deadline=None)
@given(random_cases(), st.randoms(use_true_random=False))
def test_the_order_of_mappings_makes_no_difference(case: Case, random: Random) -> None:
    def shuffled(mapping: Mapping) -> dict:
        items = list(mapping.items())
        random.shuffle(items)
        return dict(items)

    reports = {rank: Report(rank, shuffled(report.held)) for rank, report in case.reports.items()}
    world = WorldMap(shuffled(case.world.members))
    assert decide(replace(case, world=world, reports=shuffled(reports))) == decide(case)


# -- balance ----------------------------------------------------------------------------------------------


def healthy(world: WorldMap) -> Cut:
    reports = {
        rank: Report(rank, {component.key: Held(N, "a") for component in components})
        for rank, components in world.members.items()
    }
    cut = choose(world, reports)
    assert isinstance(cut, Cut)
    return cut


def test_the_most_loaded_saver_has_at_most_one_component_more_than_in_the_best_spread() -> None:
    subsets = [ranks for count in (1, 2, 3) for ranks in itertools.combinations(range(3), count)]
    choices = list(itertools.product(subsets, (1, 2, 5)))
    for chosen in itertools.combinations_with_replacement(choices, 4):
        holders = {f"c{i}": ranks for i, (ranks, _) in enumerate(chosen)}
        nbytes = {f"c{i}": size for i, (_, size) in enumerate(chosen)}
        world = world_of(holders, nbytes)
        most = max(loads(healthy(world), world).values())
        assert most <= best_load(holders, nbytes) + max(nbytes.values()), chosen


@st.composite
def nested_groups(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Up to 60 components held by groups of ranks, any two of them disjoint or nested."""
    groups = [tuple(range(draw(st.integers(1, 16))))]
    for group in groups:
        if len(group) > 1 and draw(st.booleans()):
            at = draw(st.integers(1, len(group) - 1))
            groups += [group[:at], group[at:]]
    held_by = draw(st.lists(st.sampled_from(groups), min_size=1, max_size=60))
    holders = {f"c{i:02}": group for i, group in enumerate(held_by)}
    return holders, {key: draw(st.integers(1, 100)) for key in holders}


@settings(max_examples=400, deadline=None)
@given(nested_groups())
def test_nested_groups_are_balanced_to_within_one_component(
    groups: tuple[dict[str, tuple[int, ...]], dict[str, int]],
) -> None:
    holders, nbytes = groups
    world = WorldMap(
        {
            rank: tuple(Component(key, key, nbytes[key]) for key, ranks in holders.items() if rank in ranks)
            for rank in range(16)
        }
    )
    # What only the ranks of a group hold must be written by them, however it is spread.
    at_least = max(
        math.ceil(sum(nbytes[key] for key in holders if set(holders[key]) <= set(group)) / len(group))
        for group in holders.values()
    )
    assert max(loads(healthy(world), world).values()) <= at_least + max(nbytes.values())
