"""MindSpore as judge of the `.ckpt` container: it loads what we write, and we read what it writes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore.train import serialization

from ckpt_files import SAME_MESSAGE, Memory, plain_bytes, same, sample, stored_bytes, value
from swansong.errors import MalformedError
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store.ckpt import CkptReader, layout
from swansong.store.ckpt_cipher import MindSporeDecrypted, MindSporeEncoding

pytestmark = pytest.mark.mindspore

STORABLE = [name for name in DTYPES if not name.startswith(("complex", "float8"))]
SHAPES = [(), (1,), (2, 3), (0, 5), (3, 0, 2), (2, 1, 2, 1, 2)]
KEYS = [b"k" * 16, b"k" * 24, b"k" * 32]
MODES = ["AES-GCM", "AES-CBC"]
APPEND_INFO: dict[str, Any] = {
    "epoch_num": 3,
    "below_zero": -5,
    "least": -(2**63),
    "beyond_int64": 2**63,
    "largest": 2**64 - 1,
    "done": False,
    "loss": 0.1,
    "too_large": 1e300,
    "not_a_number": float("nan"),
    "numpy": np.float64(0.1),
    "note": "ü \U0001f9a2",
    "empty_note": "",
}


def loaded(data: bytes, directory: Path, **options: Any) -> dict[str, HostTensor | str]:
    """What MindSpore makes of a file. Bits, type and shape are its own, so bfloat16 needs no NumPy type."""
    path = directory / "ours.ckpt"
    path.write_bytes(data)
    found: dict[str, HostTensor | str] = {}
    for name, param in mindspore.load_checkpoint(str(path), **options).items():
        if isinstance(param, str):
            found[name] = param
        else:
            dtype = DTYPES[str(param.dtype).lower()]
            array = np.frombuffer(param.get_bytes(), dtype.carrier)
            found[name] = HostTensor(dtype, array.reshape(param.shape))
    return found


def saved(tensors: dict[str, HostTensor], directory: Path, **options: Any) -> bytes:
    """The file that MindSpore writes."""
    path = directory / "theirs.ckpt"
    named = [{"name": name, "data": theirs(tensor)} for name, tensor in tensors.items()]
    mindspore.save_checkpoint(named, str(path), **options)
    for thread in threading.enumerate():
        if thread.name == "asyn_save_ckpt":
            thread.join()
    return path.read_bytes()


def theirs(tensor: HostTensor) -> mindspore.Tensor:
    if tensor.dtype.name == "bfloat16":
        as_float32 = (tensor.array.astype(np.uint32) << 16).view(np.float32)
        return mindspore.Tensor(as_float32, mindspore.bfloat16)
    return mindspore.Tensor(tensor.array)


def few(dtype: str, shape: tuple[int, ...]) -> HostTensor:
    """As `sample`, without the bfloat16 NaNs that MindSpore's own conversion changes."""
    tensor = sample(dtype, shape)
    return HostTensor(tensor.dtype, tensor.array & 0xBFFF) if dtype == "bfloat16" else tensor


def agree(tensors: dict[str, HostTensor], found: dict[str, Any]) -> bool:
    return tensors.keys() == found.keys() and all(same(tensors[name], found[name]) for name in tensors)


def read_all(reader: CkptReader) -> dict[str, HostTensor]:
    return {name: reader.read(entry) for name, entry in reader.entries.items()}


@pytest.mark.parametrize("dtype", STORABLE)
def test_mindspore_loads_every_type_and_shape(dtype: str, tmp_path: Path) -> None:
    tensors = {f"w{shape}": sample(dtype, shape) for shape in SHAPES}
    tensors["transposed"] = HostTensor(DTYPES[dtype], sample(dtype, (3, 4)).array.T)
    assert agree(tensors, loaded(plain_bytes(layout(tensors)), tmp_path))


@pytest.mark.parametrize("dtype", STORABLE)
def test_we_read_every_type_that_mindspore_saves(dtype: str, tmp_path: Path) -> None:
    tensors = {f"w{shape}": few(dtype, shape) for shape in SHAPES if 0 not in shape}
    written = saved(tensors, tmp_path)
    assert agree(tensors, read_all(CkptReader(Memory(written))))
    assert written == plain_bytes(layout(tensors))


@pytest.mark.parametrize("slice_bytes", [4, 7, 24, 25])
def test_mindspore_joins_our_slices(slice_bytes: int, tmp_path: Path) -> None:
    tensors = {
        "before": sample("int8", (3,)),
        "w": sample("float32", (2, 3, 4)),
        "transposed": HostTensor.of(sample("float32", (4, 3, 2)).array.T),
    }
    assert agree(tensors, loaded(plain_bytes(layout(tensors, slice_bytes=slice_bytes)), tmp_path))


@pytest.mark.parametrize("async_save", [False, "thread"], ids=["sync", "thread"])
def test_we_join_slices_of_mindspore(
    async_save: bool | str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # KiB
    tensors = {"w": sample("float32", (70, 30)), "b": sample("int16", (5,))}
    reader = CkptReader(Memory(saved(tensors, tmp_path, async_save=async_save)))
    assert [len(entry.ranges) for entry in reader.entries.values()] == [9, 1]
    assert agree(tensors, read_all(reader))


def test_our_bytes_are_those_of_mindspore_with_slices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # KiB
    tensors = {"w": sample("float32", (70, 30)), "b": sample("int16", (5,))}
    assert saved(tensors, tmp_path) == plain_bytes(layout(tensors, slice_bytes=1024))


@pytest.mark.parametrize("crc", [False, True], ids=["plain", "crc"])
def test_our_append_info_is_that_of_mindspore_byte_for_byte(crc: bool, tmp_path: Path) -> None:
    tensors = {"w": sample("float32", (2, 3))}
    extra = sample("int16", (4,))
    written = saved(tensors, tmp_path, append_dict=APPEND_INFO | {"extra": theirs(extra)}, crc_check=crc)
    assert plain_bytes(layout(tensors, APPEND_INFO | {"extra": extra}, crc=crc)) == written


def test_mindspore_loads_our_append_info(tmp_path: Path) -> None:
    found = loaded(plain_bytes(layout({}, APPEND_INFO)), tmp_path)
    assert found.keys() == APPEND_INFO.keys()
    assert (found["note"], found["empty_note"]) == (APPEND_INFO["note"], "")
    numbers = {name: found[name].array[()] for name in APPEND_INFO if "note" not in name}
    assert numbers["largest"] == 2**64 - 1
    assert numbers["loss"] == np.float32(0.1)
    assert np.isnan(numbers["not_a_number"])


def test_mindspore_verifies_our_crc_and_we_verify_its(tmp_path: Path) -> None:
    tensors = {"w": sample("float32", (20, 30))}
    ours = plain_bytes(layout(tensors, crc=True))
    assert agree(tensors, loaded(ours, tmp_path, crc_check=True))
    assert CkptReader(Memory(saved(tensors, tmp_path, crc_check=True))).verify_crc()
    flipped = ours[:100] + bytes([ours[100] ^ 1]) + ours[101:]
    with pytest.raises(ValueError, match="Failed to read the checkpoint file"):
        loaded(flipped, tmp_path, crc_check=True)


@pytest.mark.parametrize("key", KEYS, ids=len)
@pytest.mark.parametrize("mode", MODES)
def test_encrypted_files_go_both_ways(mode: str, key: bytes, tmp_path: Path) -> None:
    tensors = {"w": sample("float32", (20, 30)), "b": sample("bfloat16", (5,))}
    ours = stored_bytes(MindSporeEncoding(key, mode), plain_bytes(layout(tensors)))
    assert agree(tensors, loaded(ours, tmp_path, dec_key=key, dec_mode=mode))
    tensors = {"w": sample("float32", (20, 30)), "b": sample("int16", (5,))}
    written = Memory(saved(tensors, tmp_path, enc_key=key, enc_mode=mode))
    assert agree(tensors, read_all(CkptReader(MindSporeDecrypted(written, key, mode))))


@pytest.mark.parametrize("mode", MODES)
def test_encrypted_files_of_several_blocks_go_both_ways(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = {f"w{i}": sample("uint8", (6 << 20,)) for i in range(3)}
    ours = stored_bytes(MindSporeEncoding(KEYS[0], mode), plain_bytes(layout(tensors)))
    assert agree(tensors, loaded(ours, tmp_path, dec_key=KEYS[0], dec_mode=mode))
    monkeypatch.setattr(serialization, "ENCRYPT_BLOCK_SIZE", 1000)  # KiB
    written = Memory(saved(tensors, tmp_path, enc_key=KEYS[0], enc_mode=mode))
    assert agree(tensors, read_all(CkptReader(MindSporeDecrypted(written, KEYS[0], mode))))


def test_mindspore_finds_a_changed_byte_in_our_aes_gcm(tmp_path: Path) -> None:
    ours = bytearray(
        stored_bytes(MindSporeEncoding(KEYS[0]), plain_bytes(layout({"w": sample("int8", (99,))})))
    )
    ours[-1] ^= 1
    with pytest.raises(ValueError, match="encrypted or tempered with"):
        loaded(bytes(ours), tmp_path, dec_key=KEYS[0])


@pytest.mark.parametrize("data", SAME_MESSAGE.values(), ids=SAME_MESSAGE.keys())
def test_protobuf_takes_these_for_the_same_message(data: bytes, tmp_path: Path) -> None:
    assert agree({"w": HostTensor.of(np.array([0x0201, 0x0403], np.int16))}, loaded(data, tmp_path))


# ---- what MindSpore itself cannot do, and what that means here -------------------------------------------


def test_synchronous_mindspore_drops_empty_tensors_and_its_thread_keeps_them(tmp_path: Path) -> None:
    tensors = {"empty": sample("float32", (0, 5)), "w": sample("int8", (1,))}
    assert list(CkptReader(Memory(saved(tensors, tmp_path))).entries) == ["w"]
    assert agree(tensors, read_all(CkptReader(Memory(saved(tensors, tmp_path, async_save="thread")))))


def test_mindspore_loads_one_dim_of_zero_as_a_scalar_and_we_do_not(tmp_path: Path) -> None:
    tensors = {"empty": sample("float32", (0,)), "w": sample("int8", (1,))}
    written = plain_bytes(layout(tensors))
    found = loaded(written, tmp_path)["empty"]
    assert isinstance(found, HostTensor)
    assert found.shape == ()
    assert agree(tensors, read_all(CkptReader(Memory(written))))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_mindspore_saves_complex_tensors_that_it_cannot_load(dtype: str, tmp_path: Path) -> None:
    written = saved({"w": HostTensor.of(np.ones(2, dtype))}, tmp_path)
    with pytest.raises(ValueError, match="Complex"):
        loaded(written, tmp_path)
    with pytest.raises(MalformedError, match="unknown type 'Complex"):
        CkptReader(Memory(written))


@pytest.mark.parametrize(("length", "loads"), [(1024, True), (1025, False)])
def test_mindspore_limits_names_of_tensors(length: int, loads: bool, tmp_path: Path) -> None:
    data = value("n" * length, (1,), "Int8", b"\1")
    if loads:
        assert len(loaded(data, tmp_path)) == 1
    else:
        with pytest.raises(ValueError, match="length of the"):
            loaded(data, tmp_path)


def test_mindspore_takes_content_that_looks_like_a_trailer_for_one_and_we_do_not(tmp_path: Path) -> None:
    tensors = {"w": HostTensor.of(np.frombuffer(b"crc_num" + bytes(10), np.uint8))}
    written = plain_bytes(layout(tensors))
    with pytest.raises(ValueError, match="cannot be parsed"):
        loaded(written, tmp_path)
    assert agree(tensors, read_all(CkptReader(Memory(written))))
    assert agree(tensors, loaded(plain_bytes(layout(tensors, crc=True)), tmp_path))
