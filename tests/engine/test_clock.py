"""Update clocks: whole at a step, or not; never by mistake."""

from __future__ import annotations

import mmap
import threading
from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_process import forked
from swansong.engine.clock import UNKNOWN, Clock, ExternalClock, Reading, UpdateClock, held
from swansong.errors import ClockNotReadableError, ConfigError
from swansong.policy.cut import Held


def updated(clock: UpdateClock, times: int) -> None:
    for _ in range(times):
        clock.queue()
        with clock.window():
            pass


@pytest.mark.parametrize(
    ("reading", "step"),
    [
        pytest.param(Reading(3, 3, 3), 3, id="whole"),
        pytest.param(Reading(0, 0, 0), 0, id="whole-before-the-first-update"),
        pytest.param(Reading(4, 3, 3), None, id="queued"),
        pytest.param(Reading(4, 4, 3), None, id="in-the-window"),
        pytest.param(Reading(3, UNKNOWN, UNKNOWN), None, id="not-known-to-the-host"),
        pytest.param(Reading(UNKNOWN, UNKNOWN, UNKNOWN), None, id="nothing-known"),
        pytest.param(Reading(4, 3, 4), None, id="impossible"),
    ],
)
def test_a_component_is_whole_only_where_all_three_counters_agree(reading: Reading, step: int | None) -> None:
    assert reading.step == step


def test_an_update_is_whole_before_it_is_queued_and_after_its_window_and_nowhere_between() -> None:
    clock = UpdateClock("k", step=7)
    seen = [clock.read().step]
    clock.queue()
    seen.append(clock.read().step)
    with clock.window():
        seen.append(clock.read().step)
    seen.append(clock.read().step)
    assert seen == [7, None, None, 8]


def test_a_window_left_by_an_exception_is_never_whole_again_until_a_reset() -> None:
    clock = UpdateClock("k")
    clock.queue()
    with pytest.raises(ZeroDivisionError), clock.window():
        raise ZeroDivisionError
    assert clock.read() == Reading(1, 1, 0)
    updated(clock, 3)
    assert clock.read().step is None
    clock.reset(2)
    assert clock.read().step == 2


def test_an_update_that_has_not_passed_the_gate_is_refused() -> None:
    clock = UpdateClock("layer")
    with pytest.raises(RuntimeError, match="component layer: an update begins that has not passed the gate"):
        clock.begin()
    assert clock.read().step == 0


def test_a_skipped_step_counts_and_a_withdrawn_update_does_not() -> None:
    clock = UpdateClock("k")
    clock.skip()
    clock.queue()
    clock.withdraw()
    assert clock.read() == Reading(1, 1, 1)


@pytest.mark.parametrize(("begins", "step"), [(False, 0), (True, None)], ids=["not-begun", "half-done"])
def test_an_abandoned_update_leaves_a_whole_component_unless_it_had_begun(
    begins: bool, step: int | None
) -> None:
    clock = UpdateClock("k")
    clock.queue()
    if begins:
        clock.begin()
    clock.abandon()
    assert clock.read().step == step


def test_a_step_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="step of component k: wanted 0 or more, got -1"):
        UpdateClock("k", step=-1)


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(memoryview(array("q", [0, 0])), id="two-cells"),
        pytest.param(memoryview(array("i", [0, 0, 0])), id="32-bit-cells"),
        pytest.param(memoryview(array("q", [0, 0, 0])).toreadonly(), id="read-only"),
    ],
)
def test_cells_that_no_clock_can_live_in_are_refused(cells: memoryview) -> None:
    with pytest.raises(ConfigError, match="cells of clock k: wanted a writable memoryview of 3 int64"):
        UpdateClock("k", cells=cells)


def test_a_clock_lives_in_the_cells_it_is_given() -> None:
    cells = memoryview(array("q", [9, 9, 9]))
    updated(UpdateClock("k", step=1, cells=cells), 2)
    assert cells.tolist() == [3, 3, 3]


def test_an_external_clock_reads_begun_and_done_where_they_are_and_tells_its_cells_what_it_queued() -> None:
    counts = {"begun": 4, "done": 4}
    cells = memoryview(array("q", [0, 0, 0]))
    clock = ExternalClock(
        "k", read_begun=lambda: counts["begun"], read_done=lambda: counts["done"], step=4, cells=cells
    )
    assert clock.read().step == 4
    clock.queue()
    counts["begun"] = 5
    assert clock.read() == Reading(5, 5, 4)
    assert cells.tolist() == [5, UNKNOWN, UNKNOWN]


def test_an_external_clock_that_cannot_be_read_says_so_to_whoever_asks_where_it_stands() -> None:
    def not_yet() -> int:
        raise ClockNotReadableError("the device still works")

    clock = ExternalClock("k", read_begun=not_yet, read_done=not_yet)
    with pytest.raises(ClockNotReadableError, match="the device still works"):
        held(clock, lambda: "values")


class Interleaved:
    """A main thread that goes on, by so many actions, before, between and after the loads of its counts."""

    def __init__(self, actions: tuple[int, int, int]) -> None:
        self.actions = actions
        self.begun = self.done = self.taken = 0
        self.clock: Clock = ExternalClock("k", read_begun=self.read_begun, read_done=self.read_done)

    def act(self, times: int) -> None:
        for _ in range(times):
            match self.taken % 3:
                case 0:
                    self.clock.queue()
                case 1:
                    self.begun += 1
                case 2:
                    self.done += 1
            self.taken += 1

    def whole(self) -> int | None:
        return None if self.taken % 3 else self.done

    def read_begun(self) -> int:
        self.act(self.actions[0])
        begun = self.begun
        self.act(self.actions[1])
        return begun

    def read_done(self) -> int:
        done = self.done
        self.act(self.actions[2])
        return done


@given(st.tuples(*[st.integers(0, 8)] * 3))
def test_whatever_happens_between_its_loads_what_reads_whole_is_whole_at_the_last_of_them(
    actions: tuple[int, int, int],
) -> None:
    main = Interleaved(actions)
    step = main.clock.read().step
    assert step is None or step == main.whole()
    assert step is not None or main.whole() is None or sum(actions[1:])


@pytest.mark.parametrize(
    ("meanwhile", "found"),
    [
        pytest.param(lambda clock: None, Held(3, "digest"), id="nothing"),
        pytest.param(lambda clock: clock.queue(), Held(None), id="an-update-is-queued"),
        pytest.param(lambda clock: updated(clock, 1), Held(None), id="a-whole-update"),
    ],
)
def test_what_moves_while_its_values_are_digested_is_held_at_no_step(
    meanwhile: Callable[[UpdateClock], None], found: Held
) -> None:
    clock = UpdateClock("k", step=3)

    def values() -> str:
        meanwhile(clock)
        return "digest"

    assert held(clock, values) == found


def test_values_are_not_digested_inside_a_window() -> None:
    clock = UpdateClock("k", step=3)
    clock.queue()
    clock.begin()
    assert held(clock, lambda: pytest.fail("digested")) == Held(None)


def test_a_copy_made_during_updates_by_another_thread_is_never_taken_for_whole() -> None:
    clock = UpdateClock("k")
    values = np.zeros(1 << 16, np.int64)
    torn: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            copy = np.empty_like(values)

            def take(copy: np.ndarray = copy) -> str:
                np.copyto(copy, values)
                return ""

            step = held(clock, take).step
            if step is not None and not (copy == step).all():
                torn.append(step)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3000):
        clock.queue()
        with clock.window():
            np.add(values, 1, out=values)
    ended.set()
    watcher.join()
    assert not torn
    assert clock.read().step == 3000 == values[-1]


def test_a_forked_child_counts_for_itself() -> None:
    shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:24].cast("q")
    clock = UpdateClock("k", step=2, cells=shared)

    def child() -> None:
        updated(clock, 5)
        assert clock.read().step == 7

    assert forked(child) == 0
    assert shared.tolist() == [2, 2, 2]
    assert clock.read().step == 2
