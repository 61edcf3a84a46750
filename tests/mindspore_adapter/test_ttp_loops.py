"""MindIOTTPAdapter in one process: other loops than `Model.train`, other settings, wrong arguments."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.train.callback import _InternalCallbackParam

import tiny_training as tiny
from array_job import free_port
from swansong.errors import ConfigError, CrashLoopError, SwansongWarning
from swansong.mindspore import CheckpointConfig, MindIOTTPAdapter, ModelCheckpoint, latest_checkpoint, resume
from swansong.ttp_options import TTPOptions
from ttp_support import QUICK, Waits, adapter

pytestmark = pytest.mark.mindspore
EPOCHS = 3
KEY = bytes(range(32))


class Loop:
    """Training by a loop of one's own, which calls `on_train_step_end` only."""

    def __init__(self, model: ms.Model, protects: MindIOTTPAdapter) -> None:
        self.model, self.protects = model, protects
        self.params = _InternalCallbackParam()
        self.params.update(
            train_network=model.train_network,
            cur_step_num=0,
            cur_epoch_num=1,
            batch_num=tiny.STEPS,
            train_dataset=tiny.generated(),
            list_callback=[protects],
        )
        self.context = ms.train.RunContext(self.params)

    def train(self, stop: int) -> None:
        for epoch in range(1, EPOCHS + 1):
            self.params.cur_epoch_num = epoch
            for batch in self.params.train_dataset.create_tuple_iterator():
                self.model.train_network(*batch)
                self.params.cur_step_num += 1
                self.protects.on_train_step_end(self.context)
                Waits(self.protects).on_train_step_end(None)
                if self.params.cur_step_num == stop:
                    raise RuntimeError("boom")


def test_a_loop_that_only_tells_of_steps_ends_is_protected_by_the_wrapper(tmp_path):
    protects = adapter(tmp_path)
    loop = Loop(tiny.model(), protects)
    with pytest.raises(RuntimeError, match="boom") as raised:
        protects.wrapper_ttp_persist(loop.train)(8)
    assert "the state of step 8" in raised.value.__notes__[0]
    assert latest_checkpoint(tmp_path / "ttp", "ttp").name == "ttp_saved_checkpoints-2_2"


def test_in_graph_mode_such_a_loop_is_told_that_the_graph_has_no_clock(tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    protects = adapter(tmp_path)
    loop = Loop(tiny.model(), protects)
    with (
        pytest.raises(RuntimeError, match="boom"),
        pytest.warns(SwansongWarning, match="compiled before"),
    ):
        protects.wrapper_ttp_persist(loop.train)(8)


def test_a_network_compiled_before_is_told_and_saved_between_steps(tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    model, protects = tiny.model(), adapter(tmp_path)
    model.train(1, tiny.generated())
    with (
        pytest.raises(RuntimeError, match="boom"),
        pytest.warns(SwansongWarning, match="compiled before"),
    ):
        model.train(
            EPOCHS, tiny.generated(), callbacks=[protects, Waits(protects), tiny.RaiseAt(8)], initial_epoch=1
        )
    assert latest_checkpoint(tmp_path / "ttp", "ttp").name == "ttp_saved_checkpoints-3_2"


def test_sunk_data_are_protected_at_the_sinks_ends_and_that_is_said(tmp_path):
    protects = adapter(tmp_path)
    loop = Loop(tiny.model(), protects)
    loop.params.update(dataset_sink_mode=True, sink_size=2, cur_epoch_num=1, batch_num=2)
    protects.on_train_begin(loop.context)
    with pytest.warns(SwansongWarning, match="sink"):
        protects.on_train_epoch_begin(loop.context)
    batches = list(loop.params.train_dataset.create_tuple_iterator())

    @protects.wrapper_ttp_persist
    def train() -> None:
        for sink in range(3):
            loop.params.cur_step_num += 2
            loop.params.cur_epoch_num = sink + 1
            protects.on_train_step_begin(loop.context)
            loop.model.train_network(*batches[2 * sink])
            loop.model.train_network(*batches[2 * sink + 1])
            if sink == 2:
                raise RuntimeError("boom")
            protects.on_train_step_end(loop.context)
            Waits(protects).on_train_step_end(None)

    with pytest.raises(RuntimeError, match="boom") as raised:
        train()
    assert "the state of step 6" in raised.value.__notes__[0]


def test_an_evaluation_is_a_phase_in_which_nothing_is_a_stall(tmp_path):
    protects, phases = adapter(tmp_path), []
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    net = tiny.Net(16)
    model = ms.Model(net, loss, nn.SGD(net.trainable_params(), 0.1), metrics={"loss"})

    class Looks(ms.train.Callback):
        def on_eval_step_end(self, run_context) -> None:
            phases.append(protects._run._session._protection.watchdog.phases)

    model.fit(2, tiny.generated(), tiny.generated(), callbacks=[protects, Waits(protects), Looks()])
    assert set(phases) == {("evaluate",)}


def test_what_fails_three_times_at_one_step_is_not_begun_again(tmp_path):
    for _ in range(3):
        model, data, protects = tiny.model(), tiny.generated(), adapter(tmp_path)
        point = resume(model, tmp_path, "net", data, ttp_directory=tmp_path / "ttp")
        callbacks = [ModelCheckpoint("net", tmp_path, CheckpointConfig(100)), protects, Waits(protects)]
        with pytest.raises(RuntimeError, match="boom"):
            model.train(
                EPOCHS,
                data,
                callbacks=[*callbacks, tiny.RaiseAt(8, "on_train_step_begin")],
                initial_epoch=point.initial_epoch,
            )
    model, data = tiny.model(), tiny.generated()
    point = resume(model, tmp_path, "net", data, ttp_directory=tmp_path / "ttp")
    callbacks = [ModelCheckpoint("net", tmp_path, CheckpointConfig(100)), adapter(tmp_path)]
    with pytest.raises(CrashLoopError, match="boom"):
        model.train(EPOCHS, data, callbacks=callbacks, initial_epoch=point.initial_epoch)


class Skipping(nn.Cell):
    """Trains, but for every fourth step, of which the optimizer sees nothing."""

    def __init__(self, model: ms.Model) -> None:
        super().__init__(auto_prefix=False)
        self.step, self.count = model.train_network, 0

    def construct(self, x, y):
        self.count += 1
        return self.step(x, y) if self.count % 4 else x


def test_a_step_without_an_update_counts(tmp_path):
    protects = adapter(tmp_path)
    model = ms.Model(Skipping(tiny.model()))
    with pytest.raises(RuntimeError, match="boom") as raised:
        model.train(EPOCHS, tiny.generated(), callbacks=[protects, Waits(protects), tiny.RaiseAt(8)])
    assert "the state of step 8" in raised.value.__notes__[0]


def test_switched_off_it_does_nothing(tmp_path):
    protects = adapter(tmp_path, options=TTPOptions(enabled=False))
    model = tiny.model()

    def train() -> None:
        model.train(1, tiny.generated(), callbacks=[protects, tiny.RaiseAt(2)])

    assert protects.wrapper_ttp_persist(train) is train
    with pytest.raises(RuntimeError, match="boom") as raised:
        train()
    assert not hasattr(raised.value, "__notes__")
    assert not (tmp_path / "ttp").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"controller_port": 70000},
        {"controller_port": 0},
        {"controller_port": "2000"},
        {"controller_ip": ""},
        {"ckpt_save_path": " "},
        {"options": {}},
        {"enc_key": b"short"},
        {"enc_key": KEY, "enc_mode": "SM4-CBC"},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_a_wrong_argument_is_refused_at_once(tmp_path, wrong):
    given = {"controller_ip": "127.0.0.1", "controller_port": 2000, "ckpt_save_path": tmp_path} | wrong
    with pytest.raises(ConfigError):
        MindIOTTPAdapter(**given)


def test_an_address_of_another_machine_is_refused_when_training_begins(tmp_path):
    protects = MindIOTTPAdapter("192.0.2.1", free_port(), tmp_path, options=TTPOptions(**QUICK))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*no such address"):
        tiny.model().train(EPOCHS, tiny.generated(), callbacks=[protects])
