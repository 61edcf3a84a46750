"""Whole runs in one process without a controller: saved, resumed, ended in each way."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import swansong.torch
from swansong import CheckpointConfig
from swansong.errors import (
    CheckpointNotFoundError,
    DamagedError,
    LoadError,
    SwansongWarning,
)
from swansong.policy.keep import KeepLast
from swansong.policy.save import EverySteps
from swansong.store import catalog
from torch_training import EPOCHS, LOOPS, PER_EPOCH, STEPS, Training, bits, without

EACH = {"save": EverySteps(1), "keep": KeepLast(100)}


def trained(directory, loop="epochs", hook=lambda moment, step: None, *, given=None, **arguments):
    """Trained to the end of the loop, from wherever it begins."""
    training = Training(**(given or {}))
    with training.protect(directory, **arguments) as run:
        run.resume()
        if loop == "by hand":
            assert run.step in (0, STEPS) or run.inexact == []
        LOOPS[loop](training, run, hook)
    return training


def paths(directory):
    """Step -> checkpoint."""
    return {found.manifest.step: found.path for found in catalog.scan(directory)}


def only(directory, path):
    """A new directory with one checkpoint in it."""
    target = directory.with_name(f"{directory.name} {path.name}")
    target.mkdir()
    shutil.copytree(path, target / path.name)
    return target


def raising(moment, step, error=ValueError):
    def hook(now, at):
        if (now, at) == (moment, step):
            raise error("no good")

    return hook


# -- from any step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("loop", ["epochs", "batches"])
def test_resumed_at_any_step_a_run_ends_as_one_undisturbed(tmp_path, loop, several):
    given = {"several": several}
    wanted = without(loop, **given)
    undisturbed = trained(tmp_path / "all", loop, given=given, **EACH)
    assert undisturbed.losses == wanted.losses
    outcome = wanted.outcome()
    assert undisturbed.outcome() == outcome
    saved = paths(tmp_path / "all")
    assert sorted(saved) == list(range(1, STEPS + 1))
    for step, path in saved.items():
        again = trained(only(tmp_path / "all", path), loop, given=given)
        assert again.outcome() == outcome, step
        # an epoch's end is gone through again if its boundary was the last
        assert len(again.losses) <= len(wanted.losses) - step
        assert again.losses == wanted.losses[len(wanted.losses) - len(again.losses) :]


def test_a_loop_that_ends_its_steps_itself_resumes_at_any(tmp_path):
    outcome = without("by hand").outcome()
    given = {"loader": None, "save": EverySteps(5), "keep": KeepLast(100)}
    assert trained(tmp_path / "all", "by hand", **given).outcome() == outcome
    assert sorted(paths(tmp_path / "all")) == [5, 10, 12]
    for path in paths(tmp_path / "all").values():
        assert trained(only(tmp_path / "all", path), "by hand", loader=None).outcome() == outcome


@pytest.mark.parametrize("moment", ["forward", "backward", "updated"])
def test_an_exception_loses_no_more_than_since_the_last_save(tmp_path, moment):
    config = CheckpointConfig(3, keep_checkpoint_max=2)
    with pytest.raises(ValueError, match="no good"):
        trained(tmp_path, "epochs", raising(moment, 8), config=config)
    assert sorted(paths(tmp_path)) == [3, 6]
    assert trained(tmp_path, "epochs", config=config).outcome() == without("epochs").outcome()


def test_a_run_that_has_ended_resumes_to_nothing_more(tmp_path):
    trained(tmp_path, "epochs", **EACH)
    training = Training()
    with training.protect(tmp_path, **EACH) as run:
        assert run.resume() == STEPS
        assert [list(run.batches()) for _ in run.epochs(EPOCHS)] == [[]]  # its end is gone through again
    assert sorted(paths(tmp_path)) == list(range(1, STEPS + 1))


def test_the_last_step_is_saved_though_it_was_not_due(tmp_path):
    trained(tmp_path, "epochs", save=EverySteps(7))
    assert sorted(paths(tmp_path))[-1] == STEPS


@pytest.mark.parametrize("end", ["break", "return", "SystemExit(0)"])
def test_a_loop_that_is_left_early_counts_and_saves_its_last_step(tmp_path, end):
    training = Training()

    def train():
        with training.protect(tmp_path, save=EverySteps(100)) as run:
            for _, batch in run.batches(epochs=EPOCHS):
                training.learn(batch, lambda moment: None)
                if run.step == 4:  # the fifth is under way
                    if end == "return":
                        return
                    if end == "SystemExit(0)":
                        raise SystemExit(0)
                    break

    if end == "SystemExit(0)":
        with pytest.raises(SystemExit):
            train()
    else:
        train()
    assert sorted(paths(tmp_path)) == [5]


@pytest.mark.parametrize("way", ["epochs", "bare batches"])
def test_an_epoch_that_is_broken_off_ends_its_step_and_the_next_begins(tmp_path, way):
    """And a run that is resumed there goes on with the next epoch, as the loop did."""

    def train(directory, until):
        training = Training()
        losses = []
        with training.protect(directory, **EACH) as run:
            run.resume()
            epochs = run.epochs(EPOCHS) if way == "epochs" else range(EPOCHS)
            for _ in epochs:
                for batch in run.batches():
                    training.learn(batch, lambda moment: None)
                    if (run.step + 1) % 2 == 0:  # two of an epoch
                        break
                if run.step >= until - 1:
                    break
            losses = training.losses
        return run.step, losses

    steps, losses = train(tmp_path / "all", 6)
    assert (steps, len(losses)) == (6, 6)
    saved = paths(tmp_path / "all")
    assert sorted(saved) == [1, 2, 3, 4, 5, 6]
    for step in (2, 3, 4):
        if way == "epochs" or step != 3:
            again, rest = train(only(tmp_path / "all", saved[step]), 6)
            assert (again, rest) == (6, losses[step:])


def test_gradient_accumulation_counts_updates_not_batches(tmp_path):
    def train(directory, until=STEPS):
        training = Training()
        (optimizer,) = training.optimizers
        with training.protect(directory, **EACH) as run:
            run.resume()
            for number, (_, (images, labels)) in enumerate(run.batches(epochs=2), 2 * run.step):
                nn.functional.cross_entropy(training.model(images), labels).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return run.step, training.outcome()

    steps, outcome = train(tmp_path / "all")
    assert steps == PER_EPOCH
    for step, path in paths(tmp_path / "all").items():
        again = train(only(tmp_path / "all", path))
        assert again == (steps, outcome), step


def test_steps_that_a_scaler_leaves_out_count_and_are_counted_apart(tmp_path):
    def train(directory, until):
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        with swansong.torch.protect(
            model=model, optimizer=optimizer, scaler=scaler, directory=directory, prefix="m", **EACH
        ) as run:
            run.resume()
            while run.step < until:
                optimizer.zero_grad()
                overflow = float("inf") if run.step % 3 == 1 else 1.0
                scaler.scale(model(torch.ones(1, 2)).sum() * overflow).backward()
                scaler.step(optimizer)
                scaler.update()
                run.step_end()
        return run.skipped_steps, scaler.state_dict(), bits(model.weight)

    wanted = train(tmp_path / "all", 6)
    assert wanted[0] == 2
    for step, path in paths(tmp_path / "all").items():
        assert train(only(tmp_path / "all", path), 6) == wanted, step


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
    ids=["LBFGS", "SGD"],
)
def test_closures_resume_at_any_step(tmp_path, make):
    def train(directory):
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        optimizer = make(model.parameters())
        with swansong.torch.protect(
            model=model, optimizer=optimizer, directory=directory, prefix="m", **EACH
        ) as run:
            run.resume()
            while run.step < 5:
                batch = torch.randn(3, 2)

                def closure(batch=batch):
                    optimizer.zero_grad()
                    loss = (model(batch) - 1).square().sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
                run.step_end()
        return bits(model.weight), bits(model.bias)

    wanted = train(tmp_path / "all")
    for step, path in paths(tmp_path / "all").items():
        assert train(only(tmp_path / "all", path)) == wanted, step


# -- kinds of saves -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (CheckpointConfig(3, async_save=True), None),
        (CheckpointConfig(3, async_save="process"), None),
        (CheckpointConfig(3, enc_key=b"k" * 32), b"k" * 32),
        (CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=3600), None),
    ],
    ids=["in the background", "in a process", "encrypted", "by time"],
)
def test_a_save_of_each_kind_resumes(tmp_path, config, key):
    outcome = without("epochs").outcome()
    assert trained(tmp_path, "epochs", config=config).outcome() == outcome
    other = Training()
    assert swansong.torch.load_state(tmp_path, into=other.model, key=key) == STEPS
    for name, tensor in other.model.state_dict().items():
        assert bits(tensor) == outcome[name]


def test_an_encrypted_checkpoint_is_not_loaded_without_its_key(tmp_path):
    trained(tmp_path, "epochs", config=CheckpointConfig(3, enc_key=b"k" * 16))
    with pytest.raises(Exception, match="key"):
        trained(tmp_path, "epochs", config=CheckpointConfig(3))


def test_save_ends_the_step_and_what_it_saves_is_of_one_step(tmp_path):
    training = Training()
    with training.protect(tmp_path, save=EverySteps(1000), keep=KeepLast(9)) as run:
        for _, batch in run.batches(epochs=1):
            training.learn(batch, lambda moment: None)
            if run.step == 1:
                path = run.save()
                assert run.step == 2
                wanted = bits(training.model[0].weight)
    assert path == paths(tmp_path)[2]
    other = Training()
    assert swansong.torch.load_state(path, into=other.model) == 2
    assert bits(other.model[0].weight) == wanted


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        ("*.safetensors", flip),
        ("*.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1])),
        ("*.safetensors", Path.unlink),
        ("manifest.json", flip),
    ],
    ids=["one bit", "cut off", "missing", "manifest"],
)
def test_damage_to_the_newest_falls_back_to_the_one_before_and_is_named(tmp_path, which, damage):
    trained(tmp_path, "epochs", save=EverySteps(5), keep=KeepLast(5))
    newest = paths(tmp_path)[STEPS]
    (file,) = newest.glob(which)
    file.chmod(0o600)
    damage(file)
    training = Training()
    with training.protect(tmp_path) as run:
        with pytest.warns(SwansongWarning, match=newest.name):
            assert run.resume() == 10
        LOOPS["epochs"](training, run)
    assert training.outcome() == without("epochs").outcome()


def test_nothing_usable_is_an_error_and_never_a_fresh_start_unasked(tmp_path):
    trained(tmp_path, "epochs", save=EverySteps(100))
    (path,) = paths(tmp_path).values()
    (data,) = path.glob("*.safetensors")
    data.unlink()
    with pytest.raises(DamagedError), Training().protect(tmp_path) as run:
        run.resume()
    training = Training()
    with training.protect(tmp_path) as run:
        with pytest.warns(SwansongWarning, match=path.name):
            assert run.resume(allow_fresh=True) == 0
        LOOPS["epochs"](training, run)
    assert training.outcome() == without("epochs").outcome()


# -- loading ------------------------------------------------------------------------------------------


def test_load_state_takes_model_and_optimizers_and_leaves_generators(tmp_path):
    done = trained(tmp_path, "batches", save=EverySteps(100))
    other = Training()
    before = torch.get_rng_state()
    named = {f"optimizer {number}": one for number, one in enumerate(other.optimizers)}
    assert swansong.torch.load_state(tmp_path, into=other.model, optimizer=named) == STEPS
    assert torch.equal(torch.get_rng_state(), before)
    for number, optimizer in enumerate(other.optimizers):
        theirs = done.optimizers[number].state_dict()
        assert bits(optimizer.state_dict()["state"][0]["exp_avg"]) == bits(theirs["state"][0]["exp_avg"])
        assert optimizer.param_groups[0]["lr"] == theirs["param_groups"][0]["lr"]


def test_load_state_of_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        swansong.torch.load_state(tmp_path, into=Training().model)
    with pytest.raises(CheckpointNotFoundError):
        swansong.torch.load_state(tmp_path / "nowhere", into=Training().model)


def test_load_state_of_several_series_asks_which(tmp_path):
    trained(tmp_path, "epochs", save=EverySteps(100))
    trained(tmp_path, "epochs", save=EverySteps(100), prefix="other")
    with pytest.raises(LoadError, match="prefix"):
        swansong.torch.load_state(tmp_path, into=Training().model)
    assert swansong.torch.load_state(tmp_path, into=Training().model, prefix="other") == STEPS


def test_another_model_is_refused_and_nothing_is_changed(tmp_path):
    trained(tmp_path, "epochs", save=EverySteps(100))
    other = nn.Sequential(nn.Linear(4, 9))
    before = bits(other[0].weight)
    with pytest.raises(LoadError, match=r"0\.weight"):
        swansong.torch.load_state(tmp_path, into=other)
    assert bits(other[0].weight) == before


# -- nothing is left ----------------------------------------------------------------------------------


def test_without_a_controller_no_thread_and_no_hook_is_left(tmp_path):
    threads = set(threading.enumerate())
    training = trained(tmp_path, "epochs", config=CheckpointConfig(3, async_save=True))
    assert set(threading.enumerate()) == threads
    for optimizer in training.optimizers:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not [name for name in vars(optimizer) if "swansong" in name]
    assert not training.model._forward_hooks
    hidden = [path.name for path in Path(tmp_path).rglob("*") if ".swansong" in path.parts]
    assert not [name for name in hidden if name.startswith("job")]
