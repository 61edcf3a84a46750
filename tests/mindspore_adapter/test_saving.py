"""What ModelCheckpoint saves, when, and under which names."""

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import tiny_training as tiny
from swansong.errors import NotSupportedError, SwansongWarning, UnrepresentableError
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, load_checkpoint, resume
from swansong.store import catalog

pytestmark = pytest.mark.mindspore


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.startswith("."))


def by_seq(directory: Path) -> list[str]:
    return [found.name for found in reversed(catalog.scan(directory))]


def manifests(directory: Path):
    return {found.name: found.manifest for found in catalog.scan(directory)}


def trained(callback, epochs: int = 1, model=None, **options):
    model = model or tiny.model()
    model.train(epochs, tiny.generated(), callbacks=[callback], **options)
    return model


def test_saves_by_steps_and_the_last_step_at_the_end(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(save_checkpoint_steps=4))
    trained(callback, 2)
    assert by_seq(tmp_path) == ["net-1_4.ckpt", "net-2_2.ckpt", "net-2_6.ckpt"]
    assert callback.latest_ckpt_file_name == str(tmp_path / "net-2_6.ckpt")
    assert {n: (m.kind, m.step) for n, m in manifests(tmp_path).items()} == {
        "net-1_4.ckpt": ("periodic", 4),
        "net-2_2.ckpt": ("periodic", 8),
        "net-2_6.ckpt": ("periodic", 12),
    }


def test_the_end_is_saved_once_as_final(tmp_path):
    trained(ModelCheckpoint("net", tmp_path, CheckpointConfig(save_checkpoint_steps=5)))
    assert {n: m.kind for n, m in manifests(tmp_path).items()} == {
        "net-1_5.ckpt": "periodic",
        "net-1_6.ckpt": "final",
    }


def test_a_requested_stop_saves_the_step_it_came_at(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(save_checkpoint_steps=100))
    tiny.model().train(3, tiny.generated(), callbacks=[callback, tiny.StopAt(8)])
    assert names(tmp_path) == ["net-2_2.ckpt"]


def test_a_configuration_that_never_saves_does_not_save_at_the_end_either(tmp_path):
    with pytest.warns(SwansongWarning, match="never saves"):
        config = CheckpointConfig(save_checkpoint_steps=0)
    callback = ModelCheckpoint("net", tmp_path, config)
    trained(callback)
    assert (names(tmp_path), callback.latest_ckpt_file_name) == ([], "")


def test_a_policy_by_seconds_asks_the_clock(tmp_path):
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 1
            return self.now

    class Timed(ModelCheckpoint):
        clock = Clock()

    config = CheckpointConfig(save_checkpoint_steps=None, save_checkpoint_seconds=2)
    trained(Timed("net", tmp_path, config))
    assert names(tmp_path) == ["net-1_3.ckpt", "net-1_6.ckpt"]


def test_a_fresh_run_in_an_occupied_directory_gets_a_numbered_stem_and_leaves_the_other_alone(tmp_path):
    config = CheckpointConfig(save_checkpoint_steps=3, keep_checkpoint_max=1)
    for _ in range(3):
        trained(ModelCheckpoint("net", tmp_path, config))
    assert names(tmp_path) == ["net-1_6.ckpt", "net_1-1_6.ckpt", "net_2-1_6.ckpt"]


def test_retention_removes_the_oldest_of_the_series_and_nothing_that_only_looks_like_it(tmp_path):
    (tmp_path / "net-2023.ckpt").write_bytes(b"a person's")
    trained(ModelCheckpoint("net-1", tmp_path, CheckpointConfig(keep_checkpoint_max=2)))
    trained(ModelCheckpoint("net", tmp_path, CheckpointConfig(keep_checkpoint_max=2)))
    assert names(tmp_path) == [
        "net-1-1_5.ckpt",
        "net-1-1_6.ckpt",
        "net-2023.ckpt",
        "net_1-1_5.ckpt",
        "net_1-1_6.ckpt",
    ]


@pytest.mark.parametrize("resumed", [False, True], ids=["a fresh run", "a resumed run"])
def test_what_a_killed_save_has_left_is_removed_by_the_next_run(tmp_path, resumed):
    model, dataset = tiny.model(), tiny.generated()
    model.train(1, dataset, callbacks=ModelCheckpoint("net", tmp_path, CheckpointConfig(6)))
    temporary = tmp_path / ".swansong" / "tmp"
    for name in ("00000001-net-1_4.ckpt", "00000001-net-1_4.ckpt.lock"):
        (temporary / name).write_bytes(b"half")
    if resumed:
        resume(model, tmp_path, "net", dataset)
    model.train(
        2,
        dataset,
        callbacks=ModelCheckpoint("net", tmp_path, CheckpointConfig(6)),
        initial_epoch=int(resumed),
    )
    assert not list(temporary.iterdir())


def test_a_reused_callback_goes_on_saving_and_counting(tmp_path):
    config = CheckpointConfig(3, append_info=["epoch_num", "step_num"], keep_checkpoint_max=10)
    callback = ModelCheckpoint("net", tmp_path, config)
    model = trained(callback)
    trained(callback, model=model)
    assert by_seq(tmp_path) == ["net-1_3.ckpt", "net-1_6.ckpt", "net-2_3.ckpt", "net-2_6.ckpt"]
    last = load_checkpoint(callback.latest_ckpt_file_name)
    assert (int(last["epoch_num"].asnumpy()), int(last["step_num"].asnumpy())) == (2, 12)
    assert "began again" in manifests(tmp_path)["net-2_3.ckpt"].inexact[0]["reason"]


def test_a_callback_reused_for_another_network_begins_anew(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(save_checkpoint_steps=6))
    trained(callback)
    trained(callback)
    assert names(tmp_path) == ["net-1_6.ckpt", "net_1-1_6.ckpt"]
    assert [m.step for m in manifests(tmp_path).values()] == [6, 6]


def test_a_configuration_used_twice_counts_from_zero_each_time(tmp_path):
    config = CheckpointConfig(6, append_info=["epoch_num", "step_num"])
    for prefix in ("a", "b"):
        callback = ModelCheckpoint(prefix, tmp_path, config)
        trained(callback, 2)
        last = load_checkpoint(callback.latest_ckpt_file_name)
        assert (int(last["epoch_num"].asnumpy()), int(last["step_num"].asnumpy())) == (2, 12)


def test_with_initial_epoch_steps_count_from_the_start_of_training(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(4, append_info=["step_num"]))
    trained(callback, 3, initial_epoch=2)
    assert names(tmp_path) == ["net-3_4.ckpt", "net-3_6.ckpt"]
    assert [m.step for m in manifests(tmp_path).values()] == [18, 16]
    assert int(load_checkpoint(callback.latest_ckpt_file_name)["step_num"].asnumpy()) == 18


def test_appended_values_come_back_exactly(tmp_path):
    given = {"lr": 0.1, "far": 1e300, "n": -3, "yes": True, "text": "ä", "t": ms.Tensor(np.arange(3.0))}
    config = CheckpointConfig(6, append_info=["epoch_num", {"epoch_num": 7, **given}])
    callback = ModelCheckpoint("net", tmp_path, config)
    trained(callback)
    loaded = load_checkpoint(callback.latest_ckpt_file_name)
    assert loaded["text"] == "ä"
    assert int(loaded["epoch_num"].asnumpy()) == 8
    for name in ("lr", "far", "n", "yes"):
        assert loaded[name].asnumpy().item() == given[name]
    assert loaded["t"].asnumpy().tolist() == [0, 1, 2]
    of_mindspore = ms.load_checkpoint(callback.latest_ckpt_file_name)
    assert of_mindspore["text"] == "ä"
    assert of_mindspore["t"].asnumpy().tolist() == [0, 1, 2]


def test_an_appended_name_that_is_a_parameters_is_refused(tmp_path):
    config = CheckpointConfig(append_info=[{"fc.weight": 1}])
    with pytest.raises(UnrepresentableError, match=r"fc\.weight"):
        trained(ModelCheckpoint("net", tmp_path, config))


@pytest.mark.parametrize(
    ("options", "suffix", "how"),
    [
        ({}, "ckpt", {}),
        ({"format": "safetensors"}, "safetensors", {"format": "safetensors"}),
        ({"crc_check": True}, "ckpt", {"crc_check": True}),
        ({"enc_key": b"k" * 32}, "ckpt", {"dec_key": b"k" * 32}),
        (
            {"enc_key": b"k" * 16, "enc_mode": "AES-CBC"},
            "ckpt",
            {"dec_key": b"k" * 16, "dec_mode": "AES-CBC"},
        ),
    ],
    ids=["plain", "safetensors", "crc", "gcm", "cbc"],
)
def test_mindspore_loads_what_was_saved(tmp_path, options, suffix, how):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6, **options))
    want = tiny.state(trained(callback))
    assert names(tmp_path) == [f"net-1_6.{suffix}"]
    loaded = ms.load_checkpoint(callback.latest_ckpt_file_name, **how)
    assert {name: p.asnumpy().tobytes() for name, p in loaded.items()} == want


def test_saved_network_alone_is_in_the_file_and_the_rest_beside_it(tmp_path):
    model = tiny.model()
    config = CheckpointConfig(6, saved_network=model.predict_network)
    trained(ModelCheckpoint("net", tmp_path, config), model=model)
    assert set(ms.load_checkpoint(str(tmp_path / "net-1_6.ckpt"))) == {"fc.weight", "fc.bias"}
    assert "moment1.fc.weight" in manifests(tmp_path)["net-1_6.ckpt"].tensors


def test_files_are_read_only_and_private(tmp_path):
    trained(ModelCheckpoint("net", tmp_path / "new" / "deep", CheckpointConfig(6)))
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "deep" / "net-1_6.ckpt").stat().st_mode & 0o777 == 0o400


def test_the_graph_is_written_once_in_graph_mode_only(tmp_path, mode):
    trained(ModelCheckpoint("net", tmp_path, CheckpointConfig(6)))
    trained(ModelCheckpoint("net", tmp_path, CheckpointConfig(6)))
    graphs = [name for name in names(tmp_path) if name.endswith(".meta")]
    assert graphs == ([] if mode == ms.PYNATIVE_MODE else ["net-graph.meta", "net_1-graph.meta"])
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in graphs)
    assert all((tmp_path / name).stat().st_size > 0 for name in graphs)


def test_functions_for_prefix_and_directory_are_asked_at_every_step(tmp_path):
    callback = ModelCheckpoint(
        lambda now: f"step{now.cur_step_num}",
        lambda now: str(tmp_path / f"epoch{now.cur_epoch_num}"),
        CheckpointConfig(3, keep_checkpoint_max=1),
    )
    trained(callback, 2)
    assert names(tmp_path) == ["epoch1", "epoch2"]
    assert names(tmp_path / "epoch1") == ["step6.ckpt"]
    assert names(tmp_path / "epoch2") == ["step12.ckpt"]
    assert callback.latest_ckpt_file_name == str(tmp_path / "epoch2" / "step12.ckpt")


def test_where_a_function_chooses_the_directory_the_prefix_stays(tmp_path):
    for _ in range(2):
        trained(ModelCheckpoint("net", lambda now: str(tmp_path), CheckpointConfig(6)))
    assert names(tmp_path) == ["net-1_6.ckpt"]


def test_no_directory_is_the_working_directory_at_construction(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    callback = ModelCheckpoint(config=CheckpointConfig(6))
    monkeypatch.chdir(tmp_path)
    trained(callback)
    assert names(tmp_path / "there") == ["CKP-1_6.ckpt"]


@pytest.mark.parametrize("kind", [True, "thread", "process"])
def test_background_saves_are_on_disk_when_train_returns(tmp_path, kind):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(2, async_save=kind))
    want = tiny.state(trained(callback))
    assert by_seq(tmp_path) == ["net-1_2.ckpt", "net-1_4.ckpt", "net-1_6.ckpt"]
    assert {
        n: p.asnumpy().tobytes() for n, p in load_checkpoint(callback.latest_ckpt_file_name).items()
    } == want


def test_background_saves_hold_the_step_they_are_named_after(tmp_path):
    trained(ModelCheckpoint("now", tmp_path, CheckpointConfig(1, keep_checkpoint_max=9)))
    trained(ModelCheckpoint("then", tmp_path, CheckpointConfig(1, keep_checkpoint_max=9, async_save=True)))
    for step in range(1, 7):
        now, then = (load_checkpoint(tmp_path / f"{prefix}-1_{step}.ckpt") for prefix in ("now", "then"))
        assert all(now[name].asnumpy().tobytes() == then[name].asnumpy().tobytes() for name in now)


class Subclass(ModelCheckpoint):
    """MindSpore hands ModelCheckpoint's subclasses to the evaluation inside `fit` too."""


def test_evaluation_saves_nothing_and_does_not_end_the_run(tmp_path):
    net = tiny.Net(16)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.1, 0.9), metrics={"loss"})
    callback = Subclass("net", tmp_path, CheckpointConfig(4))
    model.fit(2, tiny.generated(), tiny.generated(), callbacks=[callback])
    assert by_seq(tmp_path) == ["net-1_4.ckpt", "net-2_2.ckpt", "net-2_6.ckpt"]
    model.eval(tiny.generated(), callbacks=[callback])
    assert len(names(tmp_path)) == 3


def test_a_sink_size_that_cpus_ignore_names_steps_as_mindspore_but_counts_them_right(tmp_path):
    config = CheckpointConfig(4, keep_checkpoint_max=9)
    trained(ModelCheckpoint("net", tmp_path, config), dataset_sink_mode=True, sink_size=3)
    assert {n: m.step for n, m in manifests(tmp_path).items()} == {"net-1_1.ckpt": 4, "net-1_3.ckpt": 6}


@pytest.mark.parametrize(
    ("step", "saved"), [(0, []), (15, []), (16, ["net-1_16.ckpt"]), (160, ["net-1_160.ckpt"])]
)
def test_step_end_by_itself_does_what_it_does_in_training(tmp_path, step, saved):
    from mindspore.train import RunContext
    from mindspore.train.callback import _InternalCallbackParam

    now = _InternalCallbackParam()
    now.update(train_network=tiny.model().train_network, cur_epoch_num=1, cur_step_num=step, batch_num=320)
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(16))
    callback.step_end(RunContext(now))
    assert names(tmp_path) == saved


def test_split_tensors_are_not_saved_as_if_they_were_whole(tmp_path, monkeypatch):
    model = tiny.model()
    monkeypatch.setattr(type(model.train_network), "parameter_layout_dict", {"fc.weight": [[2], [0, -1]]})
    with pytest.raises(NotSupportedError, match="integrated_save"):
        trained(ModelCheckpoint("net", tmp_path, CheckpointConfig()), model=model)
    trained(ModelCheckpoint("net", tmp_path, CheckpointConfig(6, integrated_save=False)), model=model)
    assert names(tmp_path) == ["net-1_6.ckpt"]
