"""What happens when a save fails, and when training does."""

import errno
import resource
import shutil
import threading
from contextlib import contextmanager

import mindspore as ms
import pytest
from mindspore import nn, ops

import tiny_training as tiny
from swansong.errors import ConfigError, DiskFullError, SaveError, SwansongWarning
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, latest_checkpoint, load_checkpoint, resume
from swansong.store import catalog
from swansong.store.capture import Staging
from swansong.store.series import Series

pytestmark = pytest.mark.mindspore


@contextmanager
def file_size_limit(size: int):
    """The kernel refuses to make any file larger, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def join_saves() -> None:
    """Wait until no save runs in the background."""
    for thread in threading.enumerate():
        if thread.name == "swansong-save":
            thread.join()


class LimitFrom(ms.train.Callback):
    """Lowers the limit from one step's begin until another's saves are over. To be first in the list."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.limit = first, last, None

    def on_train_step_begin(self, run_context) -> None:
        step = run_context.original_args().cur_step_num
        if step == self.first:
            join_saves()  # an earlier step's save, perhaps still under way, is not to fail
            self.limit = file_size_limit(1000)
            self.limit.__enter__()
        elif step == self.last + 1:
            self.__exit__()

    def __exit__(self, *exception) -> None:
        join_saves()
        if self.limit is not None:
            self.limit.__exit__(None, None, None)
            self.limit = None


def found(directory):
    return {f.name: f.manifest for f in catalog.scan(directory) if f.committed}


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_failed_save_ends_training_and_leaves_the_last_good_one(tmp_path, background):
    model = tiny.model()
    config = CheckpointConfig(2, keep_checkpoint_max=1, async_save=background)
    callback = ModelCheckpoint("net", tmp_path, config)
    with pytest.raises(DiskFullError, match=r"net-1_4\.ckpt: not saved: File too large") as caught:
        model.train(2, tiny.generated(), callbacks=[LimitFrom(4, 99), callback])
    assert caught.value.needed > 3000
    assert caught.value.free > 0
    reached = int(model.train_network.optimizer.global_step.asnumpy()[0])
    assert reached == 4 if not background else reached in (5, 6)
    assert set(found(tmp_path)) == {"net-1_2.ckpt"}
    assert callback.latest_ckpt_file_name == str(tmp_path / "net-1_2.ckpt")
    assert not catalog.scan(tmp_path)[1:]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_with_on_error_warn_training_goes_on_and_saves_when_it_is_due_again(tmp_path, background):
    model = tiny.model()
    config = CheckpointConfig(2, keep_checkpoint_max=1, async_save=background)
    callback = ModelCheckpoint("net", tmp_path, config, on_error="warn")
    with pytest.warns(SwansongWarning, match=r"not saved, training goes on: .*net-1_4\.ckpt"):
        model.train(2, tiny.generated(), callbacks=[LimitFrom(4, 4), callback])
    assert set(found(tmp_path)) == {"net-2_6.ckpt"}
    assert tiny.state(model) == {
        n: p.asnumpy().tobytes() for n, p in load_checkpoint(tmp_path / "net-2_6.ckpt").items()
    }


def test_with_on_error_warn_the_end_tries_once_more(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6), on_error="warn")
    with pytest.warns(SwansongWarning) as caught:
        tiny.model().train(1, tiny.generated(), callbacks=[LimitFrom(6, 99), callback])
    assert [str(w.message).count("net-1_6.ckpt") for w in caught if w.category is SwansongWarning] == [1, 1]
    assert found(tmp_path) == {}


def test_a_background_failure_at_the_last_step_is_raised_at_the_end(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6, async_save=True))
    with pytest.raises(DiskFullError):
        tiny.model().train(1, tiny.generated(), callbacks=[LimitFrom(6, 99), callback])


def test_a_background_failure_is_noted_on_the_exception_that_ends_training(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6, async_save=True))
    with pytest.raises(RuntimeError, match="boom") as caught:
        tiny.model().train(1, tiny.generated(), callbacks=[LimitFrom(6, 99), callback, tiny.RaiseAt(6)])
    assert "DiskFullError" in caught.value.__notes__[0]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_old_checkpoints_that_cannot_be_removed_are_no_reason_to_end_training(
    tmp_path, monkeypatch, background
):
    def fail(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted", "net-1_3.ckpt")

    monkeypatch.setattr(Series, "prune", fail)
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6, async_save=background))
    with pytest.warns(SwansongWarning, match=r"net-1_6\.ckpt: saved, but .* removed: .*net-1_3\.ckpt"):
        tiny.model().train(1, tiny.generated(), callbacks=[callback])
    assert callback.latest_ckpt_file_name == str(tmp_path / "net-1_6.ckpt")
    assert found(tmp_path)["net-1_6.ckpt"].kind == "periodic"


def test_want_of_memory_for_a_copy_is_a_save_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Staging, "capture", fail)
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(6, async_save=True))
    with pytest.raises(SaveError, match=r"net-1_6\.ckpt: not saved: Cannot allocate memory"):
        tiny.model().train(1, tiny.generated(), callbacks=[callback])


class RemoveAt(ms.train.Callback):
    """Removes a directory at the end of a step."""

    def __init__(self, step: int, directory) -> None:
        self.step, self.directory = step, directory

    def on_train_step_end(self, run_context) -> None:
        if run_context.original_args().cur_step_num == self.step:
            shutil.rmtree(self.directory)


@pytest.mark.parametrize("removed", ["", ".swansong"], ids=["all of it", "the manifests"])
def test_a_directory_that_is_removed_during_training_is_made_again(tmp_path, removed):
    directory = tmp_path / "checkpoints"
    callback = ModelCheckpoint("net", directory, CheckpointConfig(2))
    with pytest.warns(SwansongWarning, match="was removed during training"):
        tiny.model().train(1, tiny.generated(), callbacks=[callback, RemoveAt(3, directory / removed)])
    assert set(found(directory)) == {"net-1_4.ckpt", "net-1_6.ckpt"}
    assert latest_checkpoint(directory, "net") == directory / "net-1_6.ckpt"


class Fragile(nn.Cell):
    """A network whose Python code raises once it has been called that often."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.net = tiny.Net(16)
        self.left = calls

    def construct(self, x):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("boom")
        return self.net(x)


def fragile(calls: int) -> ms.Model:
    ms.set_seed(tiny.SEED)
    net = Fragile(calls)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return ms.Model(net, loss, nn.Momentum(net.trainable_params(), 0.1, 0.9))


class BrokenMomentum(nn.Momentum):
    """Raises in the middle of its third update."""

    def __call__(self, gradients):
        if int(self.global_step.asnumpy()[0]) == 2:
            ops.assign_add(self.global_step, self.global_step_increase_tensor)
            raise RuntimeError("boom")
        return super().__call__(gradients)


@pytest.mark.parametrize(
    ("position", "where", "saved"),
    [
        ("after", "on_train_step_end", 5),
        ("before", "on_train_step_end", 5),
        ("after", "on_train_step_begin", 4),
    ],
)
def test_exception_save_keeps_the_state_that_training_had_reached(tmp_path, position, where, saved):
    model = tiny.model()
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(100, exception_save=True))
    others = [tiny.RaiseAt(5, where)]
    callbacks = [callback, *others] if position == "after" else [*others, callback]
    with pytest.raises(RuntimeError, match="boom"):
        model.train(2, tiny.generated(), callbacks=callbacks)
    name = f"net-1_{saved}_breakpoint.ckpt"
    assert {n: (m.kind, m.step) for n, m in found(tmp_path).items()} == {name: ("exception", saved)}
    loaded = load_checkpoint(tmp_path / name)
    assert {n: p.asnumpy().tobytes() for n, p in loaded.items()} == tiny.state(model)


def test_exception_save_of_an_exception_in_the_network_has_the_step_before(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(100, exception_save=True))
    with pytest.raises(RuntimeError, match="boom"):
        fragile(7).train(2, tiny.generated(), callbacks=[callback])
    assert {n: m.step for n, m in found(tmp_path).items()} == {"net-2_1_breakpoint.ckpt": 7}


def test_exception_save_before_the_first_step_is_step_zero(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(100, exception_save=True))
    with pytest.raises(RuntimeError, match="boom"):
        fragile(0).train(2, tiny.generated(), callbacks=[callback])
    assert {n: m.step for n, m in found(tmp_path).items()} == {"net-1_0_breakpoint.ckpt": 0}


def test_exception_save_never_saves_half_an_update(tmp_path):
    ms.set_seed(tiny.SEED)
    net = tiny.Net(16)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = ms.Model(net, loss, BrokenMomentum(net.trainable_params(), 0.1, 0.9))
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(100, exception_save=True))
    with pytest.raises(RuntimeError, match="boom") as caught:
        model.train(1, tiny.generated(), callbacks=[callback])
    assert found(tmp_path) == {}
    assert "half done" in caught.value.__notes__[0]


def test_without_exception_save_an_exception_saves_nothing(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(100))
    with pytest.raises(KeyboardInterrupt):
        tiny.model().train(
            1, tiny.generated(), callbacks=[callback, tiny.RaiseAt(2, error=KeyboardInterrupt)]
        )
    assert found(tmp_path) == {}


def test_a_breakpoint_checkpoint_resumes_to_the_same_bits(tmp_path):
    undisturbed = tiny.model()
    undisturbed.train(3, tiny.generated())
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(100, exception_save=True))
    with pytest.raises(RuntimeError, match="boom"):
        tiny.model().train(3, tiny.generated(), callbacks=[callback, tiny.RaiseAt(8)])
    model, dataset = tiny.model(), tiny.generated()
    point = resume(model, tmp_path, "net", dataset)
    model.train(3, dataset, [ModelCheckpoint("net", tmp_path)], initial_epoch=point.initial_epoch)
    assert (point.step, point.path.name) == (8, "net-2_2_breakpoint.ckpt")
    assert tiny.state(model) == tiny.state(undisturbed)
    assert latest_checkpoint(tmp_path, "net").name == "net-3_6.ckpt"


def test_interrupted_training_waits_for_its_background_save(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(3, async_save=True))
    with pytest.raises(RuntimeError, match="boom"):
        tiny.model().train(1, tiny.generated(), callbacks=[callback, tiny.RaiseAt(3)])
    assert set(found(tmp_path)) == {"net-1_3.ckpt"}
    assert callback.latest_ckpt_file_name == str(tmp_path / "net-1_3.ckpt")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prefix": 123}, ConfigError, "prefix"),
        ({"prefix": "a/b"}, ConfigError, "'/'"),
        ({"directory": 5}, ConfigError, "directory"),
        ({"directory": " "}, ConfigError, "blank"),
        ({"directory": "x" * 1025}, ConfigError, "1024"),
        ({"directory": "x" * 300}, ConfigError, "File name too long"),
        ({"directory": "/proc/none"}, ConfigError, "/proc/none cannot be created: No such file"),
        ({"directory": __file__ + "/below"}, NotADirectoryError, "below cannot be created"),
        ({"directory": __file__}, NotADirectoryError, "not a directory"),
        ({"config": "type_error"}, ConfigError, "config"),
        ({"config": ms.train.CheckpointConfig()}, ConfigError, r"import it from swansong\.mindspore"),
        ({"on_error": "ignore"}, ConfigError, "on_error"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        ModelCheckpoint(**arguments)


def test_a_directory_behind_a_loop_of_links_is_refused_at_construction(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="cannot be used: Symlink loop"):
        ModelCheckpoint("net", tmp_path / "loop")


def test_remove_redundancy_is_refused_in_a_job_of_one_rank(tmp_path):
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(remove_redundancy=True))
    with pytest.raises(ConfigError, match="remove_redundancy"):
        tiny.model().train(1, tiny.generated(), callbacks=[callback])


def test_a_directory_that_cannot_be_used_is_a_save_error_with_its_cause(tmp_path):
    (tmp_path / ".swansong").write_bytes(b"in the way")
    callback = ModelCheckpoint("net", tmp_path, CheckpointConfig(3))
    with pytest.raises(SaveError, match="not saved") as caught:
        tiny.model().train(1, tiny.generated(), callbacks=[callback])
    assert isinstance(caught.value.__cause__, NotADirectoryError)
