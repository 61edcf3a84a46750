"""The watchdog, over invented time: a stall is a step that takes far too long, and nothing else is."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swansong.engine.watchdog import FACTOR, WINDOW, StallOptions, Watchdog
from swansong.errors import ConfigError

FLOOR = 60.0


class Rank:
    """A training loop and the thread that asks every second."""

    def __init__(self, options: StallOptions | None = None) -> None:
        self.now = 1000.0
        self.dog = Watchdog(options or StallOptions(), self.now, monotonic=lambda: self.now)

    def passes(self, seconds: float) -> list[tuple[float, str]]:
        """Let time pass; return what was found, and after how long."""
        start, found = self.now, []
        while self.now < start + seconds:
            self.now = min(self.now + 1.0, start + seconds)
            words = self.dog.stalled(self.now)
            if words is not None:
                found.append((self.now - start, words))
        return found

    def steps(self, *seconds: float) -> None:
        """Take steps of these durations, none of them a stall."""
        for duration in seconds:
            assert self.passes(duration) == []
            self.dog.note_step(self.now)


@pytest.mark.parametrize(
    ("durations", "allowed"),
    [
        pytest.param([1.0], FLOOR, id="first-step-only"),
        pytest.param([500.0, 1.0, 1.0], FLOOR, id="compilation-does-not-count"),
        pytest.param([1.0, 12.0], FLOOR, id="at-the-floor"),
        pytest.param([1.0, 20.0, 3.0], 100.0, id="five-times-the-slowest"),
        pytest.param([1.0, 50.0, *[1.0] * (WINDOW - 1)], 250.0, id="slowest-still-among-the-last-100"),
        pytest.param([1.0, 50.0, *[1.0] * WINDOW], FLOOR, id="slowest-not-among-them-any-more"),
    ],
)
def test_a_step_may_take_five_times_the_slowest_of_the_last_100_and_never_less_than_the_floor(
    durations: list[float], allowed: float
) -> None:
    rank = Rank()
    rank.steps(*durations)
    assert rank.dog.stall_timeout_s() == allowed
    first, _ = rank.passes(allowed + 5)[0]
    assert first == allowed + 1


@pytest.mark.parametrize(
    ("timeout", "waits", "found"),
    [(1800.0, 1800.0, 0), (1800.0, 1802.0, 2), (None, 50_000.0, 0), (5.0, 7.0, 2)],
    ids=["within", "beyond", "none", "short"],
)
def test_the_first_step_has_a_limit_of_its_own(timeout: float | None, waits: float, found: int) -> None:
    rank = Rank(StallOptions(first_step_timeout_s=timeout))
    assert len(rank.passes(waits)) == found


def test_the_words_say_how_long_and_why() -> None:
    rank = Rank()
    assert rank.passes(1801)[0][1] == "the first step has not ended for 1801 s; 1800 s are allowed"
    rank.dog.note_step(rank.now)
    rank.steps(1.0, 20.0)
    assert rank.passes(101) == [
        (101, "no step has ended for 101 s; 100 s are allowed: the slowest of the last 2 took 20.0 s")
    ]


def test_inside_phases_nothing_is_a_stall_and_their_time_counts_for_no_step() -> None:
    rank = Rank()
    rank.steps(1.0, 2.0)
    assert rank.passes(30) == []
    with rank.dog.phase("evaluate"):
        assert rank.passes(10_000) == []
        with rank.dog.phase("upload"):
            assert rank.dog.phases == ("evaluate", "upload")
            assert rank.passes(10_000) == []
        assert rank.dog.phases == ("evaluate",)
        assert rank.passes(10_000) == []
    rank.steps(45)
    assert rank.dog.stall_timeout_s() == FACTOR * 75


def test_a_phase_left_by_an_exception_has_ended() -> None:
    rank = Rank()
    rank.steps(1.0, 1.0)
    with pytest.raises(ZeroDivisionError), rank.dog.phase("evaluate"):
        raise ZeroDivisionError
    assert rank.dog.phases == ()
    assert rank.passes(FLOOR + 1)


def test_while_held_nothing_is_a_stall_and_the_time_counts_for_no_step() -> None:
    rank = Rank()
    rank.steps(1.0, 2.0)
    rank.dog.hold(rank.now)
    with rank.dog.phase("evaluate"):
        rank.dog.hold(rank.now)
        assert rank.passes(500) == []
    assert rank.passes(500) == []
    rank.dog.go_on(rank.now)
    rank.steps(3.0)
    assert rank.dog.stall_timeout_s() == FLOOR
    assert rank.passes(FLOOR + 1)


def test_a_phase_that_outlasts_a_hold_is_still_a_phase() -> None:
    rank = Rank()
    rank.steps(1.0, 1.0)
    rank.dog.hold(rank.now)
    with rank.dog.phase("evaluate"):
        rank.dog.go_on(rank.now)
        assert rank.passes(500) == []
    assert rank.passes(FLOOR + 1)


@pytest.mark.parametrize("held", [False, True], ids=["in-a-phase", "held"])
def test_a_step_that_was_not_watched_whole_does_not_count(held: bool) -> None:
    rank = Rank()
    rank.steps(1.0, 40.0)
    with ExitStack() as stack:
        if held:
            rank.dog.hold(rank.now)
        else:
            stack.enter_context(rank.dog.phase("train"))
        for _ in range(2 * WINDOW):
            rank.steps(0.5)
    rank.dog.go_on(rank.now)
    assert rank.dog.stall_timeout_s() == 200


@pytest.mark.parametrize(
    ("progress", "again"),
    [
        pytest.param(lambda rank: None, False, id="nothing"),
        pytest.param(lambda rank: (rank.dog.hold(rank.now), rank.dog.go_on(rank.now)), False, id="saved"),
        pytest.param(lambda rank: rank.dog.note_step(rank.now), True, id="a-step"),
    ],
)
def test_the_same_stall_is_reported_once(progress: Callable[[Rank], object], again: bool) -> None:
    rank = Rank()
    rank.steps(1.0, 1.0)
    assert len(rank.passes(FLOOR + 3)) == 3
    rank.dog.acknowledge()
    progress(rank)
    assert bool(rank.passes(20 * FLOOR)) is again


def test_a_phase_that_ends_after_a_stall_is_progress() -> None:
    rank = Rank()
    rank.steps(1.0, 1.0)
    rank.passes(FLOOR + 1)
    rank.dog.acknowledge()
    with rank.dog.phase("evaluate"):
        pass
    assert rank.passes(FLOOR + 1)


def test_a_process_that_was_stopped_is_not_stalled_and_its_stop_counts_for_no_step() -> None:
    rank = Rank()
    rank.steps(1.0, 1.0)
    assert rank.passes(20) == []
    rank.now += 100_000
    assert rank.dog.stalled(rank.now) is None
    assert rank.passes(FLOOR) == []
    rank.dog.note_step(rank.now)
    assert rank.dog.stall_timeout_s() == FACTOR * 80


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "60", True, None])
def test_a_floor_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="floor_s: wanted a positive number"):
        StallOptions(floor_s=value)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_a_limit_of_the_first_step_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="first_step_timeout_s: wanted a positive number"):
        StallOptions(first_step_timeout_s=value)


Happening = tuple[str, float]
HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["step", "enter", "leave", "hold", "go on", "nothing"]),
        st.sampled_from([0.0, 0.5, 3.0, 13.0, 59.0, 61.0, 200.0]),
    ),
    max_size=25,
)


class Model:
    """The rule by its definition, from a log of all that happened: seconds watched, one by one."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self.steps = 0
        self.spent = self.waited = 0.0
        self.depth = 0
        self.held = False

    def happens(self, what: str) -> None:
        before = self.watched
        match what:
            case "step":
                if self.watched:
                    self.durations += [self.spent] if self.steps else []
                    self.steps += 1
                self.spent = self.waited = 0.0
            case "enter":
                self.depth += 1
            case "leave":
                self.depth -= 1
            case "hold" | "go on":
                self.held = what == "hold"
        if self.watched and not before:
            self.waited = 0.0

    @property
    def watched(self) -> bool:
        return not self.depth and not self.held

    @property
    def allowed(self) -> float:
        return max(FLOOR, 5 * max(self.durations[-100:], default=0.0)) if self.steps else 1800.0

    def passes(self, seconds: float) -> bool:
        """Whether it is a stall after as much time more."""
        if self.watched:
            self.spent += seconds
            self.waited += seconds
        return self.watched and self.waited > self.allowed


@given(HAPPENINGS)
def test_it_finds_what_the_definition_says(happenings: list[Happening]) -> None:
    rank, model = Rank(), Model()
    phases: list[ExitStack] = []
    for what, seconds in happenings:
        match what:
            case "step":
                rank.dog.note_step(rank.now)
            case "enter":
                phases.append(ExitStack())
                phases[-1].enter_context(rank.dog.phase("phase"))
            case "leave" if phases:
                phases.pop().close()
            case "hold":
                rank.dog.hold(rank.now)
            case "go on":
                rank.dog.go_on(rank.now)
            case _:
                what = "nothing"
        model.happens(what)
        while seconds > 0:
            tick = min(1.0, seconds)
            seconds -= tick
            rank.now += tick
            assert (rank.dog.stalled(rank.now) is not None) == model.passes(tick)
    assert rank.dog.stall_timeout_s() == model.allowed
