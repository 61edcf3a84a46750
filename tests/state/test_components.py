"""Component keys and the world map."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swansong.errors import ConfigError
from swansong.state.boxes import Box
from swansong.state.components import Component, TensorShape, WorldMap, component_key

WEIGHT = TensorShape("float32", (4, 8), Box((0, 0), (2, 8)))
BIAS = TensorShape("bfloat16", (8,))
LAYER = {"layer.weight": WEIGHT, "layer.bias": BIAS}


def key(tensors: dict[str, TensorShape] = LAYER, placement: str | None = "ddp", rank: int = 0) -> str:
    return component_key(tensors, placement=placement, rank=rank)


@pytest.mark.parametrize(
    ("placement", "golden"),
    [("ddp", "687dfb349b8a76a0df4c24fcd5dd5963"), (None, "1315c5523982dd1c1b0b39c81628adbe")],
    ids=["placement_known", "placement_unknown"],
)
def test_a_key_stays_the_same_from_version_to_version(placement: str | None, golden: str) -> None:
    assert key(placement=placement, rank=3) == golden


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"layer.weight": WEIGHT, "layer.scale": BIAS}, id="name"),
        pytest.param({"layer.weight": BIAS, "layer.bias": WEIGHT}, id="names_exchanged"),
        pytest.param({"layer.weight": WEIGHT}, id="one_tensor_less"),
        pytest.param({**LAYER, "step": TensorShape("int64", ())}, id="one_tensor_more"),
        pytest.param({**LAYER, "layer.bias": replace(BIAS, dtype="float16")}, id="dtype"),
        pytest.param({**LAYER, "layer.bias": replace(BIAS, shape=(9,))}, id="shape"),
        pytest.param({**LAYER, "layer.bias": replace(BIAS, shape=(8, 1))}, id="number_of_axes"),
        pytest.param({**LAYER, "layer.weight": replace(WEIGHT, box=None)}, id="all_of_it"),
        pytest.param({**LAYER, "layer.weight": replace(WEIGHT, box=Box((2, 0), (2, 8)))}, id="box_offset"),
        pytest.param({**LAYER, "layer.weight": replace(WEIGHT, box=Box((0, 0), (3, 8)))}, id="box_shape"),
        pytest.param({}, id="nothing"),
    ],
)
@pytest.mark.parametrize("placement", ["ddp", None])
def test_a_key_changes_with_what_is_held(tensors: dict[str, TensorShape], placement: str | None) -> None:
    assert key(tensors, placement) != key(placement=placement)


def test_replicas_are_pooled_only_where_placement_is_known() -> None:
    assert key(placement="ddp", rank=0) == key(placement="ddp", rank=5)
    assert key(placement=None, rank=0) != key(placement=None, rank=5)
    assert key(placement=None, rank=0) == key(placement=None, rank=0)


@pytest.mark.parametrize("other", ["", "ddp ", "0", "rank", "null"])
def test_another_placement_is_another_key(other: str) -> None:
    assert key(placement=other) not in (key(placement="ddp"), key(placement=None))


@pytest.mark.parametrize("name", ["größe", "重み", "\ud800", "\0", '"],['], ids=ascii)
def test_any_text_may_be_a_name(name: str) -> None:
    assert key({name: BIAS}) != key({name.strip("\0") + " ": BIAS})


def test_the_order_of_tensors_makes_no_difference() -> None:
    assert key(dict(reversed(LAYER.items()))) == key(LAYER)


@pytest.mark.parametrize("shape", [(4, 8), (0,), ()], ids=str)
def test_a_box_of_the_whole_shape_says_the_same_as_none(shape: tuple[int, ...]) -> None:
    whole = {"w": TensorShape("float32", shape, Box.whole(shape))}
    assert key(whole) == key({"w": TensorShape("float32", shape)})


names = st.text(max_size=4)
sizes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
tensor_shapes = st.builds(TensorShape, st.sampled_from(["int8", "float32"]), sizes)
descriptions = st.tuples(
    st.dictionaries(names, tensor_shapes, max_size=3), st.none() | names, st.integers(0, 2)
)


@given(descriptions, descriptions)
def test_keys_are_equal_exactly_if_what_they_describe_is(
    one: tuple[dict[str, TensorShape], str | None, int], other: tuple[dict[str, TensorShape], str | None, int]
) -> None:
    """Whatever characters the names have: no two descriptions run into one text."""
    keys = [key(*described) for described in (one, other)]
    assert all(len(text) == 32 and set(text) <= set("0123456789abcdef") for text in keys)
    same = one[:2] == other[:2] and (one[1] is not None or one[2] == other[2])
    assert (keys[0] == keys[1]) == same


# -- the world map ----------------------------------------------------------------------------------------

A, B, C, D = (
    Component(name, f"part {name}", size) for name, size in zip("abcd", (10, 20, 30, 40), strict=True)
)


def test_the_map_tells_who_holds_what() -> None:
    world = WorldMap({2: (A, C), 0: (D, A), 1: (B, D, A)})
    assert world.world_size == 3
    assert world.components == {"a": A, "b": B, "c": C, "d": D}
    assert [world.holders(name) for name in "abcde"] == [(0, 1, 2), (1,), (2,), (0, 1), ()]
    assert world.sole_holders() == [(1, B), (2, C)]


@pytest.mark.parametrize(
    ("ranks", "lost"),
    [
        ((), ()),
        ((0,), ()),
        ((1,), (B,)),
        ((2,), (C,)),
        ((0, 1), (B,)),
        ((2, 1), (B, C)),
        ((0, 1, 2), (A, B, C)),
    ],
    ids=str,
)
def test_the_map_tells_what_ranks_take_with_them(ranks: tuple[int, ...], lost: tuple[Component, ...]) -> None:
    world = WorldMap({0: (A,), 1: (A, B), 2: (A, C)})
    assert sorted(world.lost_with(ranks), key=lambda c: c.key) == list(lost)
    assert sorted(world.lost_with(iter(ranks)), key=lambda c: c.key) == list(lost)


@pytest.mark.parametrize("sizes", [(10, 30, 20), (30, 10, 20), (10, 20, 30)])
def test_a_component_counts_with_the_size_of_its_largest_replica(sizes: tuple[int, ...]) -> None:
    world = WorldMap({rank: (replace(A, nbytes=size),) for rank, size in enumerate(sizes)})
    assert world.components["a"].nbytes == 30


def test_the_order_of_the_members_makes_no_difference() -> None:
    members = {0: (A, B), 1: (B, C), 2: (replace(A, label="other"),)}
    world, turned = WorldMap(members), WorldMap(dict(reversed(members.items())))
    assert world == turned
    assert list(world.components.items()) == list(turned.components.items())
    assert world.components["a"].label == "part a"
    assert world.holders("b") == turned.holders("b") == (0, 1)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 2), r"wanted 2 ranks from 0 to 1, got rank 2"),
        ((1,), r"wanted 1 ranks from 0 to 0, got rank 1"),
        ((-1, 0), r"wanted 2 ranks from 0 to 1, got rank -1"),
        ((0, 1, 2, 10**9), r"wanted 4 ranks from 0 to 3, got rank 1000000000$"),
        ((0, 16, 9), r"wanted 3 ranks from 0 to 2, got rank 9$"),
    ],
    ids=["gap", "no_rank_0", "negative", "far_off", "two_strangers"],
)
def test_a_map_with_a_gap_is_refused(ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorldMap(dict.fromkeys(ranks, (A,)))


def test_a_rank_that_names_a_component_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 names component 'part b' twice"):
        WorldMap({0: (B,), 1: (A, B, C, replace(B, nbytes=1))})
