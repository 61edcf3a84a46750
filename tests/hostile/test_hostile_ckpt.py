"""Malformed, cut and forged `.ckpt` files: a clear error in bounded time and memory, never anything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_files import Memory, plain_bytes, sample, stored_bytes, value
from swansong.errors import DamagedError, LoadError, MalformedError, NotSupportedError
from swansong.store import ckpt_cipher, ckpt_messages, ckpt_wire
from swansong.store.ckpt import CkptReader, layout
from swansong.store.ckpt_cipher import MindSporeDecrypted, MindSporeEncoding
from swansong.store.ckpt_wire import prefixed, varint

KEY = b"k" * 16
GOOD = value("w", (2,), "Int16", b"\1\2\3\4")
TAG = prefixed(0x0A, b"w")
TYPE = prefixed(0x12, b"Int16")
CONTENT = prefixed(0x1A, b"\1\2\3\4")
DIM = b"\x08\x02"


def small_file(*, crc: bool = False) -> bytes:
    tensors = {"a": sample("float32", (2, 3)), "b": sample("int8", ()), "c": sample("bool", (300,))}
    return plain_bytes(layout(tensors, {"epoch_num": 1, "note": "x"}, crc=crc, slice_bytes=128))


def tensor(*fields: bytes) -> bytes:
    return prefixed(0x0A, TAG + prefixed(0x12, b"".join(fields)))


def overlong(number: int) -> bytes:
    return bytes([number | 0x80, 0x00])


@pytest.mark.parametrize(
    ("data", "message", "offset"),
    [
        pytest.param(b"", "ends without any tensor", 0, id="empty-file"),
        pytest.param(b"crc_num" + bytes(10), "ends without any tensor", 0, id="trailer-only"),
        pytest.param(prefixed(0x12, b"x"), "ends without any tensor", 0, id="unknown-fields-only"),
        pytest.param(
            b"\x89PNG\r\n\x1a\n" + bytes(20),
            "0 is no field number; this is not a .ckpt file",
            10,
            id="another-format",
        ),
        pytest.param(GOOD + b"crc_num" + b"\1" + bytes(9), "is no CRC-32", len(GOOD), id="crc-too-large"),
        pytest.param(GOOD + bytes(17), "0 is no field number", len(GOOD), id="zeros-at-the-end"),
        pytest.param(GOOD + GOOD[:-1], r"a length of \d+ bytes, but", len(GOOD) + 1, id="cut"),
        pytest.param(b"\x0a" + varint(2**62), "a length of 4611686018427387904", 1, id="length-of-exabytes"),
        pytest.param(b"\x0a" + b"\xff" * 10, "longer than it may be", 1, id="number-without-end"),
        pytest.param(b"\x0a" + b"\xff" * 9 + b"\x02", "longer than it may be", 1, id="number-of-65-bits"),
        pytest.param(
            b"\x0a" + overlong(len(GOOD) - 2) + GOOD[2:], "longer than it may be", 1, id="padded-number"
        ),
        pytest.param(overlong(0x0A) + GOOD[1:], "longer than it may be", 0, id="padded-key"),
        pytest.param(b"\x0a\x04" + TAG + b"\x12", "ends inside a field", 6, id="no-length"),
        pytest.param(b"\x13" + GOOD, "wire type 3", 1, id="group"),
        pytest.param(b"\x13" * 5000, "wire type 3", 1, id="deeply-nested-groups"),
        pytest.param(b"\x16" + GOOD, "wire type 6", 1, id="unknown-wire-type"),
        pytest.param(b"\xfa\xff\xff\xff\x7f\x00", "is no field number", 0, id="field-number-over-29-bits"),
        pytest.param(b"\x11" + bytes(7), "past the end", 1, id="cut-fixed64"),
        pytest.param(b"\x15" + bytes(3), "past the end", 1, id="cut-fixed32"),
        pytest.param(prefixed(0x0A, TAG), "without a name or without a tensor", 2, id="no-tensor"),
        pytest.param(prefixed(0x0A, prefixed(0x12, DIM + TYPE + CONTENT)), "without a name", 2, id="no-name"),
        pytest.param(prefixed(0x0A, b""), "without a name", 2, id="empty-value"),
        pytest.param(b"\x0a\x00" * 100, "without a name", 2, id="empty-values"),
        pytest.param(tensor(DIM, CONTENT), "without a type or without content", 7, id="no-type"),
        pytest.param(tensor(DIM, TYPE), "without a type or without content", 7, id="no-content"),
        pytest.param(tensor(DIM, TYPE, TYPE, CONTENT), "two types", 7, id="two-types"),
        pytest.param(tensor(DIM, TYPE, CONTENT, CONTENT), "two contents", 7, id="two-contents"),
        pytest.param(prefixed(0x0A, TAG + TAG), "two names", 2, id="two-names"),
        pytest.param(
            prefixed(0x0A, TAG + prefixed(0x12, DIM + TYPE + CONTENT) * 2), "two tensors", 2, id="two-tensors"
        ),
        pytest.param(tensor(DIM * 33, TYPE, CONTENT), "more than 32 dimensions", None, id="rank-33"),
        pytest.param(
            tensor(prefixed(0x0A, b"\1" * 1000), TYPE, CONTENT),
            "more than 32 dimensions",
            None,
            id="packed-rank",
        ),
        pytest.param(
            tensor(b"\x08" + varint(2**64 - 1), TYPE, CONTENT), "a dimension of -1", None, id="negative-dim"
        ),
        pytest.param(tensor(b"\x08", TYPE, CONTENT), "0 is no field number", 9, id="dim-swallows-a-key"),
        pytest.param(tensor(b"\x0a\x02\x01\x80", TYPE, CONTENT), "ends inside", None, id="packed-dims-cut"),
        pytest.param(value("w", (3,), "Int16", bytes(4)), "4 bytes make no Int16", 2, id="content-too-short"),
        pytest.param(value("w", (1,), "Int16", bytes(4)), "4 bytes make no Int16", 2, id="content-too-long"),
        pytest.param(value("w", (), "Int16", b""), "0 bytes make no Int16", 2, id="scalar-without-content"),
        pytest.param(value("w", (0,), "Int16", bytes(4)), "4 bytes make no", 2, id="two-elements-of-none"),
        pytest.param(
            value("w", (2**62, 2**62), "Int8", b""), "0 bytes make no", 2, id="product-over-64-bits"
        ),
        pytest.param(
            value("w", (0, 2**62, 2), "Int8", b""), "0 bytes make no", 2, id="empty-but-uncountable"
        ),
        pytest.param(GOOD + GOOD, "8 bytes make no Int16", 2, id="file-doubled"),
        pytest.param(
            value("a", (), "Int8", b"\1") + GOOD + value("a", (), "Int8", b"\1"),
            "second",
            None,
            id="name-twice",
        ),
        pytest.param(
            value("w", (2,), "Int16", b"\1\2") + value("w", (2,), "UInt16", b"\1\2"),
            "differs",
            None,
            id="slice-type",
        ),
        pytest.param(
            value("w", (2,), "Int16", b"\1\2") + value("w", (1, 2), "Int16", b"\1\2"),
            "differs",
            None,
            id="slice-dims",
        ),
        pytest.param(value("w", (1,), "Complex64", bytes(8)), "unknown type 'Complex64'", 2, id="complex"),
        pytest.param(value("w", (1,), "int8", bytes(1)), "unknown type 'int8'", 2, id="unknown-type"),
        pytest.param(value("w", (1,), "x" * 65, bytes(1)), "a name of 65 bytes", None, id="long-type"),
        pytest.param(value("w" * 5000, (1,), "Int8", bytes(1)), "a name of 5000 bytes", None, id="long-name"),
        pytest.param(
            prefixed(0x0A, prefixed(0x0A, b"\xff") + prefixed(0x12, DIM + TYPE + CONTENT)),
            "not UTF-8",
            3,
            id="name-not-utf8",
        ),
        pytest.param(value("s", (0,), "str", b"abc"), "not UTF-32", None, id="string-of-three-bytes"),
        pytest.param(value("s", (0,), "str", b"\0\0\x11\0"), "not UTF-32", None, id="string-beyond-unicode"),
        pytest.param(value("s", (1,), "str", b"a\0\0\0"), r"dims \[1\]", 2, id="string-with-dims"),
        pytest.param(value("s", (0,), "str", b"a\0\0\0") * 2, "comes in slices", 2, id="string-in-slices"),
    ],
)
def test_malformed_file_is_an_error_that_tells_the_place(
    data: bytes, message: str, offset: int | None
) -> None:
    with pytest.raises(MalformedError, match=message) as caught:
        CkptReader(Memory(data))
    assert str(caught.value).startswith("memory.ckpt: byte ")
    assert caught.value.file == "memory.ckpt"
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(data)
    assert offset is None or caught.value.offset == offset


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(prefixed(0x0A, TAG + prefixed(0x1A, b"")), "'w' is a MapParameter", id="map-parameter"),
        pytest.param(
            prefixed(0x0A, TAG + b"\x1a\x00" * 1000), "'w' is a MapParameter", id="many-map-tensors"
        ),
        pytest.param(value("w", (2,), "Int4", b"\1"), "'w' has Int4 elements", id="int4"),
    ],
)
def test_what_is_not_read_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        CkptReader(Memory(data))


@pytest.mark.parametrize("crc", [False, True], ids=["plain", "crc"])
def test_every_truncation_is_malformed_or_a_shorter_file(crc: bool) -> None:
    whole = small_file(crc=crc)
    names = list(CkptReader(Memory(whole)).entries)
    shorter = 0
    for size in range(len(whole)):
        try:
            reader = CkptReader(Memory(whole[:size]))
        except MalformedError:
            continue
        shorter += 1
        assert list(reader.entries) == names[: len(reader.entries)]
    # Cuts between two messages: after each tensor and appended value but the last, and before the trailer.
    assert shorter == 4 + crc


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_every_truncation_of_an_encrypted_file_is_an_error(mode: str) -> None:
    whole = stored_bytes(MindSporeEncoding(KEY, mode), small_file())
    for size in range(len(whole)):
        with pytest.raises(LoadError):
            CkptReader(MindSporeDecrypted(Memory(whole[:size]), KEY, mode))


def test_file_of_tiny_unknown_fields_is_given_up_early() -> None:
    source = Memory(b"\x12\x00" * 50_000_000)
    with pytest.raises(MalformedError, match="more than 65536 unknown fields"):
        CkptReader(source)
    assert source.bytes_read < 1 << 18


def test_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt_messages, "MAX_VALUES", 100)
    data = b"".join(value(f"{i}", (), "Int8", b"\1") for i in range(101))
    assert len(CkptReader(Memory(data[: -len(value("100", (), "Int8", b"\1"))])).entries) == 100
    with pytest.raises(MalformedError, match="more than 100 values"):
        CkptReader(Memory(data))


def test_unknown_fields_are_bounded_over_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt_wire, "MAX_UNKNOWN_FIELDS", 10)
    data = b"".join(prefixed(0x0A, prefixed(0x0A, b"%d" % i) + b"\x20\x01" + GOOD[5:]) for i in range(11))
    with pytest.raises(MalformedError, match="more than 10 unknown fields"):
        CkptReader(Memory(data))


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_number_of_encrypted_blocks_is_bounded(monkeypatch: pytest.MonkeyPatch, even: bool) -> None:
    monkeypatch.setattr(ckpt_cipher, "MAX_BLOCKS", 50)
    encoding = MindSporeEncoding(KEY)
    sizes = [7] * 51 if even else [7] * 50 + [8]
    blocks = b"".join(stored_bytes(encoding, b"\x0a" * size) for size in sizes)
    with pytest.raises(MalformedError, match="more than 50 encrypted blocks"):
        MindSporeDecrypted(Memory(blocks), KEY)


def outcome(data: bytes, mode: str | None = None) -> str:
    """What comes of reading everything in a file: "read" or "error", if it is one of ours."""
    source = Memory(data)
    try:
        reader = CkptReader(source if mode is None else MindSporeDecrypted(source, KEY, mode))
        tensors = [reader.read(entry) for entry in reader.entries.values()]
        reader.verify_crc()
    except (LoadError, NotSupportedError):
        return "error"
    assert sum(tensor.nbytes for tensor in tensors) <= len(data)
    return "read"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_give_our_errors_only(data: bytes) -> None:
    outcome(data)
    outcome(b"\x0a" + varint(len(data)) + data)
    outcome(b"\x0a" + varint(len(data) + 5) + TAG + b"\x12" + varint(len(data)) + data)


edits = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "insert", "copy"]), st.integers(0, 999), st.binary(max_size=12)),
    max_size=6,
)


def edited(data: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    for how, where, new in changes:
        at = where % (len(data) + 1)
        match how:
            case "set":
                data = data[:at] + new + data[at + len(new) :]
            case "cut":
                data = data[:at] + data[at + len(new) :]
            case "insert":
                data = data[:at] + new + data[at:]
            case "copy":
                data = data[:at] + data[: len(new) * 8] + data[at:]
    return data


@settings(deadline=None)
@given(edits, st.booleans())
def test_edited_files_give_our_errors_only(changes: list[tuple[str, int, bytes]], crc: bool) -> None:
    outcome(edited(small_file(crc=crc), changes))


@settings(deadline=None)
@given(edits, st.sampled_from(["AES-GCM", "AES-CBC"]))
def test_edited_encrypted_files_give_our_errors_only(
    changes: list[tuple[str, int, bytes]], mode: str
) -> None:
    encoding = MindSporeEncoding(KEY, mode, random=lambda n: bytes(n))
    blocks = b"".join(stored_bytes(encoding, part) for part in (small_file()[:300], small_file()[300:]))
    outcome(edited(blocks, changes), mode)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_one_flipped_bit_of_an_aes_gcm_file_is_always_an_error(where: int, bit: int) -> None:
    encoding = MindSporeEncoding(KEY, random=lambda n: bytes(n))
    blocks = bytearray(
        stored_bytes(encoding, small_file()[:300]) + stored_bytes(encoding, small_file()[300:])
    )
    blocks[where % len(blocks)] ^= 1 << bit
    # The last four bytes of an initial vector are written, and used for nothing.
    unused = [start + 28 + 12 + i for start in (0, 48 + 300) for i in range(4)]
    expected = "read" if where % len(blocks) in unused else "error"
    assert outcome(bytes(blocks), "AES-GCM") == expected


def test_content_that_does_not_fit_names_its_tensor() -> None:
    with pytest.raises(MalformedError) as caught:
        CkptReader(Memory(GOOD + value("short", (3,), "Int16", bytes(4))))
    assert caught.value.tensor == "short"


def test_damage_in_a_later_block_names_its_place() -> None:
    encoding = MindSporeEncoding(KEY)
    first, second = (stored_bytes(encoding, part) for part in (small_file()[:300], small_file()[300:]))
    damaged = Memory(first + second[:-1] + bytes([second[-1] ^ 1]))
    reader = MindSporeDecrypted(damaged, KEY)
    with pytest.raises(DamagedError, match=f"block at byte {len(first)} does not decrypt") as caught:
        reader.read_into(0, np.empty(reader.size, np.uint8))
    assert caught.value.offset == len(first)
