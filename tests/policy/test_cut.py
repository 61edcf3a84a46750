"""The cut in the situations that the protocol names, with the words of its refusals."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import pytest

from cut_oracle import world_of
from swansong.policy.cut import Cut, Held, NoCut, Report, choose
from swansong.state.components import Component, TensorShape, WorldMap, component_key

Stand = int | tuple[int, str] | None


def said(by_rank: Mapping[int, Mapping[str, Stand]]) -> dict[int, Report]:
    """Reports by rank and component: whole at a step, at a step with these values, or torn (None)."""

    def held(stand: Stand) -> Held:
        if isinstance(stand, tuple):
            return Held(*stand)
        return Held(stand, "a")

    return {rank: Report(rank, {k: held(s) for k, s in stands.items()}) for rank, stands in by_rank.items()}


def cut(got: Cut | NoCut) -> Cut:
    assert isinstance(got, Cut), got
    return got


def reason(got: Cut | NoCut) -> str:
    assert isinstance(got, NoCut), got
    return got.reason


ONE = world_of({"model": (0, 1, 2, 3)})
PAIRS = world_of({"X": (0, 2), "Y": (1, 3)})


# -- who holds what ---------------------------------------------------------------------------------------


def test_one_of_a_pair_fails_and_the_other_saves() -> None:
    got = cut(choose(PAIRS, said({0: {"X": 7}, 2: {"X": 7}, 3: {"Y": 7}})))
    assert got == Cut(7, savers={"X": 0, "Y": 3}, spares={"X": (2,), "Y": ()})
    assert got.ranks == (0, 3)
    assert got.of_rank(3) == ("Y",)
    assert got.of_rank(2) == ()


def test_savers_are_listed_lowest_first_and_their_components_in_order() -> None:
    got = Cut(7, savers={"b": 8, "c": 1, "a": 8}, spares={})
    assert got.ranks == (1, 8)
    assert got.of_rank(8) == ("a", "b")


def test_both_of_a_pair_fail_and_the_refusal_names_component_and_ranks() -> None:
    got = choose(PAIRS, said({0: {"X": 7}, 2: {"X": 7}}))
    assert got == NoCut("component 'Y' has no intact holder at any step: ranks 1, 3 lost or silent")


def test_a_sole_holder_fails_as_the_map_had_shown() -> None:
    world = world_of({"model": (0, 1, 2), "shard 2": (2,)})
    assert [(rank, component.label) for rank, component in world.sole_holders()] == [(2, "shard 2")]
    got = choose(world, said({0: {"model": 7}, 1: {"model": 7}}))
    assert reason(got) == "component 'shard 2' has no intact holder at any step: rank 2 lost or silent"


@pytest.mark.parametrize(
    ("holders", "lost", "savers"),
    [
        pytest.param({"X": (0, 1, 2)}, {0}, {"X": 1}, id="three_ranks"),
        pytest.param({"X": (0, 1, 2, 3, 4)}, {0, 1, 2, 3}, {"X": 4}, id="last_of_five_ranks"),
        pytest.param({"X": (0, 2, 3), "Y": (1, 4)}, {1, 0}, {"X": 2, "Y": 4}, id="unequal_groups"),
        pytest.param({"X": (0,), "Y": (0,), "Z": (0,)}, set(), {"X": 0, "Y": 0, "Z": 0}, id="three_on_one"),
        pytest.param(
            {"X": (0, 1), "Y": (0, 1), "Z": (0, 1)}, {0}, {"X": 1, "Y": 1, "Z": 1}, id="three_on_the_survivor"
        ),
        pytest.param({"X": (0,)}, set(), {"X": 0}, id="a_job_of_one_rank"),
    ],
)
def test_any_number_of_ranks_and_groups(
    holders: dict[str, tuple[int, ...]], lost: set[int], savers: dict[str, int]
) -> None:
    world = world_of(holders)
    alive = world.members.keys() - lost
    reports = said({rank: {c.key: 7 for c in world.members[rank]} for rank in alive})
    assert cut(choose(world, reports)).savers == savers


@pytest.mark.parametrize("forgotten", [True, False], ids=["its_report_is_gone", "it_is_known_to_fail"])
def test_dead_rank_alone_ahead_falls_back_one_step(forgotten: bool) -> None:
    reports = said({0: {"model": 6}, 1: {"model": 6}, 2: {"model": 6}, 3: {"model": 7}})
    assert cut(choose(ONE, reports)).savers == {"model": 3}
    if forgotten:
        del reports[3]
    got = cut(choose(ONE, reports, excluded=set() if forgotten else {(3, "model")}))
    assert got == Cut(6, {"model": 0}, {"model": (1, 2)})


def test_no_common_step_is_refused_with_who_stands_where() -> None:
    got = choose(PAIRS, said({0: {"X": 7}, 2: {"X": 7}, 3: {"Y": 6}}))
    assert got == NoCut(
        "no step at which every component is whole: step 7 lacks 'Y' (rank 1 lost or silent, rank 3 whole at "
        "step 6); step 6 lacks 'X' (ranks 0, 2 whole at step 7)"
    )


@pytest.mark.parametrize(("straggler", "step"), [(6, 6), (7, 7)])
def test_one_holder_at_the_others_step_makes_it_common(straggler: int, step: int) -> None:
    reports = said({0: {"X": 7}, 1: {"Y": straggler}, 2: {"X": 6}, 3: {"Y": 6}})
    assert cut(choose(PAIRS, reports)).step == step


def test_a_copy_torn_in_its_update_window_is_left_out() -> None:
    got = cut(choose(ONE, said({0: {"model": None}, 1: {"model": 7}, 2: {"model": 6}, 3: {"model": 7}})))
    assert got == Cut(7, {"model": 1}, {"model": (3,)})


def test_a_torn_copy_without_a_replica_is_refused() -> None:
    got = choose(PAIRS, said({0: {"X": None}, 1: {"Y": 7}, 3: {"Y": 7}}))
    assert reason(got) == (
        "component 'X' has no intact holder at any step: rank 0 in the middle of an update, "
        "rank 2 lost or silent"
    )


def test_a_saver_whose_clock_moved_is_chosen_no_more() -> None:
    reports = said({0: {"model": 7}, 1: {"model": 7}, 2: {"model": 7}})
    assert cut(choose(ONE, reports)).savers == {"model": 0}
    assert cut(choose(ONE, reports, excluded={(0, "model")})) == Cut(7, {"model": 1}, {"model": (2,)})


def test_pipeline_stages_that_look_alike_are_never_pooled() -> None:
    block = {"weight": TensorShape("float32", (4, 4))}
    stages = [component_key(block, placement=None, rank=rank) for rank in (0, 1)]
    world = WorldMap({rank: (Component(stages[rank], f"stage {rank}", 64),) for rank in (0, 1)})
    same = [said({rank: {stages[rank]: (7, "initial values")}}) for rank in (0, 1)]
    assert cut(choose(world, same[0] | same[1])).savers == {stages[0]: 0, stages[1]: 1}
    assert "'stage 1'" in reason(choose(world, same[0]))


# -- replicas whose values differ -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "excluded", "savers"),
    [
        pytest.param("abb", set(), (1, (2,), (0,)), id="the_majority_saves"),
        pytest.param("ab.", set(), (0, (), (1,)), id="a_tie_goes_to_the_lowest_rank"),
        pytest.param(".ba", set(), (1, (), (2,)), id="the_lowest_that_reported"),
        pytest.param("abcc", set(), (2, (3,), (0, 1)), id="two_against_one_and_one"),
        pytest.param("baba", set(), (0, (2,), (1, 3)), id="two_against_two"),
        pytest.param("abb", {1}, (2, (), (0,)), id="who_failed_is_still_a_witness"),
        pytest.param("abbc", {0, 3}, (1, (2,), (0, 3)), id="who_failed_is_reported_too"),
        pytest.param("???", set(), (0, (1, 2), ()), id="nothing_to_compare"),
        pytest.param("?a?", set(), (1, (), ()), id="who_can_say_is_preferred"),
        pytest.param("?ab?", set(), (1, (), (2,)), id="who_cannot_say_is_no_witness"),
        pytest.param("??", {0}, (1, (), ()), id="nothing_to_compare_and_one_failed"),
    ],
)
def test_only_the_largest_agreeing_group_saves(
    values: str, excluded: set[int], savers: tuple[int, tuple[int, ...], tuple[int, ...]]
) -> None:
    """One letter per rank: its values; a dot has not reported, a question mark could not say."""
    reports = said({r: {"model": (7, v.strip("?"))} for r, v in enumerate(values) if v != "."})
    got = cut(choose(ONE, reports, excluded={(rank, "model") for rank in excluded}))
    saver, spares, divergent = savers
    assert got == Cut(7, {"model": saver}, {"model": spares}, {"model": divergent} if divergent else {})


def test_another_step_with_the_same_values_is_no_witness() -> None:
    reports = said({0: {"model": (7, "a")}, 1: {"model": (7, "b")}, 2: {"model": (6, "b")}})
    assert cut(choose(ONE, reports)).savers == {"model": 0}


@pytest.mark.parametrize(
    ("second", "words"),
    [("b", "with other values"), ("", "without a digest of its values")],
    ids=["divergent", "unknown"],
)
def test_a_copy_that_nobody_vouches_for_is_not_saved_in_place_of_one_that_failed(
    second: str, words: str
) -> None:
    reports = said({0: {"model": (7, "a")}, 1: {"model": (7, second)}})
    got = choose(world_of({"model": (0, 1)}), reports, excluded={(0, "model")})
    assert reason(got) == (
        f"component 'model' has no intact holder at any step: rank 0 failed to save it, rank 1 {words}"
    )


def test_divergence_at_the_newest_step_still_beats_agreement_before() -> None:
    reports = said({0: {"model": (7, "b")}, 1: {"model": (6, "a")}, 2: {"model": (6, "a")}})
    assert cut(choose(ONE, reports)).step == 7


# -- what else breaks meanwhile -----------------------------------------------------------------------------


def test_a_saver_killed_while_saving_is_replaced_at_the_same_step() -> None:
    reports = said({0: {"X": 7}, 1: {"Y": 7}, 2: {"X": 7}, 3: {"Y": 7}})
    first = cut(choose(PAIRS, reports))
    assert first.savers == {"X": 0, "Y": 1}
    del reports[0]
    assert cut(choose(PAIRS, reports, only_step=first.step)).savers == {"X": 2, "Y": 1}


def test_every_holder_s_disk_is_full() -> None:
    reports = said({0: {"X": 7}, 1: {"Y": 7}, 2: {"X": 7}, 3: {"Y": 7}})
    got = choose(PAIRS, reports, excluded={(1, "Y"), (3, "Y")})
    assert reason(got) == "component 'Y' has no intact holder at any step: ranks 1, 3 failed to save it"


def test_failing_one_component_does_not_keep_a_rank_from_saving_another() -> None:
    world = world_of({"X": (0, 1), "Y": (0,)})
    reports = said({0: {"X": 7, "Y": 7}, 1: {"X": 7}})
    assert cut(choose(world, reports, excluded={(0, "X")})).savers == {"X": 1, "Y": 0}


# -- reports that do not fit the map ------------------------------------------------------------------------


def test_a_component_left_out_of_a_report_is_not_whole_there() -> None:
    world = world_of({"X": (0,), "Y": (0,)})
    got = choose(world, said({0: {"X": 7}}))
    assert got == NoCut("component 'Y' has no intact holder at any step: rank 0 reported without it")


def test_nobody_saves_what_the_map_does_not_give_it() -> None:
    strange = said({0: {"X": 6, "Y": 9, "Z": 9}, 1: {"Y": 6}, 99: {"X": 9}})
    assert cut(choose(PAIRS, strange)) == Cut(6, {"X": 0, "Y": 1}, {"X": (), "Y": ()})


@pytest.mark.parametrize("members", [{}, {0: ()}], ids=["no_rank", "no_component"])
def test_an_empty_map_has_nothing_to_save(members: dict[int, tuple[Component, ...]]) -> None:
    got = choose(WorldMap(members), said({0: {"X": 7}}), expected={1}, only_step=7)
    assert got == NoCut("no component is registered")


# -- waiting ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A world without a cut, and who is waited for."""

    holders: dict[str, tuple[int, ...]]
    reports: dict[int, dict[str, Stand]]
    expected: set[int]
    waiting: tuple[int, ...]
    failed: AbstractSet[tuple[int, str]] = frozenset()
    only_step: int | None = None


SPLIT = {0: {"X": (7, "a")}, 1: {"X": (7, "a")}, 2: {"X": (7, "b")}}

REFUSED = {
    "slow_sole_holder": Refused({"X": (0, 1), "Y": (2,)}, {0: {"X": 7}}, {1, 2}, (1, 2)),
    "sole_holder_lost": Refused({"X": (0, 1), "Y": (2,)}, {0: {"X": 7}}, {1}, ()),
    "nothing_heard_yet": Refused({"X": (0,), "Y": (1,)}, {}, {0, 1}, (0, 1)),
    "one_lost_dooms_all": Refused({"X": (0,), "Y": (1,)}, {}, {0}, ()),
    "one_may_share_the_step": Refused({"X": (0, 2), "Y": (1,)}, {0: {"X": 7}, 1: {"Y": 6}}, {2}, (2,)),
    "no_step_left_for_the_others": Refused(
        {"X": (0, 1), "Y": (2,), "Z": (3,)}, {0: {"X": 7}, 2: {"Y": 6}, 3: {"Z": 7}}, {1}, ()
    ),
    "step_given_and_not_heard_of": Refused({"X": (0, 1)}, {0: {"X": 6}}, {1}, (1,), only_step=7),
    "step_given_and_impossible": Refused(
        {"X": (0, 1), "Y": (2,)}, {0: {"X": 6}, 2: {"Y": 6}}, {1}, (), only_step=7
    ),
    "who_comes_has_failed": Refused({"X": (0, 1)}, {0: {"X": None}}, {1}, (), {(1, "X")}),
    "vote_of_one_who_has_failed": Refused(
        {"X": (1, 2, 3)}, {r: SPLIT[r] for r in (1, 2)}, {3}, (3,), {(1, "X"), (3, "X")}
    ),
    "one_vote_is_not_enough": Refused({"X": (0, 1, 2, 3)}, SPLIT, {3}, (), {(r, "X") for r in (0, 1, 3)}),
    "two_votes_are_enough": Refused(
        {"X": (0, 1, 2, 3, 4)}, SPLIT, {3, 4}, (3, 4), {(r, "X") for r in (0, 1, 3, 4)}
    ),
    "vote_at_a_step_that_is_lost_anyway": Refused(
        {"X": (1, 2, 3, 5), "Y": (4,)}, SPLIT | {4: {"Y": 6}}, {3, 5}, (5,), {(1, "X"), (3, "X")}
    ),
    "who_has_reported_is_not_awaited": Refused({"X": (0, 1)}, {0: {"X": None}}, {0}, ()),
    "a_rank_not_on_the_map": Refused({"X": (0,)}, {}, {0, 7}, (0,)),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_waits_for_exactly_those_who_can_help(case: Refused) -> None:
    got = choose(
        world_of(case.holders),
        said(case.reports),
        expected=case.expected,
        excluded=case.failed,
        only_step=case.only_step,
    )
    assert isinstance(got, NoCut)
    assert got.waiting_for == case.waiting


def test_a_cut_is_not_put_off_for_a_rank_that_might_be_ahead() -> None:
    assert cut(choose(ONE, said({1: {"model": 6}}), expected={0, 2, 3})).step == 6


def test_who_may_still_answer_is_told_apart_from_who_will_not() -> None:
    got = choose(PAIRS, said({0: {"X": 7}}), expected={1})
    assert got == NoCut(
        "component 'Y' has no intact holder at any step: rank 1 not heard from yet, rank 3 lost or silent",
        (1,),
    )


# -- one step only ------------------------------------------------------------------------------------------


def test_no_other_step_is_taken_than_the_one_asked_for() -> None:
    reports = said({0: {"X": 7}, 1: {"Y": 7}, 2: {"X": 6}, 3: {"Y": 6}})
    assert cut(choose(PAIRS, reports, only_step=6)).savers == {"X": 2, "Y": 3}
    assert reason(choose(PAIRS, reports, only_step=7, excluded={(1, "Y")})) == (
        "component 'Y' has no intact holder at step 7: rank 1 failed to save it, rank 3 whole at step 6"
    )


# -- spreading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holders", "nbytes", "savers"),
    [
        pytest.param(
            {"A": (0, 1), "B": (0, 1), "C": (0, 1)},
            {"A": 3, "B": 5, "C": 2},
            {"A": 1, "B": 0, "C": 1},
            id="largest_first",
        ),
        pytest.param(
            {"A": (0, 1), "B": (0,)}, {"A": 9, "B": 1}, {"A": 1, "B": 0}, id="sole_holders_before_the_rest"
        ),
        pytest.param(
            {"A": (0, 1, 2), "B": (0, 1), "C": (0, 1)},
            {"A": 9, "B": 8, "C": 7},
            {"A": 2, "B": 0, "C": 1},
            id="small_groups_before_large_ones",
        ),
        pytest.param({"B": (0, 1), "A": (0, 1)}, {"A": 1, "B": 1}, {"A": 0, "B": 1}, id="equal_ones_by_key"),
        pytest.param({"A": (0, 1), "B": (0, 1)}, {"A": 0, "B": 0}, {"A": 0, "B": 0}, id="nothing_to_write"),
    ],
)
def test_bytes_are_spread_over_the_holders(
    holders: dict[str, tuple[int, ...]], nbytes: dict[str, int], savers: dict[str, int]
) -> None:
    world = world_of(holders, nbytes)
    reports = said({rank: {c.key: 7 for c in held} for rank, held in world.members.items()})
    assert cut(choose(world, reports)).savers == savers


# -- long refusals ------------------------------------------------------------------------------------------


def test_a_refusal_of_a_large_world_stays_short() -> None:
    world = world_of({f"shard {i:03}": (i, i + 500) for i in range(500)})
    assert reason(choose(world, {})) == (
        "component 'shard 000' has no intact holder at any step: ranks 0, 500 lost or silent; "
        "component 'shard 001' has no intact holder at any step: ranks 1, 501 lost or silent; "
        "component 'shard 002' has no intact holder at any step: ranks 2, 502 lost or silent; "
        "and 497 more components"
    )


def test_a_refusal_of_scattered_ranks_stays_short() -> None:
    world = world_of({"X": range(20), "Y": (20,)})
    reports = said({rank: {"X": rank // 2} for rank in range(20)} | {20: {"Y": 40}})
    assert reason(choose(world, reports)) == (
        "no step at which every component is whole: step 40 lacks 'X' (ranks 0, 1 whole at step 0, "
        "ranks 2, 3 whole at step 1, ranks 4, 5 whole at step 2 and 14 more ranks); "
        "step 9 lacks 'Y' (rank 20 whole at step 40); step 8 lacks 'Y' (rank 20 whole at step 40); "
        "and 8 more steps"
    )


@pytest.mark.parametrize(
    ("count", "named"), [(8, ": ranks 0, 1, 2, 3, 4, 5, 6, 7 lost"), (9, ", 7 and 1 more lost")]
)
def test_eight_ranks_in_one_state_are_named(count: int, named: str) -> None:
    assert named in reason(choose(world_of({"X": range(count)}), {}))


def test_a_step_that_lacks_several_components_counts_them() -> None:
    world = world_of({"X": (0,), "Y": (1,), "Z": (2,)})
    got = reason(choose(world, said({0: {"X": 6}, 1: {"Y": 6}, 2: {"Z": 7}})))
    assert got == (
        "no step at which every component is whole: step 7 lacks 'X' (rank 0 whole at step 6) "
        "and 1 more component; step 6 lacks 'Z' (rank 2 whole at step 7)"
    )
