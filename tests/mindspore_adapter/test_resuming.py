"""A resumed run equals, bit for bit, one that was never disturbed; what would not is refused or said."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn

import tiny_training as tiny
from mindspore_adapter import killed_run
from swansong.errors import (
    ConfigError,
    DamagedError,
    KeyNeededError,
    LoadError,
    NotCommittedError,
    SwansongWarning,
    WrongKeyError,
)
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, latest_checkpoint, resume
from swansong.store import catalog

pytestmark = pytest.mark.mindspore

EPOCHS = 3
EVERY_STEP = CheckpointConfig(1, keep_checkpoint_max=50)


def interrupted(directory, step, dataset=None, *, config=EVERY_STEP, model=None):
    """Train until `step`, saving there."""
    (model or tiny.model()).train(
        EPOCHS,
        dataset or tiny.generated(),
        callbacks=[ModelCheckpoint("net", directory, config), tiny.StopAt(step)],
    )


def continued(directory, dataset=None, *, model=None, **options):
    """Resume and train to the end; return the point and the model."""
    model, dataset = model or tiny.model(), dataset or tiny.generated()
    point = resume(model, directory, "net", dataset, **options)
    model.train(
        EPOCHS,
        dataset,
        callbacks=[ModelCheckpoint("net", directory, EVERY_STEP)],
        initial_epoch=point.initial_epoch,
    )
    return point, model


def undisturbed(dataset=None, model=None):
    model = model or tiny.model()
    model.train(EPOCHS, dataset or tiny.generated())
    return tiny.state(model)


def damage(path):
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("step", [1, 5, 6, 7, 12, 17], ids=lambda step: f"step {step}")
def test_resumed_equals_undisturbed_with_a_generator(tmp_path, mode, step):
    want = undisturbed()
    interrupted(tmp_path, step)
    point, model = continued(tmp_path)
    assert (point.step, point.initial_epoch, point.step_in_epoch) == (step, step // 6, (step - 1) % 6 + 1)
    assert tiny.state(model) == want
    assert {f.manifest.step for f in catalog.scan(tmp_path)} == set(range(1, 19))
    assert {f.manifest.stem for f in catalog.scan(tmp_path)} == {"net"}


@pytest.mark.parametrize("step", [6, 8], ids=["epoch's end", "middle of an epoch"])
def test_resumed_equals_undisturbed_with_mnist(tmp_path, mode, step):
    data = tmp_path / "data"
    want = undisturbed(tiny.mnist(data), tiny.model(784))
    interrupted(tmp_path / "out", step, tiny.mnist(data), model=tiny.model(784))
    _, model = continued(tmp_path / "out", tiny.mnist(data), model=tiny.model(784))
    assert tiny.state(model) == want


def test_without_the_position_the_result_differs(tmp_path):
    want = undisturbed()
    interrupted(tmp_path, 8)
    model, dataset = tiny.model(), tiny.generated()
    point = resume(model, tmp_path, "net", dataset)
    dataset.set_init_step(0)
    model.train(EPOCHS, dataset, [ModelCheckpoint("net", tmp_path)], initial_epoch=point.initial_epoch)
    assert tiny.state(model) != want


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_random_augmentation_is_repeated_only_if_asked_for(tmp_path, exact):
    data = tmp_path / "data"
    want = undisturbed(tiny.mnist(data, flip=True), tiny.model(784))
    interrupted(tmp_path / "out", 8, tiny.mnist(data, flip=True), model=tiny.model(784))
    dataset, model = tiny.mnist(data, flip=True), tiny.model(784)
    if exact:
        _, model = continued(tmp_path / "out", dataset, model=model, exact_augmentation=True)
        assert ds.config.get_fast_recovery()
    else:
        with pytest.warns(SwansongWarning, match="RandomHorizontalFlip.*exact_augmentation"):
            _, model = continued(tmp_path / "out", dataset, model=model)
    assert (tiny.state(model) == want) is exact


def test_resumed_in_place_after_other_training_equals_undisturbed(tmp_path, mode):
    want = undisturbed()
    interrupted(tmp_path, 8)
    model = tiny.model()
    model.train(1, tiny.generated())
    _, model = continued(tmp_path, model=model)
    assert tiny.state(model) == want


def test_resumed_twice_equals_undisturbed(tmp_path):
    want = undisturbed()
    interrupted(tmp_path, 4)
    model, dataset = tiny.model(), tiny.generated()
    point = resume(model, tmp_path, "net", dataset)
    callbacks = [ModelCheckpoint("net", tmp_path, EVERY_STEP), tiny.StopAt(11)]
    model.train(EPOCHS, dataset, callbacks, initial_epoch=point.initial_epoch)
    point, model = continued(tmp_path)
    assert (point.step, tiny.state(model)) == (11, want)


def test_with_saved_network_the_rest_is_resumed_too(tmp_path, mode):
    want = undisturbed()
    model = tiny.model()
    config = CheckpointConfig(1, saved_network=model.predict_network)
    interrupted(tmp_path, 8, model=model, config=config)
    _, model = continued(tmp_path)
    assert tiny.state(model) == want


def test_an_unrelated_saved_network_of_the_same_names_does_not_replace_what_was_trained(tmp_path):
    want = undisturbed()
    unrelated = tiny.Net(16)
    interrupted(tmp_path, 8, config=CheckpointConfig(8, saved_network=unrelated))
    in_file = ms.load_checkpoint(str(tmp_path / "net-2_2.ckpt"))
    assert np.array_equal(in_file["fc.weight"].asnumpy(), unrelated.fc.weight.asnumpy())
    _, model = continued(tmp_path)
    assert tiny.state(model) == want


class Normed(nn.Cell):
    """Keeps running means (Parameters) and perhaps a count (a buffer). Takes MnistDataset's images."""

    def __init__(self, counting: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(28)
        self.counting = counting
        self.register_buffer("count", ms.Tensor(np.zeros(1, np.float32)))
        self.one = ms.Tensor(np.ones(1, np.float32))
        self.net = tiny.Net(784)

    def construct(self, x):
        y = self.net(self.norm(x))
        if self.counting:
            ms.ops.assign_add(self.count, self.one)
            y = y + self.count
        return y


def test_batch_norm_and_buffers_are_resumed(tmp_path, mode):
    # A compiled graph reads a buffer's value at compilation for ever, so there is nothing to be resumed.
    counting = mode == ms.PYNATIVE_MODE

    def model():
        ms.set_seed(tiny.SEED)
        net = Normed(counting)
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        return ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.1, 0.9))

    data = tmp_path / "data"
    want = undisturbed(tiny.mnist(data), model())
    interrupted(tmp_path / "out", 8, tiny.mnist(data), model=model())
    _, resumed = continued(tmp_path / "out", tiny.mnist(data), model=model())
    assert resumed.predict_network.count.asnumpy() == (18 if counting else 0)
    assert tiny.state(resumed) == want


def test_dropout_is_said_not_to_be_repeatable(tmp_path):
    def model():
        made = tiny.model()
        made.predict_network.insert_child_to_cell("drop", nn.Dropout(p=0.5))
        return made

    interrupted(tmp_path, 4, model=model())
    with pytest.warns(SwansongWarning, match="dropout"):
        resume(model(), tmp_path, "net", tiny.generated())


def test_what_other_callbacks_count_is_said_not_to_be_resumed(tmp_path):
    stopping = ms.train.EarlyStopping(monitor="loss")
    tiny.model().train(1, tiny.generated(), callbacks=[ModelCheckpoint("net", tmp_path), stopping])
    with pytest.warns(SwansongWarning, match="not continued exactly: callback EarlyStopping"):
        resume(tiny.model(), tmp_path, "net", tiny.generated())


def test_training_another_model_than_the_one_resumed_is_warned_of(tmp_path):
    interrupted(tmp_path, 8)
    dataset = tiny.generated()
    point = resume(tiny.model(), tmp_path, "net", dataset)
    with pytest.warns(SwansongWarning, match="leaves out its first 8 batches"):
        tiny.model().train(2, dataset, [ModelCheckpoint("net", tmp_path)], initial_epoch=point.initial_epoch)


def test_a_later_training_with_the_same_objects_begins_at_the_start(tmp_path):
    interrupted(tmp_path, 8)
    _, model = continued(tmp_path)
    steps = []

    class Count(ms.train.Callback):
        def on_train_step_end(self, run_context):
            steps.append(run_context.original_args().cur_step_num)

    model.train(1, tiny.generated(), callbacks=[Count()])
    assert steps == [1, 2, 3, 4, 5, 6]


def test_an_empty_series_begins_at_step_zero(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        point = resume(tiny.model(), directory, "net", tiny.generated())
        assert (point.step, point.initial_epoch, point.step_in_epoch, point.path) == (0, 0, 0, None)
        assert not point.finished(1)
    assert not (tmp_path / "missing").exists()


def test_another_prefix_is_another_series(tmp_path):
    interrupted(tmp_path, 3)
    with pytest.warns(SwansongWarning, match="no checkpoint of 'net-1'"):
        assert resume(tiny.model(), tmp_path, "net-1", tiny.generated()).path is None
    assert latest_checkpoint(tmp_path, "ne") is None


def test_a_finished_run_says_so(tmp_path):
    interrupted(tmp_path, 18)
    point = resume(tiny.model(), tmp_path, "net", tiny.generated())
    assert (point.step, point.finished(EPOCHS), point.finished(EPOCHS + 1)) == (18, True, False)


def test_the_newest_by_seq_is_taken_whatever_its_step(tmp_path):
    interrupted(tmp_path, 12)
    for step in (11, 12):
        damage(tmp_path / f"net-2_{step - 6}.ckpt")
    model, dataset = tiny.model(), tiny.generated()
    with pytest.warns(SwansongWarning, match="passed over"):
        point = resume(model, tmp_path, "net", dataset)
    assert point.step == 10
    callbacks = [ModelCheckpoint("net", tmp_path, CheckpointConfig(100)), tiny.StopAt(11)]
    model.train(EPOCHS, dataset, callbacks, initial_epoch=point.initial_epoch)
    assert latest_checkpoint(tmp_path, "net").name == "net-2_5.ckpt"
    assert resume(tiny.model(), tmp_path, "net", tiny.generated()).step == 11


def test_a_damaged_newest_is_passed_over_and_named(tmp_path):
    want = undisturbed()
    interrupted(tmp_path, 8)
    damage(tmp_path / "net-2_2.ckpt")
    with pytest.warns(SwansongWarning, match=r"net-2_2\.ckpt is passed over"):
        point, model = continued(tmp_path)
    assert (point.step, tiny.state(model)) == (7, want)


def test_nothing_usable_is_an_error_and_never_a_silent_start(tmp_path):
    interrupted(tmp_path, 2)
    for path in tmp_path.glob("*.ckpt"):
        damage(path)
    model = tiny.model()
    before = tiny.state(model)
    with pytest.raises(DamagedError, match=r"net-1_2\.ckpt.*\n.*net-1_1\.ckpt"):
        resume(model, tmp_path, "net", tiny.generated())
    with pytest.warns(SwansongWarning, match="passed over"):
        point = resume(model, tmp_path, "net", tiny.generated(), allow_fresh=True)
    assert (point.step, point.path, tiny.state(model)) == (0, None, before)


def test_files_without_a_manifest_are_not_passed_over_in_silence(tmp_path):
    ms.save_checkpoint(tiny.model().train_network, str(tmp_path / "net-1_6.ckpt"))
    with pytest.raises(NotCommittedError, match=r"net-1_6\.ckpt"):
        resume(tiny.model(), tmp_path, "net", tiny.generated())
    assert resume(tiny.model(), tmp_path, "net", tiny.generated(), allow_fresh=True).path is None
    assert resume(tiny.model(), tmp_path, "ne", tiny.generated()).path is None


def test_a_newer_file_without_a_manifest_is_named_when_an_older_one_is_resumed(tmp_path):
    interrupted(tmp_path, 4)
    for manifest in (tmp_path / ".swansong").glob("net-1_4.ckpt.*.json"):
        manifest.unlink()
    with pytest.warns(SwansongWarning, match=r"net-1_4\.ckpt is passed over: by its name it is newer"):
        point = resume(tiny.model(), tmp_path, "net", tiny.generated())
    assert point.step == 3


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (tiny.SEED, 4, "set_seed was 3 on rank 0, now it is 4"),
        (None, tiny.SEED, r"had not called mindspore\.set_seed"),
    ],
    ids=["another seed now", "no seed then"],
)
def test_without_the_same_seeds_resuming_is_refused_unless_reshuffling_is_allowed(
    tmp_path, monkeypatch, then, now, message
):
    model = tiny.model()
    if then is None:
        monkeypatch.setattr(ms, "get_seed", lambda: None)
        with pytest.warns(SwansongWarning, match="set_seed was not called"):
            interrupted(tmp_path, 4, model=model)
    else:
        interrupted(tmp_path, 4, model=model)
    monkeypatch.undo()
    model = tiny.model(seed=now)
    before = tiny.state(model)
    with pytest.raises(ConfigError, match=message):
        resume(model, tmp_path, "net", tiny.generated())
    assert tiny.state(model) == before
    point = resume(model, tmp_path, "net", tiny.generated(), allow_reshuffle=True)
    assert point.step == 4


def test_an_unset_data_seed_is_seen(tmp_path):
    model = tiny.model()
    ds.config.set_seed(5489)
    with pytest.warns(SwansongWarning, match="set_seed was not called"):
        interrupted(tmp_path, 4, model=model)
    with pytest.raises(ConfigError, match=r"had not called mindspore\.dataset\.config\.set_seed"):
        resume(tiny.model(), tmp_path, "net", tiny.generated())


def test_another_number_of_steps_per_epoch_is_refused(tmp_path):
    interrupted(tmp_path, 4)
    dataset = ds.GeneratorDataset(tiny.Samples(), ["x", "y"], shuffle=True).batch(20)
    with pytest.raises(ConfigError, match="an epoch had 6 steps, now it has 3"):
        resume(tiny.model(), tmp_path, "net", dataset)


def test_without_a_data_set_only_an_epochs_end_can_be_resumed(tmp_path):
    interrupted(tmp_path, 8)
    with pytest.raises(ConfigError, match="step 8 is in the middle of an epoch of 6 steps"):
        resume(tiny.model(), tmp_path, "net")
    (tmp_path / "net-2_1.ckpt").unlink()
    (tmp_path / "net-2_2.ckpt").unlink()
    with pytest.warns(SwansongWarning, match="order of the data"):
        assert resume(tiny.model(), tmp_path, "net").initial_epoch == 1


def test_without_shuffling_an_epochs_end_resumes_exactly_without_a_data_set(tmp_path):
    def ordered():
        return ds.GeneratorDataset(tiny.Samples(), ["x", "y"], shuffle=False).batch(10)

    want = undisturbed(ordered())
    interrupted(tmp_path, 12, ordered())
    model, dataset = tiny.model(), ordered()
    with pytest.warns(SwansongWarning, match="order of the data"):
        point = resume(model, tmp_path, "net")
    model.train(EPOCHS, dataset, [ModelCheckpoint("net", tmp_path)], initial_epoch=point.initial_epoch)
    assert tiny.state(model) == want


def test_training_that_begins_at_another_epoch_than_resumed_is_refused(tmp_path):
    interrupted(tmp_path, 8)
    model, dataset = tiny.model(), tiny.generated()
    resume(model, tmp_path, "net", dataset)
    callbacks = [ModelCheckpoint("net", tmp_path)]
    with pytest.raises(ConfigError, match="pass initial_epoch=1"):
        model.train(EPOCHS, dataset, callbacks)
    with pytest.raises(ConfigError, match="another data set"):
        model.train(EPOCHS, tiny.generated(), callbacks, initial_epoch=1)
    model.train(EPOCHS, dataset, callbacks, initial_epoch=1)
    assert tiny.state(model) == undisturbed()


def test_what_does_not_fit_the_network_is_listed_in_one_error(tmp_path):
    interrupted(tmp_path, 2)
    ms.set_seed(tiny.SEED)
    net = tiny.Net(8)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.1, 0.9))
    before = tiny.state(model)
    with pytest.raises(LoadError) as caught:
        resume(model, tmp_path, "net", tiny.generated())
    message = str(caught.value)
    assert "fc.weight: the network has float32 [10, 8], the checkpoint float32 [10, 16]" in message
    assert "moments.fc.weight: not in the checkpoint" in message
    assert "moment1.fc.weight: not in the network" in message
    assert tiny.state(model) == before


def test_encrypted_checkpoints_resume_with_their_key_only(tmp_path):
    key = b"k" * 32
    want = undisturbed()
    model = tiny.model()
    config = CheckpointConfig(8, enc_key=key, saved_network=model.predict_network)
    interrupted(tmp_path, 8, config=config, model=model)
    with pytest.raises(KeyNeededError):
        resume(tiny.model(), tmp_path, "net", tiny.generated())
    with pytest.raises(WrongKeyError):
        resume(tiny.model(), tmp_path, "net", tiny.generated(), dec_key=b"x" * 32)
    with pytest.warns(SwansongWarning, match="this run saves without a key"):
        _, model = continued(tmp_path, dec_key=key)
    assert tiny.state(model) == want


def test_checkpoints_of_the_series_in_a_ttp_directory_count(tmp_path):
    want = undisturbed()
    interrupted(tmp_path / "out", 6)
    fault = tmp_path / "fault"
    model, dataset = tiny.model(), tiny.generated()
    point = resume(model, tmp_path / "out", "net", dataset)
    callbacks = [ModelCheckpoint("net", fault, EVERY_STEP), tiny.StopAt(9)]
    model.train(EPOCHS, dataset, callbacks, initial_epoch=point.initial_epoch)
    assert latest_checkpoint(tmp_path / "out", "net", ttp_directory=fault).parent == fault
    point, model = continued(tmp_path / "out", ttp_directory=fault)
    assert (point.step, tiny.state(model)) == (9, want)
    assert latest_checkpoint(tmp_path / "out", "net", ttp_directory=fault).name == "net-3_6.ckpt"
    assert {f.manifest.stem for f in catalog.scan(tmp_path / "out")} == {"net"}


def test_a_killed_run_is_resumed_by_a_new_process_to_the_same_bits(tmp_path):
    model = tiny.model()
    model.train(EPOCHS, tiny.generated())

    def run(kill_at):
        script = Path(killed_run.__file__)
        environment = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
        command = [sys.executable, str(script), str(tmp_path), str(kill_at)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run(11).returncode == -signal.SIGKILL
    done = run(0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["8", killed_run.digest(model)]


def test_a_mistyped_prefix_is_told(tmp_path: Path) -> None:
    tiny.model().train(1, tiny.generated(), callbacks=[ModelCheckpoint("Net", tmp_path, CheckpointConfig(6))])
    with pytest.warns(SwansongWarning, match="no checkpoint of 'net'.*there is: Net"):
        assert resume(tiny.model(), tmp_path, "net", tiny.generated()).step == 0


def test_an_encrypted_series_that_goes_on_without_a_key_is_told(tmp_path: Path) -> None:
    key = bytes(16)
    config = CheckpointConfig(6, enc_key=key)
    tiny.model().train(1, tiny.generated(), callbacks=[ModelCheckpoint("net", tmp_path, config)])
    model, dataset = tiny.model(), tiny.generated()
    point = resume(model, tmp_path, "net", dataset, dec_key=key)
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6))
    with pytest.warns(SwansongWarning, match="is encrypted, but this run saves without a key"):
        model.train(2, dataset, callbacks=[callback], initial_epoch=point.initial_epoch)


def test_unset_seeds_are_told_when_training_begins_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model()
    monkeypatch.setattr("mindspore.get_seed", lambda: None)
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6))
    with pytest.warns(SwansongWarning, match="set_seed was not called"):
        model.train(1, tiny.generated(), callbacks=[callback])
    model.train(1, tiny.generated(), callbacks=[callback])
