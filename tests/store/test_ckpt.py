"""MindSpore's `.ckpt` container by its bytes. MindSpore itself judges in tests/oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpt_files import SAME_MESSAGE, Memory, plain_bytes, same, sample, stored_bytes, value
from swansong.errors import ConfigError, DigestMismatchError, MalformedError, UnrepresentableError
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store.ckpt import CkptReader, layout
from swansong.store.ckpt_cipher import MindSporeEncoding
from swansong.store.ckpt_messages import MAX_NAME, MAX_RANK, head
from swansong.store.ckpt_wire import varint

GOLDEN = Path(__file__).parent.parent / "golden"
STORABLE = [name for name in DTYPES if not name.startswith(("complex", "float8"))]
REFUSED = [name for name in DTYPES if name not in STORABLE]


def golden_bytes(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def fixed_tensors() -> dict[str, HostTensor]:
    return {
        "conv.weight": HostTensor.of(np.arange(6, dtype=np.float32).reshape(3, 2).T),
        "mask": HostTensor.of(np.array([True, False])),
        "half": HostTensor.of(np.array([0x3F80, 0xC000], np.uint16), dtype="bfloat16"),
        "global_step": HostTensor.of(np.array(7, np.int32)),
        "empty": HostTensor.of(np.zeros((0, 5), np.float64)),
    }


def fixed_append_info() -> dict[str, int | float | bool | str | HostTensor]:
    extra = HostTensor.of(np.array([1, -1], np.int8))
    return {"epoch_num": 3, "lr": 0.1, "done": False, "note": "ü", "extra": extra}


@pytest.mark.parametrize(
    ("name", "crc", "mode"),
    [
        pytest.param("ckpt_plain.hex", False, None, id="plain"),
        pytest.param("ckpt_crc.hex", True, None, id="crc"),
        pytest.param("ckpt_aes_gcm.hex", False, "AES-GCM", id="aes-gcm"),
        pytest.param("ckpt_aes_cbc.hex", False, "AES-CBC", id="aes-cbc"),
    ],
)
def test_bytes_on_disk_have_not_changed(name: str, crc: bool, mode: str | None) -> None:
    written = plain_bytes(layout(fixed_tensors(), fixed_append_info(), crc=crc))
    if mode is not None:
        written = stored_bytes(MindSporeEncoding(b"k" * 16, mode, random=lambda n: bytes(range(n))), written)
    assert written.hex() == golden_bytes(name).hex()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", STORABLE)
def test_every_type_and_shape_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = sample(dtype, shape)
    reader = CkptReader(Memory(plain_bytes(layout({"w": tensor}))))
    assert same(reader.read(reader.entries["w"]), tensor)


def test_tensors_strings_and_appended_values_come_back_in_file_order() -> None:
    reader = CkptReader(Memory(plain_bytes(layout(fixed_tensors(), fixed_append_info()))))
    assert list(reader.entries) == [*fixed_tensors(), "epoch_num", "lr", "done", "extra"]
    assert reader.strings == {"note": "ü"}
    assert all(same(reader.read(reader.entries[name]), tensor) for name, tensor in fixed_tensors().items())


def test_layout_shows_the_tensors_own_memory() -> None:
    array = np.zeros((4, 6), np.float32)
    shown = layout({"a": HostTensor.of(array), "b": HostTensor.of(array.T)}, slice_bytes=32)
    parts = [segment.data for segment in shown.segments if segment.name is not None]
    assert len(parts) == 6
    assert all(isinstance(part, HostTensor) and np.shares_memory(part.array, array) for part in parts)
    array += 1
    reader = CkptReader(Memory(plain_bytes(shown)))
    assert all(reader.read(entry).array.min() == 1 for entry in reader.entries.values())


@pytest.mark.parametrize("slice_bytes", [1, 4, 7, 16, 40, 96, 100])
@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(24, dtype=np.int32).reshape(2, 3, 4), id="contiguous"),
        pytest.param(np.arange(24, dtype=np.int32).reshape(4, 3, 2).T, id="transposed"),
        pytest.param(np.arange(96, dtype=np.int32)[::4].reshape(2, 3, 4), id="strided"),
        pytest.param(np.broadcast_to(np.int32(5), (1, 24)), id="broadcast"),
    ],
)
def test_slices_repeat_name_and_dims_and_join_to_the_tensor(array: np.ndarray, slice_bytes: int) -> None:
    shown = layout({"w": HostTensor.of(array)}, slice_bytes=slice_bytes)
    contents = [segment.nbytes for segment in shown.segments if segment.name == "w"]
    heads = [segment.data for segment in shown.segments if segment.name is None]
    assert max(contents) <= max(slice_bytes, array.itemsize)
    assert heads == [head(b"w", array.shape, "Int32", size) for size in contents]
    reader = CkptReader(Memory(plain_bytes(shown)))
    assert len(reader.entries["w"].ranges) == len(contents)
    np.testing.assert_array_equal(reader.read(reader.entries["w"]).array, array)


@pytest.mark.parametrize(
    ("appended", "type_name", "content"),
    [
        pytest.param(5, "Int64", "0500000000000000", id="int"),
        pytest.param(-(2**63), "Int64", "0000000000000080", id="least-int"),
        pytest.param(2**63, "UInt64", "0000000000000080", id="large-int"),
        pytest.param(True, "Bool", "01", id="bool"),
        pytest.param(0.1, "Float32", "cdcccc3d", id="float"),
        pytest.param(1e300, "Float32", "0000807f", id="float-beyond-float32"),
        pytest.param(float("nan"), "Float32", "0000c07f", id="nan"),
        pytest.param(np.float64(0.1), "Float64", "9a9999999999b93f", id="numpy-float64"),
        pytest.param(sample("bfloat16", ()), "BFloat16", None, id="tensor"),
    ],
)
def test_appended_numbers_are_encoded_as_mindspore_does(
    appended: float | HostTensor, type_name: str, content: str | None
) -> None:
    written = plain_bytes(layout({}, {"k": appended}))
    raw = appended.array.tobytes() if isinstance(appended, HostTensor) else bytes.fromhex(content or "")
    assert written == value("k", (), type_name, raw)


@pytest.mark.parametrize(
    ("text", "content", "back"),
    [
        pytest.param("hé", "68000000e9000000", "hé", id="text"),
        pytest.param("", "00000000", "", id="empty"),
        pytest.param("a\0b\0\0", "610000000000000062000000", "a\0b", id="trailing-nuls-are-lost"),
        pytest.param("\U0001f9a2", "a2f90100", "\U0001f9a2", id="beyond-bmp"),
        pytest.param("\ud800", "00d80000", "\ud800", id="lone-surrogate"),
    ],
)
def test_strings_are_encoded_as_numpy_does(text: str, content: str, back: str) -> None:
    written = plain_bytes(layout({}, {"k": text}))
    assert written == value("k", (0,), "str", bytes.fromhex(content))
    assert CkptReader(Memory(written)).strings == {"k": back}


def test_appended_name_of_a_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="'w' is the name of a tensor"):
        layout({"w": sample("int8", (1,))}, {"w": 1})


@pytest.mark.parametrize("dtype", REFUSED)
def test_types_that_mindspore_cannot_load_are_refused_by_name(dtype: str) -> None:
    tensor = HostTensor(DTYPES[dtype], np.zeros(2, DTYPES[dtype].carrier))
    with pytest.raises(UnrepresentableError, match=f"encoder.w: MindSpore does not load {dtype}"):
        layout({"encoder.w": tensor})


@pytest.mark.parametrize(
    ("tensors", "append_info", "message"),
    [
        pytest.param({"n" * (MAX_NAME + 1): sample("int8", ())}, {}, "1025 characters", id="long-name"),
        pytest.param({"\ud800": sample("int8", ())}, {}, "no UTF-8 form", id="surrogate-name"),
        pytest.param({"w": sample("int8", (1,) * (MAX_RANK + 1))}, {}, "33 dimensions", id="rank"),
        pytest.param({}, {"k": 2**64}, "k = 18446744073709551616", id="large-int"),
        pytest.param({}, {"k": -(2**63) - 1}, "does not fit into 64 bits", id="small-int"),
        pytest.param({}, {"k": None}, "k is a NoneType", id="none"),
        pytest.param({}, {}, "neither tensors nor append_info", id="nothing"),
    ],
)
def test_what_cannot_be_loaded_again_is_refused(tensors: dict, append_info: dict, message: str) -> None:
    with pytest.raises(UnrepresentableError, match=message):
        layout(tensors, append_info)


def test_crc_trailer_is_found_and_verified_over_several_steps() -> None:
    written = plain_bytes(layout({"w": sample("float32", (600_000,))}, crc=True))
    reader = CkptReader(Memory(written))
    assert reader.crc == int.from_bytes(written[-10:], "big")
    assert reader.verify_crc()
    assert reader.entries["w"].ranges[-1][1] == len(written) - 17


def test_flipped_bit_is_told_by_the_crc() -> None:
    written = bytearray(plain_bytes(layout({"w": sample("int8", (100,))}, crc=True)))
    written[60] ^= 1
    reader = CkptReader(Memory(bytes(written)))
    with pytest.raises(DigestMismatchError, match="the trailer says CRC-32") as caught:
        reader.verify_crc()
    assert int(caught.value.want, 16) == reader.crc != int(caught.value.got, 16)


def test_without_trailer_there_is_nothing_to_verify() -> None:
    reader = CkptReader(Memory(plain_bytes(layout({"w": sample("int8", (1,))}))))
    assert reader.crc is None
    assert not reader.verify_crc()


def test_content_that_looks_like_a_trailer_is_content() -> None:
    tensor = HostTensor.of(np.frombuffer(b"crc_num" + bytes(10), np.uint8))
    reader = CkptReader(Memory(plain_bytes(layout({"w": tensor}))))
    assert reader.crc is None
    assert same(reader.read(reader.entries["w"]), tensor)


@pytest.mark.parametrize("data", SAME_MESSAGE.values(), ids=SAME_MESSAGE.keys())
def test_whatever_protobuf_takes_for_the_same_message_is_read(data: bytes) -> None:
    reader = CkptReader(Memory(data))
    tensor = HostTensor.of(np.array([0x0201, 0x0403], np.int16))
    assert same(reader.read(reader.entries["w"]), tensor)


def test_old_scalar_with_one_dim_of_zero_is_a_scalar() -> None:
    reader = CkptReader(Memory(value("step", (0,), "Int32", b"\5\0\0\0")))
    assert reader.entries["step"].shape == ()
    assert reader.read(reader.entries["step"]).array == 5


def test_scan_reads_heads_not_contents() -> None:
    tensors = {f"layer.{i}": HostTensor.of(np.zeros(1 << 20, np.int8)) for i in range(16)}
    source = Memory(plain_bytes(layout(tensors)))
    assert len(CkptReader(source).entries) == 16
    assert source.bytes_read < 16 * 4096 + 4096


def test_small_tensors_share_reads() -> None:
    tensors = {f"layer.{i}": sample("int8", (8,)) for i in range(1000)}
    source = Memory(plain_bytes(layout(tensors)))
    assert len(CkptReader(source).entries) == 1000
    assert source.reads < 2 * (source.size // 4096 + 1)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63 - 1, 2**64 - 1])
def test_varint_has_the_known_number_of_groups(number: int) -> None:
    groups = varint(number)
    assert len(groups) == max(1, -(-number.bit_length() // 7))
    assert sum((byte & 0x7F) << 7 * i for i, byte in enumerate(groups)) == number


def test_read_outside_the_file_is_malformed() -> None:
    source = Memory(plain_bytes(layout({"w": sample("int8", (10,))})))
    reader = CkptReader(source)
    source.size -= 5
    with pytest.raises(MalformedError):
        reader.read(reader.entries["w"])
