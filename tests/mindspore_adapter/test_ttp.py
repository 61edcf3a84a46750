"""MindIOTTPAdapter in one process: what is saved when training ends before its time, and how it goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import tiny_training as tiny
from swansong.errors import SwansongWarning
from swansong.mindspore import (
    CheckpointConfig,
    ModelCheckpoint,
    latest_checkpoint,
    load_checkpoint,
    resume,
    resuming,
)
from swansong.mindspore.resuming import restore
from swansong.mindspore.trained import TrainedState
from swansong.store import catalog, naming
from swansong.store.checkpoint import Content, Point
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, commit_parts, read_parts, staged, write_part
from swansong.store.series import Series
from swansong.store.verify import verify
from swansong.store.workspace import Workspace
from swansong.store.writer import Writer
from ttp_support import Waits, adapter, fails_at

pytestmark = pytest.mark.mindspore
EPOCHS = 3
KEY = bytes(range(32))


def undisturbed(epochs: int = EPOCHS) -> dict[str, bytes]:
    model = tiny.model()
    model.train(epochs, tiny.generated())
    return tiny.state(model)


def own(model: ms.Model) -> dict[str, bytes]:
    """The state, without what the adapter has put into the optimizer."""
    return {name: data for name, data in tiny.state(model).items() if not name.startswith("swansong")}


def resumed(tmp_path: Path, **how) -> tuple[int, dict[str, bytes]]:
    """Resume and train to the end; where it began and what came of it."""
    model, data = tiny.model(), tiny.generated()
    point = resume(model, tmp_path, "net", data, ttp_directory=tmp_path / "ttp", **how)
    config = CheckpointConfig(100, enc_key=how.get("dec_key"))
    callbacks = [ModelCheckpoint("net", tmp_path, config)]
    model.train(EPOCHS, data, callbacks=callbacks, initial_epoch=point.initial_epoch)
    return point.step, own(model)


@pytest.mark.parametrize("where", ["on_train_step_begin", "on_train_step_end"])
@pytest.mark.parametrize("order", ["before the adapter", "after the adapter"])
def test_a_job_of_one_rank_that_throws_is_saved_and_goes_on_bit_equal(tmp_path, mode, where, order):
    want = undisturbed()
    error = fails_at(tmp_path, 8, where, first=order == "before the adapter")
    assert [str(error), type(error)] == ["boom", RuntimeError]
    step = 8 if where == "on_train_step_end" else 7
    path = tmp_path / "ttp" / f"ttp_saved_checkpoints-2_{step - 6}"
    assert error.__notes__[0].splitlines()[0] == f"swansong: the state of step {step} is in {path}"
    assert verify(path).ok
    assert resumed(tmp_path) == (step, want)


def test_mindspore_itself_loads_what_was_saved(tmp_path):
    fails_at(tmp_path, 8)
    path = tmp_path / "ttp/ttp_saved_checkpoints-2_2/rank_0/iteration-2_2.ckpt"
    theirs, ours = ms.load_checkpoint(str(path)), load_checkpoint(path)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name].asnumpy(), ours[name].asnumpy()) for name in theirs)
    counted = ("cur_epoch_num", "cur_step_num", "cur_rank", "batch_num", "global_step")
    assert [int(np.ravel(theirs[name].asnumpy())[0]) for name in counted] == [2, 2, 0, 6, 8]
    model = tiny.model()
    not_loaded, _ = ms.load_param_into_net(model.train_network, theirs)
    assert not_loaded == []
    assert not any("swansong" in name for name in theirs)


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC"])
def test_with_a_key_it_is_encrypted_and_mindspore_decrypts_it(tmp_path, cipher):
    want = undisturbed()
    fails_at(tmp_path, 8, enc_key=KEY, enc_mode=cipher)
    path = tmp_path / "ttp/ttp_saved_checkpoints-2_2"
    file = path / "rank_0/iteration-2_2.ckpt"
    assert verify(path, key=None).ok
    assert b"fc.weight" not in file.read_bytes() + (path / "manifest.json").read_bytes()
    theirs = ms.load_checkpoint(str(file), dec_key=KEY, dec_mode=cipher)
    ours = load_checkpoint(file, dec_key=KEY, dec_mode=cipher)
    assert all(np.array_equal(theirs[name].asnumpy(), ours[name].asnumpy()) for name in theirs)
    assert resumed(tmp_path, dec_key=KEY) == (8, want)


def test_faults_and_periodic_checkpoints_are_in_one_order(tmp_path):
    fails_at(tmp_path, 8, every=4)
    fault = catalog.find(tmp_path / "ttp/ttp_saved_checkpoints-2_2").manifest
    assert fault is not None
    assert [fault.series, fault.kind, fault.step, fault.epoch, fault.step_in_epoch] == [
        "net",
        "fault",
        8,
        2,
        2,
    ]
    periodic = [found.manifest.seq for found in catalog.scan(tmp_path)]
    assert [*periodic, fault.seq] == [2, 1, 3]
    newest = latest_checkpoint(tmp_path, "net", ttp_directory=tmp_path / "ttp")
    assert newest == tmp_path / "ttp/ttp_saved_checkpoints-2_2"
    assert resumed(tmp_path)[0] == 8
    assert max(found.manifest.seq for found in catalog.scan(tmp_path)) == 4


def test_without_a_model_checkpoint_the_series_is_called_ttp(tmp_path):
    want = undisturbed()
    model = tiny.model()
    protects = adapter(tmp_path)
    with pytest.raises(RuntimeError, match="boom"):
        model.train(EPOCHS, tiny.generated(), callbacks=[protects, Waits(protects), tiny.RaiseAt(8)])
    again, data = tiny.model(), tiny.generated()
    point = resume(again, tmp_path / "ttp", "ttp", data)
    protects = adapter(tmp_path)
    again.train(EPOCHS, data, callbacks=[protects], initial_epoch=point.initial_epoch)
    assert (point.step, own(again)) == (8, want)


def _flip(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_flip, "rank_0/iteration-2_2.ckpt"),
        (_cut, "rank_0/iteration-2_2.ckpt"),
        (Path.unlink, "rank_0/iteration-2_2.ckpt"),
        (Path.unlink, "manifest.json"),
        (_flip, "manifest.json"),
    ],
    ids=["a bit", "cut off", "its file missing", "its manifest missing", "a bit of its manifest"],
)
def test_a_damaged_fault_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, what):
    fails_at(tmp_path, 8, every=4)
    damage(tmp_path / "ttp/ttp_saved_checkpoints-2_2" / what)
    with pytest.warns(SwansongWarning, match=r"ttp_saved_checkpoints-2_2 is passed over"):
        newest = latest_checkpoint(tmp_path, "net", ttp_directory=tmp_path / "ttp")
    assert newest == tmp_path / "net-2_2.ckpt"


def test_a_save_that_never_ends_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "_PATIENCE_S", 0.0)
    space = Workspace(tmp_path / "ttp", Files())
    space.prepare()
    with space.reserve("net", "01234567") as place:
        place.mkdir()
        with pytest.warns(SwansongWarning, match="still being saved"):
            resume(tiny.model(), tmp_path, "net", ttp_directory=tmp_path / "ttp")


def test_a_rank_gets_its_own_part_where_no_two_hold_the_same(tmp_path):
    model, other = tiny.model(), tiny.model(seed=7)
    series = Series.fresh(tmp_path / "ttp", "net", Files())
    parts_of = {PartId(0, 1, rank): trains for rank, trains in enumerate((model, other))}
    with staged(series, "ttp_saved_checkpoints-1_6") as staging:
        for part, trains in parts_of.items():
            shown = TrainedState(trains.train_network).show().tensors
            content = Content(tensors=shown, scope=f"rank_{part.rank}/")
            write_part(staging.place, staging.id, Writer(Files()), content, part, container="ckpt")
        commit_parts(
            staging,
            read_parts(staging, dict.fromkeys(parts_of)),
            Point(step=6),
            kind="fault",
            seq=1,
            names=lambda rank, number, _: naming.rank_file(rank, number, 1, 6),
        )
    for rank, trains in enumerate((model, other)):
        fresh = tiny.model(seed=9)
        with open_checkpoint(tmp_path / "ttp/ttp_saved_checkpoints-1_6") as checkpoint:
            restore(fresh.train_network, checkpoint, rank)
        assert tiny.state(fresh) == tiny.state(trains)


def test_an_operator_who_asks_for_it_gets_a_checkpoint_and_exit_code_0(tmp_path):
    want = undisturbed()
    model, protects = tiny.model(), adapter(tmp_path)

    class Asks(ms.train.Callback):
        def on_train_step_end(self, run_context) -> None:
            if run_context.original_args().cur_step_num == 8:
                protects.persist_and_stop()

    callbacks = [ModelCheckpoint("net", tmp_path, CheckpointConfig(100)), protects, Waits(protects), Asks()]
    with pytest.raises(SystemExit) as ended:
        model.train(EPOCHS, tiny.generated(), callbacks=callbacks)
    assert ended.value.code == 0
    assert catalog.find(tmp_path / "ttp/ttp_saved_checkpoints-2_2").manifest.kind == "requested"
    assert resumed(tmp_path) == (8, want)


def test_without_a_fault_nothing_changes_and_nothing_is_left(tmp_path, mode):
    threads = threading.active_count()
    model, protects = tiny.model(), adapter(tmp_path)
    model.train(EPOCHS, tiny.generated(), callbacks=[protects, Waits(protects)])
    assert own(model) == undisturbed()
    assert threading.active_count() == threads
    assert [entry.name for entry in (tmp_path / "ttp").iterdir() if not entry.name.startswith(".")] == []
    assert catalog.scan(tmp_path / "ttp") == []


def test_an_adapter_can_be_used_for_one_training_after_another(tmp_path):
    model, protects = tiny.model(), adapter(tmp_path)
    model.train(1, tiny.generated(), callbacks=[protects, Waits(protects)])
    with pytest.raises(RuntimeError, match="boom"):
        model.train(
            EPOCHS, tiny.generated(), callbacks=[protects, Waits(protects), tiny.RaiseAt(8)], initial_epoch=1
        )
    assert latest_checkpoint(tmp_path / "ttp", "ttp").name == "ttp_saved_checkpoints-3_2"
