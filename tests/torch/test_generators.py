"""What is drawn after a restore is what was drawn after the capture."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swansong.errors import LoadError, NotSupportedError
from swansong.torch import generator_memory
from swansong.torch.generators import Generators
from torch_feed import draws, seed_all, stored


@pytest.mark.parametrize("before", range(4), ids="after_{}_draws".format)
def test_draws_after_a_restore_repeat_those_after_the_capture(before):
    """An odd number of normal deviates leaves one in store, in each generator."""
    own = torch.Generator().manual_seed(5)
    generators = Generators({"own": own})
    seed_all(3)
    for _ in range(before):
        draws()
    state = stored(generators.capture())
    expected = [draws(), draws(), torch.rand(2, generator=own).tolist()]

    seed_all(4)
    own.manual_seed(6)
    fresh = Generators({"own": own})
    assert fresh.restore(state) == []

    assert [draws(), draws(), torch.rand(2, generator=own).tolist()] == expected


def test_capturing_draws_nothing():
    seed_all(3)
    expected = [draws() for _ in range(3)]
    generators = Generators()
    seed_all(3)

    found = []
    for _ in range(3):
        generators.capture()
        found.append(draws())

    assert found == expected


def numpy_normal(count):
    return lambda: np.random.randn(count)


@pytest.mark.parametrize(
    "steps",
    [
        [numpy_normal(1), numpy_normal(1), numpy_normal(1)],
        [lambda: None, numpy_normal(3), lambda: None, numpy_normal(1)],
        [lambda: np.random.rand(), lambda: np.random.seed(1), lambda: np.random.seed(1)],
        [lambda: np.random.rand(700), lambda: None, numpy_normal(2)],
    ],
    ids=["stored_normal_used_up", "still_between", "reseeded", "words_renewed"],
)
def test_a_state_read_from_memory_is_what_numpy_says(steps):
    generators = Generators()
    np.random.seed(2)
    for step in steps:
        step()
        full = np.random.get_state(legacy=False)

        state = generators.capture()["numpy"]

        assert state == {
            "key": full["state"]["key"].tobytes(),
            "pos": full["state"]["pos"],
            "gauss": full["gauss"] if full["has_gauss"] else None,
        }


def test_numpy_is_asked_where_its_memory_is_not_known(monkeypatch):
    monkeypatch.setattr(generator_memory, "deviate_in_numpy", lambda: None)
    seed_all(3)
    np.random.randn(1)
    slow = Generators().capture()

    monkeypatch.undo()

    assert slow == Generators().capture()


def test_another_generator_behind_numpy_random_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(NotSupportedError, match=r"numpy\.random draws from PCG64 here"):
            Generators().capture()
    finally:
        np.random.set_bit_generator(before)


def test_what_cannot_be_restored_is_listed_and_the_rest_restored():
    seed_all(3)
    kept, lost, new = torch.Generator(), torch.Generator(), torch.Generator()
    state = Generators({"kept": kept, "lost": lost}).capture()
    state |= {"cuda": [bytes(16), bytes(16)], "quantum": b""}
    expected = draws()
    seed_all(4)

    generators = Generators({"kept": kept, "new": new})
    foretold = generators.check(state)
    left_out = generators.restore(state)

    assert foretold == left_out
    assert left_out == [
        "cuda:0: there is no such device",
        "cuda:1: there is no such device",
        "new: its state was not saved",
        "lost: no generator of this name was given",
        "quantum: unknown to this version",
    ]
    assert draws() == expected


def changed(sort, **fields):
    return lambda state: {**state, sort: {**state[sort], **fields}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "wanted a dictionary with names as keys, found NoneType"),
        (lambda state: {1: 2}, "wanted a dictionary with names as keys, found dict"),
        (lambda state: {**state, "python": b""}, "python: wanted a dictionary"),
        (changed("python", words=bytes(7)), "python: words: wanted 2500 bytes, found 7 bytes"),
        (changed("python", words=b"\xff" * 2500), "python: wanted a position up to 624"),
        (changed("python", gauss="0"), "python: gauss: wanted a float or None, found str"),
        (changed("numpy", key="key"), "numpy: key: wanted 2496 bytes, found str"),
        (changed("numpy", pos=625), "numpy: pos: wanted an integer from 0 to 624, found 625"),
        (changed("numpy", gauss=1), "numpy: gauss: wanted a float or None, found int"),
        (lambda state: {**state, "torch": None}, "torch: wanted bytes, or a state in parts, found NoneType"),
        (lambda state: {**state, "torch": b""}, "torch: wanted bytes"),
        (
            lambda state: {**state, "torch": bytes(10)},
            "torch: these 10 bytes are no state of a generator on cpu",
        ),
        (lambda state: {**state, "torch": b"\xff" * 5056}, "torch: these 5056 bytes are no state"),
        (lambda state: {**state, "cuda": {}}, "cuda: wanted a list, found dict"),
        (lambda state: {**state, "named": [1]}, "named: wanted a dictionary"),
        (lambda state: {**state, "named": {"own": bytes(3)}}, "own: these 3 bytes are no state"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(change, message):
    generators = Generators({"own": torch.Generator()})
    seed_all(3)
    state = generators.capture()
    seed_all(4)
    before = generators.capture()

    with pytest.raises(LoadError, match=message):
        generators.restore(change(state))

    assert generators.capture() == before


def test_pythons_generator_is_its_own():
    """A deviate in store is part of the state, and `random.seed` forgets it."""
    generators = Generators()
    random.seed(1)
    random.gauss(0, 1)

    assert generators.capture()["python"]["gauss"] is not None
    random.seed(1)
    assert generators.capture()["python"]["gauss"] is None
