"""Skeletons that no state ever had: each is refused by name, and nothing is evaluated."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swansong.errors import MalformedError
from swansong.state.tree import unflatten
from tree_support import FrameworkTensor, identical, nested, round_trip

HOSTILE = {
    "unknown tag": ({"object": "os.system"}, "tag 'object'"),
    "no tag": ({}, "one tag, found 0"),
    "two tags": ({"tuple": [], "set": []}, "one tag, found 2"),
    "tag is no string": ({1: []}, "tag that is a string"),
    "missing tensor": ({"tensor": "w"}, "no tensor 'w'"),
    "missing array": ({"array": "w"}, "no tensor 'w'"),
    "tensor by number": ({"tensor": 3}, "name of a tensor"),
    "dict of an object": ({"dict": {}}, "wanted a list, found a dict"),
    "pair of one": ({"dict": [["a"]]}, "list of 2, found one of 1"),
    "pair of a string": ({"dict": ["ab"]}, "list of 2, found a str"),
    "key is a list": ({"dict": [[[], 1]]}, "a key is wrong"),
    "key is bytes": ({"dict": [[{"bytes": ""}, 1]]}, "cannot be a key"),
    "key is NaN": ({"dict": [[{"float": "nan"}, 1]]}, "NaN"),
    "key twice": ({"dict": [["a", 1], ["a", 2]]}, "key 'a' stands there twice"),
    "equal keys": ({"dict": [[1, 1], [True, 2]]}, "key True stands there twice"),
    "keys 9 tuples deep": ({"dict": [[json.loads('{"tuple":[' * 9 + "]}" * 9), 1]]}, "8 tuples"),
    "tuple of null": ({"tuple": None}, "wanted a list, found a NoneType"),
    "tuple key of null": ({"dict": [[{"tuple": None}, 1]]}, "list of keys"),
    "factory by path": ({"default": ["os.system", []]}, "unknown factory 'os.system'"),
    "factory is a list": ({"default": [[], []]}, "unknown factory"),
    "default without pairs": ({"default": ["dict"]}, "list of 2"),
    "set of lists": ({"set": [[]]}, "found a list"),
    "set of tensors": ({"set": [{"tensor": "t"}]}, "the tag 'tensor'"),
    "set with twins": ({"frozenset": [1, 1]}, "element twice"),
    "int in decimal": ({"int": "99999999999999999999"}, "hexadecimal"),
    "int with underscores": ({"int": "0x1_0"}, "hexadecimal"),
    "small int tagged": ({"int": "0x10"}, "must not be tagged"),
    "big int untagged": (2**63, "must be tagged"),
    "float untagged": (math.nan, "must be tagged"),
    "float of a number": ({"float": "1.5"}, "wanted nan"),
    "float of a list": ({"float": []}, "wanted nan"),
    "complex of one": ({"complex": [1.0]}, "two floats"),
    "complex of ints": ({"complex": [1, 2]}, "two floats"),
    "bytes of a number": ({"bytes": 3}, "base64"),
    "bytes not base64": ({"bytes": "a b="}, "base64"),
    "bytes not ASCII": ({"bytes": "äää="}, "base64"),
    "bytes in two forms": ({"bytes": "AB=="}, "base64"),
    "text without need": ({"text": "YQ=="}, "must not be tagged"),
    "text not UTF-8": ({"text": "/w=="}, "utf-8"),
    "numpy of objects": ({"numpy": ["object", "00"]}, "unknown dtype"),
    "numpy without values": ({"numpy": ["bfloat16", "0000"]}, "unknown dtype"),
    "numpy too short": ({"numpy": ["float32", "00"]}, "4 bytes"),
    "numpy not hexadecimal": ({"numpy": ["int8", "zz"]}, "hex"),
    "numpy in capitals": ({"numpy": ["int8", "FF"]}, "1 bytes"),
    "numpy bool of 2": ({"numpy": ["bool", "02"]}, "1 bytes"),
    "numpy of a list": ({"numpy": [["int8"], "00"]}, "dtype and the bytes"),
    "too deep": (nested(1000), "deep"),
    "not JSON": (b"bytes", "found a bytes"),
    "tuple of Python": ((1, 2), "found a tuple"),
}


@pytest.mark.parametrize(("skeleton", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_skeleton_is_refused_saying_where(skeleton: object, message: str) -> None:
    with pytest.raises(MalformedError) as caught:
        unflatten({"dict": [["optimizer", [skeleton]]]}, {"t": 1})
    assert str(caught.value).startswith("skeleton of optimizer[0]")
    assert message in str(caught.value)


LEAF_TAGS = ["int", "float", "complex", "bytes", "text", "numpy"]
NODE_TAGS = ["tensor", "array", "dict", "ordered", "counter", "default", "tuple", "set", "frozenset"]
json_nodes = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["0x1", "t"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*NODE_TAGS, *LEAF_TAGS, "x"]), inner, max_size=2),
    ),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(json_nodes)
def test_random_skeleton_is_refused_or_is_the_skeleton_of_what_it_gives(skeleton: object) -> None:
    try:
        state = unflatten(skeleton, {"t": FrameworkTensor(np.zeros(2))}, as_array=lambda tensor: tensor.array)
    except MalformedError:
        return
    assert identical(round_trip(state), state)
