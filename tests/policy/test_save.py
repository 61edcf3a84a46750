"""Save policies: rows at the edges, and whole runs against plainly written loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swansong.errors import ConfigError
from swansong.policy.checks import brief, shown
from swansong.policy.save import EverySeconds, EverySteps, Never, SavePoint, SavePolicy

DAY_S = 86_400.0


def point(step: int = 0, last_step: int = 0, now_s: float = 0.0, last_s: float = 0.0) -> SavePoint:
    return SavePoint(step, last_step, now_s, last_s)


@pytest.mark.parametrize(
    ("policy", "at", "due"),
    [
        pytest.param(EverySteps(1), point(1), True, id="every_step_at_the_first"),
        pytest.param(EverySteps(1), point(7, 7), False, id="every_step_not_twice_at_one_step"),
        pytest.param(EverySteps(3), point(2), False, id="one_step_early"),
        pytest.param(EverySteps(3), point(3), True, id="just_due"),
        pytest.param(EverySteps(3), point(10, 8), False, id="passed_a_multiple_but_saved_lately"),
        pytest.param(EverySteps(3), point(10, 5), True, id="sink_jumped_over_the_due_step"),
        pytest.param(EverySteps(3), point(52, 50), False, id="counts_from_the_step_resumed_from"),
        pytest.param(EverySteps(3), point(40, 50), False, id="step_behind_the_last_save"),
        pytest.param(EverySteps(3), point(0, 0, DAY_S), False, id="steps_ignore_time"),
        pytest.param(EverySeconds(10), point(1, 0, 110.0, 100.0), False, id="exactly_as_many_seconds"),
        pytest.param(
            EverySeconds(10), point(1, 0, math.nextafter(110.0, 111.0), 100.0), True, id="just_more"
        ),
        pytest.param(EverySeconds(0.5), point(1, 0, 100.6, 100.0), True, id="fraction_of_a_second"),
        pytest.param(EverySeconds(10), point(10**6, 0, 105.0, 100.0), False, id="seconds_ignore_steps"),
        pytest.param(EverySeconds(10**400), point(1, 0, DAY_S), False, id="more_seconds_than_a_float_holds"),
        pytest.param(Never(), point(10**6, 0, DAY_S), False, id="never"),
    ],
)
def test_due_or_not(policy: SavePolicy, at: SavePoint, due: bool) -> None:
    assert policy.wants(at) is due


@given(
    every=st.integers(1, 20),
    start=st.integers(0, 1000),
    strides=st.lists(st.integers(1, 9), max_size=60),
)
def test_steps_save_at_the_first_boundary_not_before_the_due_step(
    every: int, start: int, strides: list[int]
) -> None:
    policy = EverySteps(every)
    saved, step, last = [], start, start
    for stride in strides:
        step += stride
        if policy.wants(SavePoint(step, last, 0.0, 0.0)):
            saved.append(step)
            last = step

    boundaries = [start + sum(strides[: k + 1]) for k in range(len(strides))]
    expected, due = [], start + every
    for boundary in boundaries:
        if boundary >= due:
            expected.append(boundary)
            due = boundary + every
    assert saved == expected


@given(seconds=st.integers(1, 50), gaps=st.lists(st.integers(0, 30), max_size=60))
def test_seconds_save_at_the_first_boundary_after_the_due_time(seconds: int, gaps: list[int]) -> None:
    policy = EverySeconds(seconds)
    saved, now, last = [], 1000, 1000
    for step, gap in enumerate(gaps, 1):
        now += gap
        if policy.wants(SavePoint(step, 0, float(now), float(last))):
            saved.append(now)
            last = now

    for earlier, later in zip([1000, *saved], saved, strict=False):
        assert later - earlier > seconds
    times = [1000 + sum(gaps[: k + 1]) for k in range(len(gaps))]
    for time in times:
        since = max([1000, *(t for t in saved if t <= time)])
        assert time - since <= seconds


def test_steps_of_one_save_at_every_boundary() -> None:
    assert all(EverySteps(1).wants(SavePoint(step, step - 1, 0.0, 0.0)) for step in range(1, 50))


@pytest.mark.parametrize(
    "wrong", [0, -1, None, True, np.bool_(True), 1.0, "3", [1], np.float64(2), np.array(3)]
)
def test_wrong_steps_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^steps: wanted a positive int, got "):
        EverySteps(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [0, -1, 0.0, -0.5, math.nan, math.inf, None, False, "3", np.float32(2), np.timedelta64(5, "m")]
)
def test_wrong_seconds_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"^seconds: wanted a positive number, got "):
        EverySeconds(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16, np.uint64])
def test_numpy_integers_become_ints(kind: type[np.integer]) -> None:
    assert type(EverySteps(kind(3)).steps) is int  # type: ignore[arg-type]
    assert EverySteps(kind(3)) == EverySteps(3)  # type: ignore[arg-type]


def test_policies_are_values() -> None:
    assert EverySteps(3) == EverySteps(3) != EverySteps(4)
    assert hash(EverySeconds(3)) == hash(EverySeconds(3))
    with pytest.raises(AttributeError):
        EverySteps(3).steps = 4  # type: ignore[misc]


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


class BytesLike(bytes):
    pass


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(10**6000, id="number_too_long_to_print"),
        pytest.param("x" * 10**6, id="long_text"),
        pytest.param([[["x" * 1000] * 1000] * 1000] * 1000, id="deep_and_wide"),
        pytest.param(Unspeakable(), id="repr_that_raises"),
    ],
)
def test_description_of_a_refused_value_is_short(value: object) -> None:
    assert len(brief(value)) <= 200


@pytest.mark.parametrize("wrap", [bytes, bytearray, BytesLike, lambda b: [b], lambda b: {"key": (b,)}])
def test_description_of_a_refused_value_shows_no_bytes(wrap: object) -> None:
    assert "ecret" not in shown(wrap(b"secret"))  # type: ignore[operator]
    assert "<6 bytes>" in brief(wrap(b"secret"))  # type: ignore[operator]
