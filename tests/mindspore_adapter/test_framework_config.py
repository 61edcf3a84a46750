"""What MindSpore's types add to CheckpointConfig."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import swansong
import tiny_training as tiny
from swansong.errors import ConfigError
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, load_checkpoint

pytestmark = pytest.mark.mindspore


def test_saved_network_may_be_a_cell_and_nothing_else():
    net = nn.Dense(2, 2)
    assert CheckpointConfig(saved_network=net).saved_network is net
    assert CheckpointConfig(saved_network=net).get_checkpoint_policy()["saved_network"] is net
    with pytest.raises(ConfigError, match="saved_network: wanted None or Cell, got str"):
        CheckpointConfig(saved_network="net")
    with pytest.raises(
        ConfigError, match=r"saved_network: wanted None, got Dense; use .*swansong\.mindspore"
    ):
        swansong.CheckpointConfig(saved_network=net)


def test_a_parameter_a_tensor_and_a_generator_can_be_appended(tmp_path):
    generator = ms.Generator()
    generator.manual_seed(5)
    given = {
        "p": Parameter(Tensor(np.ones(2, np.float32)), name="q"),
        "t": Tensor(np.arange(2)),
        "g": generator,
    }
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6, append_info=[given]))
    tiny.model().train(1, tiny.generated(), callbacks=[callback])
    loaded = load_checkpoint(callback.latest_ckpt_file_name)
    assert loaded["p"].asnumpy().tolist() == [1, 1]
    assert loaded["t"].asnumpy().tolist() == [0, 1]
    assert loaded["g"].asnumpy().tobytes() == generator.get_state().asnumpy().tobytes()


def test_the_framework_free_configuration_is_accepted_too(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, swansong.CheckpointConfig(6))
    tiny.model().train(1, tiny.generated(), callbacks=[callback])
    assert callback.latest_ckpt_file_name.endswith("net-1_6.ckpt")
