"""Malformed safetensors files: each is refused by name, and nothing is accepted that the library refuses."""

import re

import pytest
import safetensors as library
from hypothesis import given, settings
from hypothesis import strategies as st

from safetensors_support import MemorySource, file_bytes, file_of, sample
from swansong.errors import MalformedError, NotSupportedError
from swansong.store import safetensors


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def scan(data: bytes) -> safetensors.Header:
    return safetensors.scan(MemorySource(data))


FOUR = b"1234"
CASES = {
    "empty file": (b"", "has 0 bytes"),
    "no whole length": (b"\x02\0\0\0", "has 4 bytes"),
    "length beyond the file": ((9).to_bytes(8, "little") + b"{}", "claims 9 bytes"),
    "length beyond the limit": ((100_000_001).to_bytes(8, "little") + b"{}", "at most 100000000"),
    "length of 2^64 - 1": (b"\xff" * 8 + b"{}", "claims 18446744073709551615"),
    "empty header": (file_of(b""), 'begin with "{"'),
    "leading space": (file_of(b" {}"), 'begin with "{"'),
    "byte order mark": (file_of(b"\xef\xbb\xbf{}"), 'begin with "{"'),
    "an array": (file_of(b"[]"), 'begin with "{"'),
    "cut JSON": (file_of(b'{"a":{"dtype"'), "not what safetensors asks for"),
    "two documents": (file_of(b"{}{}"), "trailing"),
    "zero padding": (file_of(b"{}\0\0"), "trailing"),
    "bad UTF-8": (file_of(b'{"a\xff":{}}'), "UTF-8"),
    "lone surrogate": (file_of(b'{"a\\ud800":{}}'), "not what safetensors asks for"),
    "lone low surrogate": (file_of(b'{"a\\udc00":{}}'), "not what safetensors asks for"),
    "NaN": (file_of(b'{"a":{"shape":NaN}}'), "not what safetensors asks for"),
    "deep arrays": (file_of(b'{"a":{"shape":' + b"[" * 1_000_000), "not what safetensors asks for"),
    "deep objects": (file_of(b'{"a":' * 1_000_000), "not what safetensors asks for"),
    "entry is a list": (file_of({"a": []}, FOUR), "object"),
    "entry is null": (file_of({"a": None}, FOUR), "object"),
    "no dtype": (file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, FOUR), "wanted a dtype"),
    "unknown field": (file_of({"a": entry(strides="1")}, FOUR), "nothing else"),
    "unknown dtype": (file_of({"a": entry("f32")}, FOUR), "'f32' is none of"),
    "dtype is a number": (file_of({"a": entry(1)}, FOUR), "str"),
    "dtype is a list": (file_of({"a": entry([1])}, FOUR), "wanted a dtype"),
    "shape is a string": (file_of({"a": entry(shape="1")}, FOUR), "a shape"),
    "negative dimension": (file_of({"a": entry(shape=[-1])}, FOUR), ">= 0"),
    "fractional dimension": (file_of({"a": entry(shape=[1.0])}, FOUR), "int"),
    "dimension of 2^63": (file_of({"a": entry(shape=[2**63])}, FOUR), "<= 9223372036854775807"),
    "dimension of 5000 digits": (
        file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', FOUR),
        "range",
    ),
    "dimension is true": (file_of({"a": entry(shape=[True])}, FOUR), "bool"),
    "product beyond memory": (file_of({"a": entry(shape=[2**62, 2**62])}, FOUR), "no memory"),
    "empty beyond memory": (file_of({"a": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}), "no memory"),
    "too many dimensions": (file_of({"a": entry(shape=[1] * 65)}, FOUR), "65 dimensions"),
    "a million dimensions": (file_of({"a": entry(shape=[2**62] * 1_000_000)}, FOUR), "1000000 dimensions"),
    "three offsets": (file_of({"a": entry(offsets=[0, 2, 4])}, FOUR), "list of two"),
    "offsets backwards": (file_of({"a": entry(offsets=[4, 0])}, FOUR), "give -4"),
    "offsets too long": (file_of({"a": entry(offsets=[0, 5])}, FOUR + b"5"), "takes 4 bytes"),
    "offsets beyond the file": (file_of({"a": entry(shape=[2], offsets=[0, 8])}, FOUR), "the file at"),
    "bytes behind the last": (file_of({"a": entry()}, FOUR + b"5"), "the file at"),
    "bytes without tensors": (file_of({}, FOUR), "the file at"),
    "hole before": (file_of({"a": entry(offsets=[4, 8])}, FOUR * 2), "leaves a hole"),
    "hole between": (file_of({"a": entry(), "b": entry(offsets=[8, 12])}, FOUR * 3), "'b' leaves a hole"),
    "overlap": (
        file_of({"a": entry(shape=[2], offsets=[0, 8]), "b": entry(offsets=[4, 8])}, FOUR * 2),
        "overlap",
    ),
    "same bytes twice": (file_of({"a": entry(), "b": entry()}, FOUR), "'b' overlaps"),
    "empty inside another": (
        file_of({"a": entry(), "b": entry(shape=[0], offsets=[2, 2])}, FOUR),
        "'b' overlaps",
    ),
    "tensor twice": (
        file_of(b'{"a":{"dtype":"I8","shape":[],"data_offsets":[0,1]},"a":{}}', b"1"),
        "key 'a' twice",
    ),
    "field twice": (
        file_of(b'{"a":{"dtype":"I8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"1"),
        "key 'dtype' twice",
    ),
    "escaped twin": (
        file_of(b'{"a":{"dtype":"I8","shape":[],"data_offsets":[0,1]},"\\u0061":{}}', b"1"),
        "key 'a' twice",
    ),
    "metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}'), "key '__metadata__' twice"),
    "metadata key twice": (file_of(b'{"__metadata__":{"k":"1","k":"1"}}'), "key 'k' twice"),
    "metadata of numbers": (file_of({"__metadata__": {"k": 1}}), "str"),
    "metadata of lists": (file_of({"__metadata__": {"k": [1]}}), "'k' is not a string"),
    "metadata null": (file_of({"__metadata__": None}), "object"),
    "huge name in the message": (file_of({"n" * 1_000_000: entry("?")}, FOUR), "1000002 characters"),
}


@pytest.mark.parametrize(("data", "message"), CASES.values(), ids=CASES.keys())
def test_malformed_file_is_refused_saying_what(data: bytes, message: str) -> None:
    with pytest.raises(MalformedError) as caught:
        scan(data)
    assert message in str(caught.value)
    assert str(caught.value).startswith("c0.safetensors: ")
    assert len(str(caught.value)) < 1000
    assert caught.value.file == "c0.safetensors"
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(data)


def test_error_names_the_tensor_and_the_byte() -> None:
    data = file_of({"a": entry(), "b": entry(offsets=[8, 12])}, FOUR * 3)
    with pytest.raises(MalformedError) as caught:
        scan(data)
    assert (caught.value.tensor, caught.value.offset) == ("b", len(data) - 8)


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_types_are_refused_by_name(code: str) -> None:
    with pytest.raises(NotSupportedError, match=code):
        scan(file_of({"a": entry(code, [8], [0, 4])}, FOUR))


@pytest.mark.parametrize(
    "data",
    [
        file_of({}),
        file_of(b"{}     "),
        file_of(b'{"__metadata__":{}}\n\t\r '),
        file_of({"": entry()}, FOUR),
        file_of({"e": entry(shape=[0, 2**40], offsets=[0, 0])}),
        file_of({"a": entry(shape=[1] * 64)}, FOUR),
        file_of({"e": entry(shape=[0], offsets=[4, 4]), "a": entry()}, FOUR),
        file_of(b'{"\\ud83d\\ude00":{"data_offsets":[0,1],"shape":[],"dtype":"I8"}}', b"1"),
    ],
    ids=["nothing", "spaces", "white space", "empty name", "empty", "64 axes", "empty at the end", "emoji"],
)
def test_unusual_but_sound_file_is_read(data: bytes) -> None:
    assert {name for name, _ in library.deserialize(data)} == scan(data).entries.keys()


SOUND = file_bytes(
    safetensors.layout(
        {"conv.weight": sample("float32", (2, 3)), "e": sample("int8", (0,)), "step": sample("int64", ())},
        metadata={"format": "pt"},
        aligned=False,
    )
)

DATA = 2 * 3 * 4 + 8
PIECES = [b"0", b"1", b"4", b"9", b'"', b",", b"[", b"}", b" ", b"{", b"e", b"I8", b'"e":', b"[0,0]"]


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_mutated_headers_are_judged_as_by_the_library_but_for_the_stated_strictness(
    data: st.DataObject,
) -> None:
    mutated = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(8, len(mutated) - 1))
        piece = data.draw(st.sampled_from(PIECES))
        mutated[where : where + len(piece) * data.draw(st.booleans())] = piece
        mutated[:8] = (len(mutated) - DATA - 8).to_bytes(8, "little")
    try:
        theirs = {name: tuple(tensor["shape"]) for name, tensor in library.deserialize(bytes(mutated))}
    except library.SafetensorError:
        with pytest.raises((MalformedError, NotSupportedError)):
            scan(bytes(mutated))
        return
    try:
        ours = {name: entry.shape for name, entry in scan(bytes(mutated)).entries.items()}
    except MalformedError as error:
        assert re.search("twice|nothing else|does not begin", str(error)), error  # noqa: PT017
    else:
        assert ours == theirs


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=64)
    | st.binary(max_size=64).map(file_of)
    | st.binary(max_size=64).map(lambda b: file_of(b"{" + b))
)
def test_random_bytes_are_refused_or_read_but_never_crash(data: bytes) -> None:
    try:
        header = scan(data)
    except MalformedError:
        return
    assert all(stop <= len(data) for e in header.entries.values() for _, stop in e.ranges)


@pytest.mark.parametrize("cut", [0, 7, 8, 100, len(SOUND) - 1])
def test_cut_file_is_refused(cut: int) -> None:
    with pytest.raises(MalformedError):
        scan(SOUND[:cut])
