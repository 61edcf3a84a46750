"""Keep policies: rows, whole histories replayed event by event, and properties of the fold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swansong.errors import ConfigError
from swansong.policy.keep import COUNTED, Committed, KeepAll, KeepLast, KeepPerMinutes, KeepPolicy

POLICIES = [KeepLast(1), KeepLast(2), KeepLast(5), KeepPerMinutes(1), KeepPerMinutes(0.25), KeepAll()]
policies = st.sampled_from(POLICIES)


def row(
    seq: int, time_s: float = 0.0, kind: str = "periodic", run: str = "a", parent: str | None = None
) -> Committed:
    return Committed(f"c{seq}", seq, time_s, kind, run, parent)


def left(committed: Sequence[Committed], gone: Sequence[str]) -> list[Committed]:
    return [entry for entry in committed if entry.id not in gone]


# --- A second reading of the rules, written to be obvious rather than fast. ---


def stated_descendants(present: Sequence[Committed], ancestor: Committed) -> set[str]:
    """Runs descending from `ancestor`, by the sentence that defines it, over what is present."""
    runs = {entry.run for entry in present if entry.parent == ancestor.id}
    while True:
        checkpoints = {entry.id for entry in present if entry.run in runs}
        more = runs | {entry.run for entry in present if entry.parent in checkpoints}
        if more == runs:
            return runs
        runs = more


def stated_outlived(present: Sequence[Committed], enough: int) -> set[str]:
    gone = set()
    for entry in present:
        if entry.kind not in ("periodic", "final"):
            runs = stated_descendants(present, entry)
            if sum(other.run in runs and other.kind in ("periodic", "final") for other in present) >= enough:
                gone.add(entry.id)
    return gone


def stated_thinned(counted: Sequence[Committed], minutes: float, newest: str) -> set[str]:
    """Apply the time rule to the first three neighbours that it fits, until it fits none."""
    stay, gone = list(counted), set()
    changed = True
    while changed:
        changed = False
        times: list[float] = []
        for entry in stay:
            times.append(max([entry.time_s, *times]))
        for a, b, c in zip(range(len(stay)), range(1, len(stay)), range(2, len(stay)), strict=False):
            if times[c] - times[a] < 60 * minutes and stay[b].id != newest:
                gone.add(stay.pop(b).id)
                changed = True
                break
    return gone


def stated_doomed(policy: KeepPolicy, present: Sequence[Committed], newest: str) -> list[str]:
    order = sorted(present, key=lambda entry: entry.seq)
    counted = [entry for entry in order if entry.kind in ("periodic", "final")]
    if newest not in {entry.id for entry in present} or isinstance(policy, KeepAll):
        return []
    if isinstance(policy, KeepLast):
        stay = set(sorted((entry.seq for entry in counted), reverse=True)[: policy.count])
        gone = {entry.id for entry in counted if entry.seq not in stay} | stated_outlived(order, policy.count)
    else:
        assert isinstance(policy, KeepPerMinutes)
        gone = stated_thinned(counted, policy.minutes, newest) | stated_outlived(order, 1)
    return [entry.id for entry in order if entry.id in gone - {newest}]


# --- Histories: several runs, resumed from what is there, under one policy. ---


@st.composite
def histories(draw: st.DrawFn, back: bool = True, clock_back: bool = False) -> list[tuple[str, ...]]:
    """Events: ("fresh",), ("resume", which of those present, as a fraction) and ("commit", kind, seconds)."""
    events: list[tuple[str, ...]] = [("fresh",)]
    kinds = st.sampled_from(["periodic"] * 6 + ["final", "fault", "exception", "requested"])
    gaps = st.integers(-90, 90) if clock_back else st.integers(0, 90)
    for _ in range(draw(st.integers(1, 25))):
        turn = draw(st.integers(0, 9))
        if turn == 0:
            events.append(("fresh",))
        elif turn <= 2:
            events.append(("resume", str(draw(st.floats(0, 1))) if back else "1.0"))
        events.append(("commit", draw(kinds), str(draw(gaps))))
    return events


class Series:
    """Replays a history; remembers everything that was ever committed."""

    def __init__(self, policy: KeepPolicy) -> None:
        self.policy = policy
        self.present: list[Committed] = []
        self.ever: list[Committed] = []
        self.run, self.parent = "none", None
        self.runs = 0
        self.clock = 1_000_000.0

    def play(self, events: Sequence[tuple[str, ...]]) -> None:
        for event in events:
            match event:
                case ("fresh",):
                    self.begin(None)
                case ("resume", fraction):
                    if self.present:
                        place = round(float(fraction) * (len(self.present) - 1))
                        self.begin(self.present[place].id)
                case ("commit", kind, gap):
                    self.clock += float(gap)
                    self.commit(kind)

    def begin(self, parent: str | None) -> None:
        self.runs += 1
        self.run, self.parent = f"run{self.runs}", parent

    def commit(self, kind: str) -> list[str]:
        entry = row(len(self.ever) + 1, self.clock, kind, self.run, self.parent)
        self.ever.append(entry)
        self.present.append(entry)
        gone = self.policy.doomed(self.present, entry.id)
        self.check(gone)
        self.present = left(self.present, gone)
        return gone

    def check(self, gone: list[str]) -> None:
        assert gone == stated_doomed(self.policy, self.present, self.ever[-1].id)

    def ever_outlived(self) -> set[str]:
        """Those that may be gone by what was ever committed, whether or not it is still there."""
        return stated_outlived(self.ever, self.policy.count if isinstance(self.policy, KeepLast) else 1)


@settings(max_examples=150)
@given(policy=policies, events=histories())
def test_history_with_restarts_and_resumes_from_older_steps(policy: KeepPolicy, events: list) -> None:
    Series(policy).play(events)


@settings(max_examples=100)
@given(policy=policies, events=histories(clock_back=True))
def test_history_with_clocks_set_back(policy: KeepPolicy, events: list) -> None:
    Series(policy).play(events)


@settings(max_examples=100)
@given(policy=policies, events=histories())
def test_nothing_uncounted_goes_before_its_descendants_have_ever_committed_enough(
    policy: KeepPolicy, events: list
) -> None:
    series = Series(policy)
    series.play(events)
    uncounted = {entry.id for entry in series.ever if entry.kind not in COUNTED}
    removed = uncounted - {entry.id for entry in series.present}
    assert removed <= series.ever_outlived()


@settings(max_examples=100)
@given(policy=policies.filter(lambda p: p != KeepAll()), events=histories(back=False))
def test_uncounted_goes_in_time_when_runs_resume_from_the_newest(policy: KeepPolicy, events: list) -> None:
    events = [event for event in events[1:] if event != ("fresh",)]
    series = Series(policy)
    series.begin(None)
    series.play(events)
    uncounted = {entry.id for entry in series.ever if entry.kind not in COUNTED}
    removed = uncounted - {entry.id for entry in series.present}
    assert removed == series.ever_outlived() - {series.ever[-1].id}


# --- Properties of one decision over any entries, likely or not. ---


@st.composite
def sets_of_entries(draw: st.DrawFn, true: bool = False) -> list[Committed]:
    """Entries with parents anywhere, times in any order, and list order mixed.

    Unless `true`, a parent may be younger than its run, as only a forged or damaged manifest says.
    """
    count = draw(st.integers(1, 14))
    parents = st.one_of(st.none(), st.just("gone"), st.integers(1, count).map(lambda seq: f"c{seq}"))
    of_run = {name: draw(parents) for name in "abcd"}
    entries: list[Committed] = []
    for seq in range(1, count + 1):
        run = draw(st.sampled_from("abcd"))
        kind = draw(st.sampled_from(["periodic", "periodic", "final", "fault", "preemption", "requested"]))
        if true and of_run[run] not in {None, "gone", *(entry.id for entry in entries)}:
            of_run[run] = None
        entries.append(row(seq, draw(st.integers(0, 400)), kind, run, of_run[run]))
    return draw(st.permutations(entries))


@settings(max_examples=200)
@given(policy=policies, entries=sets_of_entries(), data=st.data())
def test_decision_spares_the_newest_and_lists_the_oldest_first(
    policy: KeepPolicy, entries: list, data: st.DataObject
) -> None:
    newest = data.draw(st.sampled_from(entries)).id
    gone = policy.doomed(entries, newest)

    assert newest not in gone
    seqs = {entry.id: entry.seq for entry in entries}
    assert [seqs[name] for name in gone] == sorted({seqs[name] for name in gone})


@settings(max_examples=300)
@given(policy=policies, entries=sets_of_entries(true=True), data=st.data())
def test_decision_is_final(policy: KeepPolicy, entries: list, data: st.DataObject) -> None:
    newest = data.draw(st.sampled_from(entries)).id
    assert policy.doomed(left(entries, policy.doomed(entries, newest)), newest) == []


def test_parent_younger_than_its_run_moves_nothing_until_the_run_is_younger() -> None:
    forged = [row(1), row(3, run="d", parent="c4"), row(4, kind="fault"), row(6, run="d", parent="c4")]
    assert KeepLast(1).doomed(forged, "c6") == ["c1", "c3"]
    assert KeepLast(1).doomed(forged[2:], "c6") == ["c4"]


@settings(max_examples=100)
@given(policy=policies, entries=sets_of_entries(), seed=st.integers(0, 2**32))
def test_decision_does_not_depend_on_list_order(policy: KeepPolicy, entries: list, seed: int) -> None:
    newest = entries[0].id
    mixed = random.Random(seed).sample(entries, len(entries))
    assert policy.doomed(mixed, newest) == policy.doomed(entries, newest)


@settings(max_examples=200)
@given(
    minutes=st.sampled_from([1, 2, 0.5]),
    times=st.lists(st.integers(0, 600), min_size=1, max_size=30),
    forward=st.booleans(),
)
def test_thinning_at_once_equals_thinning_after_each_commit(
    minutes: float, times: list[int], forward: bool
) -> None:
    policy = KeepPerMinutes(minutes)
    entries = [row(seq, time) for seq, time in enumerate(sorted(times) if forward else times, 1)]
    step_by_step: list[Committed] = []
    for entry in entries:
        step_by_step.append(entry)
        step_by_step = left(step_by_step, policy.doomed(step_by_step, entry.id))
    assert left(entries, policy.doomed(entries, entries[-1].id)) == step_by_step
    assert step_by_step[0] is entries[0]
    assert step_by_step[-1] is entries[-1]


@settings(max_examples=200)
@given(minutes=st.integers(1, 3), gaps=st.lists(st.integers(0, 100), min_size=1, max_size=40))
def test_one_pass_of_the_rule_as_the_format_states_it(minutes: int, gaps: list[int]) -> None:
    times = [1_000.0 + sum(gaps[: k + 1]) for k in range(len(gaps))]
    kept: list[float] = []
    indices: list[int] = []
    for place, c in enumerate(times):
        if len(kept) >= 2 and c - kept[-2] < 60 * minutes:
            del kept[-1], indices[-1]
        kept.append(c)
        indices.append(place)
    entries = [row(seq, time) for seq, time in enumerate(times, 1)]
    gone = KeepPerMinutes(minutes).doomed(entries, entries[-1].id)
    assert [entry.seq - 1 for entry in left(entries, gone)] == indices


# --- Rows. ---


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("newest", ["", "elsewhere"])
def test_nothing_goes_when_none_is_known_to_verify(policy: KeepPolicy, newest: str) -> None:
    assert policy.doomed([row(seq) for seq in range(1, 9)], newest) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_do_in_an_empty_series(policy: KeepPolicy) -> None:
    assert policy.doomed([], "c1") == []


def test_keep_last_goes_by_seq_after_a_resume_from_an_older_step() -> None:
    stale = [row(1), row(2), row(3)]
    again = [row(4, run="b", parent="c1")]
    assert KeepLast(2).doomed([*again, *stale], "c4") == ["c1", "c2"]


def test_newest_that_verifies_stays_beyond_the_count() -> None:
    entries = [row(seq) for seq in range(1, 6)]
    assert KeepLast(2).doomed(entries, "c2") == ["c1", "c3"]


def test_newest_that_verifies_stays_among_close_saves() -> None:
    entries = [row(1, 0), row(2, 10), row(3, 20), row(4, 30)]
    assert KeepPerMinutes(1).doomed(entries, "c2") == ["c3"]


@pytest.mark.parametrize(
    ("gap_s", "kept"),
    [
        pytest.param(10, [0, 50, 100, 150, 200, 250, 290], id="every_10_s_keeps_one_per_50_s"),
        pytest.param(20, [0, 40, 80, 120, 160, 200, 240, 280], id="every_20_s_keeps_one_per_40_s"),
        pytest.param(30, list(range(0, 300, 30)), id="two_gaps_make_a_minute"),
        pytest.param(90, list(range(0, 300, 90)), id="rarer_saves_all_stay"),
    ],
)
def test_spacing_that_a_minute_leaves(gap_s: int, kept: list[int]) -> None:
    entries = [row(seq, time) for seq, time in enumerate(range(0, 300, gap_s), 1)]
    gone = KeepPerMinutes(1).doomed(entries, entries[-1].id)
    assert [entry.time_s for entry in left(entries, gone)] == kept


def test_what_a_clock_set_back_leaves_is_not_thinned_again() -> None:
    entries = [row(1, 0), row(2, 59), row(3, 70), row(4, 20)]
    gone = KeepPerMinutes(1).doomed(entries, "c4")
    assert gone == ["c2", "c3"]
    assert KeepPerMinutes(1).doomed(left(entries, gone), "c4") == []


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf"), 1e308])
def test_impossible_times_remove_neither_the_oldest_nor_the_newest(time_s: float) -> None:
    entries = [row(1, 0), row(2, time_s), row(3, 10), row(4, 5)]
    assert not {"c1", "c4"} & set(KeepPerMinutes(1).doomed(entries, "c4"))


FAULT = [row(1), row(2, 1, "fault")]


@pytest.mark.parametrize(
    ("policy", "more", "goes"),
    [
        pytest.param(KeepLast(2), [], False, id="no_one_resumed"),
        pytest.param(KeepLast(2), [row(3, 2, run="b", parent="c2")], False, id="one_of_two"),
        pytest.param(KeepLast(2), [row(k, k, run="b", parent="c2") for k in (3, 4)], True, id="two_of_two"),
        pytest.param(KeepPerMinutes(9), [row(3, 2, run="b", parent="c2")], True, id="by_time_one_is_enough"),
        pytest.param(KeepLast(2), [row(k, k) for k in (3, 4, 5)], False, id="its_own_run_went_on"),
        pytest.param(
            KeepLast(2), [row(k, k, run="b", parent="c1") for k in (3, 4)], False, id="resumed_before_it"
        ),
        pytest.param(
            KeepLast(2),
            [row(3, 2, run="b", parent="c2"), row(4, 3, run="c", parent="c3")],
            True,
            id="a_run_and_the_run_resumed_from_it",
        ),
        pytest.param(
            KeepLast(2), [row(k, k, "fault", "b", "c2") for k in (3, 4, 5)], False, id="only_faults_followed"
        ),
        pytest.param(
            KeepLast(2),
            [row(3, 2, "fault", "b", "c2"), *(row(k, k, run="c", parent="c3") for k in (4, 5))],
            True,
            id="through_another_fault",
        ),
        pytest.param(
            KeepAll(), [row(k, k, run="b", parent="c2") for k in range(3, 30)], False, id="keep_all"
        ),
    ],
)
@pytest.mark.parametrize("kind", ["fault", "exception", "preemption", "requested"])
def test_uncounted_goes_when_enough_follow_from_it(
    policy: KeepPolicy, more: list[Committed], goes: bool, kind: str
) -> None:
    entries = [FAULT[0], replace(FAULT[1], kind=kind), *more]
    assert ("c2" in policy.doomed(entries, entries[-1].id)) is goes


def test_run_that_claims_a_later_parent_is_not_its_descendant() -> None:
    entries = [row(1, run="b", parent="c3"), row(2, run="b", parent="c3"), row(3, kind="fault")]
    assert KeepLast(2).doomed(entries, "c2") == []


def test_parents_in_a_circle_come_to_an_end() -> None:
    entries = [row(1, kind="fault", parent="c4"), row(2, run="b", parent="c1"), row(3, run="b", parent="c1")]
    entries += [row(4, run="b", parent="c1"), row(5, run="c", parent="c5")]
    assert KeepLast(3).doomed(entries, "c5") == ["c1", "c2"]


@pytest.mark.parametrize("policy", [KeepLast(3), KeepPerMinutes(1)])
def test_ten_thousand_restarts_each_after_a_fault(policy: KeepPolicy) -> None:
    chain = [row(1, kind="fault", run="r1")]
    chain += [row(k, k, "fault", f"r{k}", f"c{k - 1}") for k in range(2, 10_001)]
    chain += [row(k, k, "periodic", "last", "c10000") for k in range(10_001, 10_004)]
    gone = policy.doomed(chain, "c10003")
    assert gone[:10_000] == [f"c{k}" for k in range(1, 10_001)]


@pytest.mark.parametrize("wrong", [0, -1, None, True, 2.0, "5", np.bool_(True)])
def test_wrong_count_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^count: wanted a positive int, got "):
        KeepLast(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, 0.0, None, True, "5", float("nan"), float("inf")])
def test_wrong_minutes_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^minutes: wanted a positive number, got "):
        KeepPerMinutes(wrong)  # type: ignore[arg-type]
