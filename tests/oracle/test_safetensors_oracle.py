"""Other libraries read what we write, and we read what they write."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safetensors_support import MemorySource, file_bytes, host_tensors, sample
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store import safetensors as ours
from swansong.store.source import PlainFile, read_tensor

NUMPY = [name for name, dtype in DTYPES.items() if dtype.exact and name != "complex128"]
TORCH = [name for name in DTYPES if name != "complex128"]
SHAPES = [(), (5,), (2, 3), (0, 4), (2, 0)]


def samples(names: list[str]) -> dict[str, HostTensor]:
    tensors = {f"{name}/{i}": sample(name, shape, 17 * i) for name in names for i, shape in enumerate(SHAPES)}
    tensors["transposed"] = HostTensor.of(np.arange(12, dtype=np.float32).reshape(3, 4).T)
    tensors['größe ~/\n\t"\\'] = HostTensor.of(np.arange(6)[::-2])
    return tensors


def write(path: Path, tensors: dict[str, HostTensor], **options: object) -> Path:
    path.write_bytes(file_bytes(ours.layout(tensors, **options)))
    return path


def read_file(path: Path) -> dict[str, HostTensor]:
    with path.open("rb") as file:
        source = PlainFile(file.fileno(), str(path))
        return {name: read_tensor(source, entry) for name, entry in ours.scan(source).entries.items()}


def torch_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def torch_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_library_loads_what_we_write_as_numpy(tmp_path: Path, aligned: bool) -> None:
    tensors = samples(NUMPY)
    got = safetensors.numpy.load_file(
        write(tmp_path / "a", tensors, aligned=aligned, metadata={"format": "np"})
    )
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (got[name].dtype, got[name].shape) == (tensor.array.dtype, tensor.shape), name
        assert got[name].tobytes() == tensor.array.tobytes(), name


def test_library_loads_what_we_write_as_torch(tmp_path: Path) -> None:
    tensors = samples(TORCH)
    got = safetensors.torch.load_file(write(tmp_path / "a", tensors, metadata={"format": "pt"}))
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (torch_name(got[name]), tuple(got[name].shape)) == (tensor.dtype.name, tensor.shape), name
        assert torch_bytes(got[name]) == tensor.array.tobytes(), name


def test_library_loads_complex128_as_pairs_of_doubles(tmp_path: Path) -> None:
    tensor = sample("complex128", (2, 3))
    got = safetensors.torch.load_file(write(tmp_path / "a", {"z": tensor}))["z"]
    assert (got.dtype, got.shape) == (torch.float64, (2, 3, 2))
    assert torch.view_as_complex(got).numpy().tobytes() == tensor.array.tobytes()


def test_we_read_what_the_library_writes_from_numpy(tmp_path: Path) -> None:
    arrays = {name: np.ascontiguousarray(tensor.array) for name, tensor in samples(NUMPY).items()}
    safetensors.numpy.save_file(arrays, tmp_path / "a", metadata={"format": "np"})
    got = read_file(tmp_path / "a")
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (got[name].array.dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].array.tobytes() == array.tobytes(), name


def test_we_read_what_the_library_writes_from_torch(tmp_path: Path) -> None:
    tensors = {}
    for name in TORCH:
        for shape in SHAPES:
            raw = bytearray(sample(name, shape).array.tobytes()) or bytearray(8)
            flat = torch.frombuffer(raw, dtype=getattr(torch, name))
            tensors[f"{name}{shape}"] = flat[: int(np.prod(shape))].reshape(shape).clone()
    safetensors.torch.save_file(tensors, tmp_path / "a")
    got = read_file(tmp_path / "a")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (got[name].dtype.name, got[name].shape) == (torch_name(tensor), tuple(tensor.shape)), name
        assert got[name].array.tobytes() == torch_bytes(tensor), name


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), host_tensors(), max_size=6)
)
def test_library_finds_the_same_tensors_in_random_files(tensors: dict[str, HostTensor]) -> None:
    data = file_bytes(ours.layout(tensors))
    theirs = {
        name: (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(data)
    }
    source = MemorySource(data)
    for name, entry in ours.scan(source).entries.items():
        assert theirs.pop(name)[1:] == (list(entry.shape), read_tensor(source, entry).array.tobytes())
    assert not theirs


def test_bytes_equal_the_librarys_where_it_leaves_no_choice() -> None:
    tensors = {
        "d": sample("float64", (3,)),
        "c": sample("float32", ()),
        "b": sample("int16", (2, 2)),
        "a": sample("bool", (5,)),
    }
    theirs = safetensors.numpy.save(
        {name: tensor.array for name, tensor in tensors.items()}, metadata={"k": "v"}
    )
    assert file_bytes(ours.layout(tensors, metadata={"k": "v"}, aligned=False)) == theirs


@pytest.mark.mindspore
def test_mindspore_loads_what_we_write(tmp_path: Path) -> None:
    import mindspore

    kinds = [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
    tensors = {
        f"{kind}.{i}": sample(kind, shape, i) for kind in kinds for i, shape in enumerate([(5,), (2, 3), ()])
    }
    path = write(tmp_path / "a.safetensors", tensors, metadata={"format": "ms"})
    got = mindspore.load_checkpoint(str(path), format="safetensors")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        array = got[name].asnumpy()
        assert (array.dtype, array.shape) == (tensor.array.dtype, tensor.shape), name
        assert array.tobytes() == tensor.array.tobytes(), name


@pytest.mark.mindspore
def test_we_read_what_mindspore_writes(tmp_path: Path) -> None:
    import mindspore

    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(3, np.int64)}
    save = [{"name": name, "data": mindspore.Tensor(array)} for name, array in tensors.items()]
    mindspore.save_checkpoint(save, str(tmp_path / "a.safetensors"), format="safetensors")
    got = read_file(tmp_path / "a.safetensors")
    assert {name: (t.dtype.name, t.shape, t.array.tolist()) for name, t in got.items()} == {
        "w": ("float32", (2, 3), tensors["w"].tolist()),
        "step": ("int64", (), 3),
    }
