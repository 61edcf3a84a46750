"""The native container's data files: bytes, order, alignment, and that what is written is read."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetensors_support import MemorySource, file_bytes, header_of, host_tensors, same, sample
from swansong.errors import MalformedError, UnrepresentableError
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store import safetensors
from swansong.store.source import read_tensor

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


def small() -> dict[str, HostTensor]:
    return {
        "model/flag": HostTensor.of(np.array([True, False, True])),
        "model/conv1.weight": HostTensor.of(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "model/half": HostTensor.of(np.array([0x3F80, 0xC000], np.uint16), dtype="bfloat16"),
        "model/empty": HostTensor.of(np.zeros((0, 3), np.int16)),
        "optimizer/step": HostTensor.of(np.array(7, np.int64)),
        "größe/ü\n": HostTensor.of(np.array([1 + 2j, 3 - 4j])),
    }


def back(data: bytes, logical: dict[str, HostTensor]) -> dict[str, HostTensor]:
    source = MemorySource(data)
    entries = safetensors.scan(source).entries
    return {
        name: read_tensor(source, safetensors.logical_form(entries[name], tensor.dtype))
        for name, tensor in logical.items()
    }


def test_bytes_of_a_small_file_never_change() -> None:
    data = file_bytes(safetensors.layout(small(), metadata={"swansong.id": "0011"}, aligned=False))
    assert data == (GOLDEN / "safetensors_small.safetensors").read_bytes()


def test_aligned_file_differs_from_the_small_one_in_spaces_and_length_only() -> None:
    golden = (GOLDEN / "safetensors_small.safetensors").read_bytes()
    data = file_bytes(safetensors.layout(small(), metadata={"swansong.id": "0011"}))
    assert header_of(data).rstrip() == header_of(golden).rstrip()
    assert data[4096:] == golden[8 + len(header_of(golden)) :]


def test_golden_file_is_read() -> None:
    golden = MemorySource((GOLDEN / "safetensors_small.safetensors").read_bytes())
    header = safetensors.scan(golden)
    assert header.metadata == {"swansong.id": "0011"}
    assert all(same(got, small()[name]) for name, got in back(golden.data, small()).items())


def test_tensors_stand_by_falling_item_size_then_as_given() -> None:
    kinds = ["uint8", "float32", "int64", "bool", "complex64", "complex128", "int32", "bfloat16"]
    layout = safetensors.layout({kind: sample(kind, (3,)) for kind in kinds})
    order = [extent.name for extent in layout.extents()]
    assert order == ["int64", "complex64", "complex128", "float32", "int32", "bfloat16", "uint8", "bool"]


@pytest.mark.parametrize(("aligned", "unit"), [(True, 4096), (False, 8)], ids=["aligned", "as the library"])
@pytest.mark.parametrize("padding", range(0, 4200, 700))
def test_first_element_is_aligned(aligned: bool, unit: int, padding: int) -> None:
    layout = safetensors.layout({"x" * padding: sample("float64", (5,))}, aligned=aligned)
    start = layout.extents()[0].start
    assert start % unit == 0
    assert start - unit < len(header_of(file_bytes(layout)).rstrip()) + 8 <= start


def test_no_tensor_is_copied() -> None:
    tensors = {name: sample(name, (4, 4)) for name in sorted(DTYPES)}
    tensors["transposed"] = HostTensor.of(np.zeros((3, 4), np.complex128).T)
    segments = {s.name: s.data for s in safetensors.layout(tensors).segments if s.name is not None}
    assert set(segments) == set(tensors)
    for name, data in segments.items():
        assert isinstance(data, HostTensor)
        assert np.shares_memory(data.array, tensors[name].array), name


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(NAMES, host_tensors(), max_size=8),
    st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
    st.booleans(),
)
def test_whatever_is_laid_out_is_read_back(
    tensors: dict[str, HostTensor], metadata: dict[str, str], aligned: bool
) -> None:
    data = file_bytes(safetensors.layout(tensors, metadata=metadata, aligned=aligned))
    header = safetensors.scan(MemorySource(data))
    assert header.metadata == metadata
    assert header.entries.keys() == tensors.keys()
    for name, got in back(data, tensors).items():
        assert same(got, tensors[name]), name


@pytest.mark.parametrize(
    "name", ["__metadata__", "a\ud800", 3], ids=["reserved", "surrogate", "not a string"]
)
@pytest.mark.parametrize("act", [safetensors.layout, safetensors.split], ids=["layout", "split"])
def test_name_that_the_format_cannot_carry_is_named(act, name) -> None:
    with pytest.raises(
        UnrepresentableError, match=str(name).encode("ascii", "backslashreplace").decode()[-4:]
    ):
        act({name: sample("int8", (1,))})


@pytest.mark.parametrize(
    "metadata", [{"k\udc00": "v"}, {"k": "v\udc00"}, {"k": 1}], ids=["key", "value", "type"]
)
def test_metadata_that_json_cannot_carry_is_named(metadata) -> None:
    with pytest.raises(UnrepresentableError, match=r"metadata.*k"):
        safetensors.layout({}, metadata=metadata)


def test_header_beyond_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    fixed = len(header_of(file_bytes(safetensors.layout({"": sample("int8", (1,))}, aligned=False))).rstrip())
    fits = {"x" * (safetensors.HEADER_LIMIT - fixed): sample("int8", (1,))}
    assert safetensors.layout(fits, aligned=False).size == 8 + safetensors.HEADER_LIMIT + 1
    with pytest.raises(UnrepresentableError, match="100000000"):
        safetensors.layout({next(iter(fits)) + "x": sample("int8", (1,))}, aligned=False)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAMES, host_tensors(), max_size=10), st.integers(200, 600))
def test_split_keeps_all_in_order_and_every_header_under_the_limit(
    tensors: dict[str, HostTensor], limit: int
) -> None:
    groups = safetensors.split(tensors, limit=limit)
    assert [name for group in groups for name in group] == list(tensors)
    assert all(group[name] is tensors[name] for group in groups for name in group)
    for group in groups:
        header = header_of(file_bytes(safetensors.layout(group, aligned=False)))
        assert len(header.rstrip()) <= limit
    for one, following in pairwise(groups):
        grown = {**one, **dict([next(iter(following.items()))])}
        slack = 2 * 20 * len(grown)  # offsets are counted with the digits of the largest
        assert len(header_of(file_bytes(safetensors.layout(grown, aligned=False)))) + slack > limit


def test_split_names_a_tensor_that_no_file_can_hold() -> None:
    with pytest.raises(UnrepresentableError, match="'long"):
        safetensors.split({"a": sample("int8", (1,)), "long" * 50: sample("int8", (1,))}, limit=150)


def test_nothing_to_split_gives_no_files() -> None:
    assert safetensors.split({}) == []


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)], ids=str)
def test_complex128_is_stored_as_pairs_and_means_itself(shape: tuple[int, ...]) -> None:
    tensor = sample("complex128", shape)
    stored = safetensors.stored_form(tensor)
    assert (stored.dtype.name, stored.shape) == ("float64", (*shape, 2))
    assert stored.array.tobytes() == tensor.array.tobytes()
    assert same(back(file_bytes(safetensors.layout({"z": tensor})), {"z": tensor})["z"], tensor)


@pytest.mark.parametrize(
    ("stored", "shape", "logical"),
    [("float64", (2, 3), "complex128"), ("float32", (2,), "complex128"), ("int8", (4,), "uint8")],
    ids=["not pairs", "not doubles", "another type"],
)
def test_stored_type_that_cannot_mean_the_logical_one_is_damage(stored, shape, logical) -> None:
    data = file_bytes(safetensors.layout({"z": sample(stored, shape)}))
    entry = safetensors.scan(MemorySource(data)).entries["z"]
    with pytest.raises(MalformedError, match=logical) as caught:
        safetensors.logical_form(entry, DTYPES[logical])
    assert caught.value.tensor == "z"


def test_header_is_compact_json_in_file_order() -> None:
    data = file_bytes(
        safetensors.layout({"b": sample("int8", (2,)), "a": sample("int16", ())}, metadata={"m": "1"})
    )
    assert header_of(data).rstrip() == (
        b'{"__metadata__":{"m":"1"},"a":{"dtype":"I16","shape":[],"data_offsets":[0,2]},'
        b'"b":{"dtype":"I8","shape":[2],"data_offsets":[2,4]}}'
    )
    assert list(json.loads(header_of(data))) == ["__metadata__", "a", "b"]
