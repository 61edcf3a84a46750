"""load_checkpoint and latest_checkpoint; and what importing needs."""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import tiny_training as tiny
from swansong.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DigestMismatchError,
    KeyNeededError,
    LoadError,
    SwansongWarning,
    UnauthenticatedError,
    UnrepresentableError,
    WrongKeyError,
)
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, latest_checkpoint, load_checkpoint
from swansong.mindspore.parameters import fill, host_tensor, named_state, new_parameter
from swansong.state.tensors import HostTensor

pytestmark = pytest.mark.mindspore


def saved(directory, **options):
    """Train one epoch; return the model and the path of its checkpoint."""
    model = tiny.model()
    callback = ModelCheckpoint("net", directory, CheckpointConfig(6, **options))
    model.train(1, tiny.generated(), callbacks=[callback])
    return model, callback.latest_ckpt_file_name


def content(loaded):
    return {name: p.asnumpy().tobytes() for name, p in loaded.items()}


def test_load_fills_a_network_with_its_part_and_returns_everything(tmp_path):
    model, path = saved(tmp_path)
    net = tiny.Net(16)
    loaded = load_checkpoint(path, net)
    assert content(loaded) == tiny.state(model)
    assert all(isinstance(p, Parameter) and p.name == name for name, p in loaded.items())
    assert net.fc.weight.asnumpy().tobytes() == model.predict_network.fc.weight.asnumpy().tobytes()
    loaded["fc.weight"].asnumpy()[...] = 0
    assert net.fc.weight.asnumpy().any()


def test_load_fills_a_train_network_from_what_lies_beside_the_file_too(tmp_path):
    model = tiny.model()
    config = CheckpointConfig(6, saved_network=model.predict_network)
    callback = ModelCheckpoint("net", tmp_path, config)
    model.train(1, tiny.generated(), callbacks=[callback])
    other = tiny.model(seed=9)
    load_checkpoint(callback.latest_ckpt_file_name, other.train_network)
    assert tiny.state(other) == tiny.state(model)


def test_what_the_checkpoint_lacks_is_warned_of(tmp_path):
    _, path = saved(tmp_path, saved_network=tiny.Net(16))
    net = nn.SequentialCell(tiny.Net(16), nn.Dense(10, 2))
    with pytest.warns(SwansongWarning, match=r"holds no .*1\.weight"):
        load_checkpoint(path, net)


def test_other_shapes_and_types_are_listed_in_one_error_and_nothing_is_filled(tmp_path):
    _, path = saved(tmp_path)
    net = tiny.Net(8)
    net.fc.bias = Parameter(Tensor(np.zeros(10, np.float16)), name="fc.bias")
    before = net.fc.weight.asnumpy().copy()
    with pytest.raises(LoadError) as caught:
        load_checkpoint(path, net)
    assert "fc.weight: the network has float32 [10, 8], the checkpoint float32 [10, 16]" in str(caught.value)
    assert "fc.bias: the network has float16 [10], the checkpoint float32 [10]" in str(caught.value)
    assert np.array_equal(net.fc.weight.asnumpy(), before)


def test_mindspores_own_files_load(tmp_path):
    model = tiny.model()
    path = str(tmp_path / "theirs.ckpt")
    ms.save_checkpoint(model.train_network, path, append_dict={"epoch_num": 3, "note": "hi"})
    loaded = load_checkpoint(path)
    assert loaded.pop("note") == "hi"
    assert int(loaded.pop("epoch_num").asnumpy()) == 3
    assert content(loaded) == tiny.state(model)


def test_mindspores_own_encrypted_files_load_with_a_warning(tmp_path):
    model = tiny.model()
    path = str(tmp_path / "theirs.ckpt")
    ms.save_checkpoint(model.train_network, path, enc_key=b"k" * 16)
    with pytest.warns(SwansongWarning, match="no manifest vouches"):
        assert content(load_checkpoint(path, dec_key=b"k" * 16)) == tiny.state(model)


@pytest.mark.parametrize(
    ("options", "how", "error"),
    [
        ({"enc_key": b"k" * 16}, {}, KeyNeededError),
        ({"enc_key": b"k" * 16}, {"dec_key": b"x" * 16}, WrongKeyError),
        ({}, {"dec_key": b"x" * 16}, UnauthenticatedError),
        ({}, {"dec_key": b"short"}, ConfigError),
        ({}, {"dec_key": "text"}, ConfigError),
        ({}, {"dec_mode": "SM4-CBC"}, ConfigError),
    ],
    ids=["no key", "wrong key", "needless key", "short key", "key of text", "unknown mode"],
)
def test_keys_are_checked_and_never_shown(tmp_path, options, how, error):
    _, path = saved(tmp_path, **options)
    with pytest.raises(error) as caught:
        load_checkpoint(path, **how)
    assert "xxxx" not in str(caught.value)
    assert "text" not in str(caught.value).replace("context", "")


def test_a_missing_file_and_a_path_that_is_none(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        load_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(ConfigError):
        load_checkpoint(1)


def test_one_flipped_bit_is_an_error_that_names_the_place(tmp_path):
    _, path = saved(tmp_path)
    (tmp_path / "net-1_6.ckpt").chmod(0o600)
    data = bytearray((tmp_path / "net-1_6.ckpt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "net-1_6.ckpt").write_bytes(data)
    with pytest.raises(DigestMismatchError) as caught:
        load_checkpoint(path)
    assert caught.value.file == path
    with pytest.warns(SwansongWarning, match=r"net-1_6\.ckpt is passed over"):
        assert latest_checkpoint(tmp_path, "net") is None


def test_latest_of_nothing_is_none(tmp_path):
    assert latest_checkpoint(tmp_path, "net") is None
    assert latest_checkpoint(tmp_path / "missing", "net") is None


@pytest.mark.parametrize(
    "dtype",
    [
        ms.bool_, ms.int8, ms.uint8, ms.int16, ms.int32, ms.int64, ms.uint64,
        ms.float16, ms.float32, ms.float64, ms.complex64, ms.complex128,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (2, 0)], ids=str)
def test_every_type_and_shape_travels_both_ways(dtype, shape):
    original = Parameter(Tensor(np.ones(shape, ms.dtype_to_nptype(dtype))), name="p")
    shown = host_tensor("p", original)
    copy = new_parameter("p", shown)
    assert (copy.dtype, copy.shape) == (dtype, shape)
    assert copy.asnumpy().tobytes() == original.asnumpy().tobytes()
    target = Parameter(Tensor(np.zeros(shape, ms.dtype_to_nptype(dtype))), name="p")
    fill(target, shown)
    assert target.asnumpy().tobytes() == original.asnumpy().tobytes()


def test_bfloat16_travels_as_bits():
    bits = HostTensor.of(np.array([[0x3F80, 0x4049]], np.uint16), dtype="bfloat16")
    parameter = new_parameter("p", bits)
    assert parameter.dtype == ms.bfloat16
    assert host_tensor("p", parameter).dtype.name == "bfloat16"
    assert host_tensor("p", parameter).array.tolist() == bits.array.tolist()
    fill(parameter, HostTensor.of(np.array([[1, 2]], np.uint16), dtype="bfloat16"))
    assert host_tensor("p", parameter).array.tolist() == [[1, 2]]


def test_a_host_tensor_shows_the_parameters_memory():
    parameter = Parameter(Tensor(np.zeros(3, np.float32)), name="p")
    assert np.shares_memory(host_tensor("p", parameter).array, parameter.asnumpy())


def test_two_parameters_of_one_name_are_refused():
    net = nn.SequentialCell(nn.Dense(2, 2), nn.Dense(2, 2))
    net[1].weight.name = net[0].weight.name
    with pytest.raises(UnrepresentableError, match=r"named '0\.weight'"):
        named_state(net)


def test_lazily_initialised_parameters_are_initialised_first():
    parameter = Parameter(ms.common.initializer.initializer("ones", (2, 2), ms.float32), name="p")
    assert host_tensor("p", parameter).array.tolist() == [[1, 1], [1, 1]]


def test_without_mindspore_the_error_says_what_to_install():
    code = "import sys; sys.modules['mindspore'] = None; import swansong.mindspore"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    assert "pip install 'swansong[mindspore]'" in done.stderr
