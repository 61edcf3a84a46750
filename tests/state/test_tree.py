"""Nested state to flat tensors and tagged JSON, and back to the same state."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import date
from enum import IntEnum
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swansong.errors import MalformedError, UnrepresentableError
from swansong.state import tree
from swansong.state.tensors import HostTensor
from swansong.state.tree import flatten, join_path, split_path, unflatten
from tree_support import FrameworkTensor, as_tensor, identical, nested, round_trip

GOLDEN = Path(__file__).parent.parent / "golden" / "tree_optimizer.json"


texts = st.text(st.characters(), max_size=6)  # lone surrogates among them
numpy_scalars = st.sampled_from(
    ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64"]
).flatmap(lambda name: st.integers(0, 100).map(lambda value: np.dtype(name).type(value)))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), texts,
    st.binary(max_size=8), st.complex_numbers(), numpy_scalars,
)  # fmt: skip
plain_keys = st.one_of(texts, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
keys = st.recursive(plain_keys, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
arrays = st.tuples(
    st.sampled_from(["<f4", "<i8", "?", "<c16"]), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 9)
).map(lambda made: np.full(made[1], made[2], made[0]))
hashable_leaves = st.one_of(
    st.none(), st.integers(), st.floats(allow_nan=False), texts, st.binary(max_size=4)
)
nodes = st.recursive(
    st.one_of(leaves, arrays, arrays.map(FrameworkTensor)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=3).map(OrderedDict),
        st.dictionaries(plain_keys, inner, max_size=3).map(lambda items: defaultdict(dict, items)),
        st.sets(hashable_leaves, max_size=4),
        st.frozensets(hashable_leaves, max_size=4),
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "through",
    [lambda s: s, lambda s: json.loads(json.dumps(s)), lambda s: msgspec.json.decode(msgspec.json.encode(s))],
    ids=["as it is", "json", "msgspec"],
)
@settings(max_examples=200, deadline=None)
@given(nodes)
def test_any_state_comes_back_as_it_was(through, state: object) -> None:
    assert identical(round_trip(state, through), state)


@pytest.mark.parametrize(
    "state",
    [
        math.nan, -math.inf, -0.0, 5e-324, 1e22, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000,
        "", "\ud800", b"\xff\0", complex(-0.0, math.nan), np.float32(0.1), np.float64(0.1), np.bool_(True),
        [], (), {}, set(), frozenset({1, "1", b"1"}), {1: 0, "1": 1}, {True: 0}, {1.5: 0, -0.0: 1},
        {math.inf: 2}, {None: 0}, {(): 0, (0, ("a", None)): 1}, {"": {"": 0}}, OrderedDict(b=1, a=2),
        Counter({30: 2, 10: 1}), defaultdict(None, a=1), defaultdict(list, a=[1]), [[[None]]], ((),),
        np.zeros((0, 3)), np.array(3), {10**5000: np.array(1)},
    ],
    ids=lambda state: type(state).__name__,
)  # fmt: skip
def test_special_value_comes_back_exactly(state: object) -> None:
    assert identical(round_trip(state), state)


def optimizer_state() -> dict[str, object]:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        "model": OrderedDict(
            {"conv1.weight": FrameworkTensor(weight), "head.weight": FrameworkTensor(weight)}
        ),
        "optimizer": {
            "state": {
                0: {
                    "step": FrameworkTensor(np.array(7.0, np.float32)),
                    "exp_avg": FrameworkTensor(weight * 2),
                }
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0]}],
        },
        "scheduler": {"best": math.inf, "milestones": Counter({30: 1}), "last_epoch": -1},
        "rng": ("MT19937", np.arange(3, dtype=np.uint32), 624, np.float64(0.5), 2**127, b"\0\1"),
    }


def test_skeleton_of_an_optimizer_never_changes() -> None:
    flat = flatten(optimizer_state(), as_tensor)
    assert {"tensors": list(flat.tensors), "aliases": flat.aliases, "skeleton": flat.skeleton} == json.loads(
        GOLDEN.read_text()
    )


def test_golden_skeleton_is_read_as_the_state_it_was() -> None:
    flat = flatten(optimizer_state(), as_tensor)
    tensors = {name: FrameworkTensor(tensor.array) for name, tensor in flat.tensors.items()}
    golden = json.loads(GOLDEN.read_text())["skeleton"]
    assert identical(unflatten(golden, tensors, as_array=lambda tensor: tensor.array), optimizer_state())


def test_no_tensor_is_copied() -> None:
    state = {"a": np.zeros(3), "b": FrameworkTensor(np.zeros((4, 4))[::2, 1:])}
    flat = flatten(state, as_tensor)
    assert np.shares_memory(flat.tensors["a"].array, state["a"])
    assert np.shares_memory(flat.tensors["b"].array, state["b"].array)


def test_tied_tensor_is_stored_once_and_comes_back_tied() -> None:
    weight = np.ones((2, 2))
    flat = flatten({"embed": weight, "head": FrameworkTensor(weight.view()), "more": [weight]}, as_tensor)
    assert list(flat.tensors) == ["embed"]
    assert flat.aliases == {"head": "embed", "more/0": "embed"}
    token = object()
    state = unflatten(flat.skeleton, {"embed": token})
    assert state == {"embed": token, "head": token, "more": [token]}


@pytest.mark.parametrize(
    "other",
    [
        lambda w: w.T,
        lambda w: w[:1],
        lambda w: w.view("<i8"),
        lambda w: w.reshape(4),
        lambda w: w[::-1],
        lambda w: w.copy(),
    ],
    ids=["transposed", "part", "another type", "another shape", "reversed", "equal copy"],
)
def test_different_view_of_one_storage_is_stored_as_what_it_shows(other) -> None:
    weight = np.arange(4.0).reshape(2, 2)
    flat = flatten({"a": weight, "b": other(weight)}, as_tensor)
    assert not flat.aliases
    assert flat.tensors["b"].array.tolist() == other(weight).tolist()


def test_empty_tensors_are_never_tied() -> None:
    empty = np.zeros((0, 3))
    assert list(flatten([empty, empty], as_tensor).tensors) == ["0", "1"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("model", "conv1.weight"), "model/conv1.weight"),
        (("optimizer", "state", 0, "exp_avg"), "optimizer/state/0/exp_avg"),
        (("a/b", "~", "~s", "~1"), "a~1b/~0/~0s/~01"),
        (("0", "-3", "03", "-0", ""), "~s0/~s-3/03/-0/~s"),
        ((0, -3), "0/-3"),
        ((None, True, 1.5), "~knull/~ktrue/~k1.5"),
        (((0, "a/b"),), '~k{"tuple":[0,"a~1b"]}'),
        ((2**64,), '~k{"int":"0x10000000000000000"}'),
        (("\ud800",), '~k{"text":"7aCA"}'),
        ((), "~"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_name_is_readable_and_reversible(path: tuple, name: str) -> None:
    assert join_path(path) == name
    assert identical(split_path(name), path)


@settings(max_examples=400, deadline=None)
@given(st.lists(keys, max_size=4).map(tuple))
def test_every_path_has_a_name_of_its_own(path: tuple) -> None:
    name = join_path(path)
    assert identical(split_path(name), path)  # reversible, hence no two paths share a name
    name.encode()


@pytest.mark.parametrize(
    "name",
    ["", "a//b", "~2", "a/~", "~k", "~k[", "~kNaN", '~k"a"', "~k0", "~k{}", "~s1x", "~k[0]",
     "~k" + "[" * 100_000, "9999999999999999999", "a~"],
    ids=lambda name: name[:12] or "empty",
)  # fmt: skip
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(MalformedError, match="no name"):
        split_path(name)


class Color(IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


class MyList(list):
    pass


@pytest.mark.parametrize(
    ("state", "where", "what"),
    [
        (
            {"optimizer": {"state": {0: {"exp_avg": object()}}}},
            "optimizer['state'][0]['exp_avg']",
            "builtins.object",
        ),
        ({"a b": date(2026, 1, 1)}, "state['a b']", "datetime.date"),
        ([1, Pair(1, 2)], "state[1]", "Pair"),
        (Color.RED, "the state", "Color"),
        ({"x": MyList()}, "x", "MyList"),
        ({"x": {Color.RED: 1}}, "x", "key of type Color"),
        ({"x": {math.nan: 1}}, "x", "key of type float"),
        ({"x": {10**5000: Color.RED}}, "x[<a very large number>]", "Color"),
        ({"x": {(1, frozenset()): 1}}, "x", "key of type tuple"),
        ({"x": {b"k": 1}}, "x", "key of type bytes"),
        ({"x": {(1, 2)}}, "x", "tuple in a set"),
        ({"x": defaultdict(lambda: 0)}, "x", "defaultdict of <lambda>"),
        ({"x": np.array([None])}, "x", "type object"),
        ({"x": np.array(["a"])}, "x", "<U1"),
        ({"x": np.ma.array([1.0])}, "x", "MaskedArray"),
        ({"x": np.datetime64("2026-01-01")}, "x", "datetime64"),
        ({"x": np.longdouble(1)}, "x", "longdouble"),
        ({"x": np.str_("a")}, "x", "str_"),
        ({"x": bytearray(b"a")}, "x", "bytearray"),
        ({"x": 1j.conjugate}, "x", "builtin_function_or_method"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_exact_form_is_refused_saying_where(state: object, where: str, what: str) -> None:
    with pytest.raises(UnrepresentableError) as caught:
        flatten(state, as_tensor)
    assert str(caught.value).startswith(f"{where}: ")
    assert what in str(caught.value)


def test_error_of_the_adapter_says_where() -> None:
    def refuse(value: object) -> HostTensor | None:
        raise UnrepresentableError("quantized tensors cannot be stored")

    with pytest.raises(UnrepresentableError, match=r"^model\['w'\]: quantized"):
        flatten({"model": {"w": object()}}, refuse)


def test_cycle_is_refused() -> None:
    inner: list = []
    inner.append({"again": inner})
    with pytest.raises(UnrepresentableError, match=r"a\[0\]\['again'\]: this list contains itself"):
        flatten({"a": inner}, as_tensor)


def test_shared_container_is_no_cycle() -> None:
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_deepest_state_comes_back_and_a_deeper_one_is_refused() -> None:
    assert round_trip(nested(tree.DEPTH)) == nested(tree.DEPTH)
    with pytest.raises(UnrepresentableError, match=f"more than {tree.DEPTH} deep"):
        flatten(nested(tree.DEPTH + 1), as_tensor)


def test_skeleton_of_a_set_does_not_depend_on_its_order() -> None:
    one, other = {f"k{i}" for i in range(50)}, {f"k{i}" for i in reversed(range(50))}
    assert flatten(one, as_tensor).skeleton == flatten(other, as_tensor).skeleton == {"set": sorted(one)}
