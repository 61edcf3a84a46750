"""A script that forgets something, or wants what cannot be, is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swansong.torch
from swansong import CheckpointConfig
from swansong.errors import ConfigError, NotSupportedError, SwansongWarning
from swansong.policy.save import EverySteps
from swansong.torch import protecting

torch.set_num_threads(1)


def small():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def learn(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def pairs(count=6):
    return DataLoader(TensorDataset(torch.ones(count, 2)), batch_size=1)


def test_a_loop_whose_optimizer_is_another_is_told_after_an_epoch(tmp_path):
    model, optimizer = small()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    run = swansong.torch.protect(
        model=model, optimizer=optimizer, loader=pairs(), directory=tmp_path, prefix="m"
    )
    with run:
        for epoch in run.epochs(2):
            batches = run.batches()
            for _ in range(6):
                next(batches)
                learn(model, other)
            if epoch == 1:
                with pytest.warns(SwansongWarning, match="an epoch of 6 batches has gone by, and no update"):
                    next(batches, None)
            else:
                next(batches, None)  # said once


def test_a_loop_that_never_touches_the_run_is_told_at_the_end(tmp_path):
    model, optimizer = small()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    run = swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m")
    run.__enter__()
    learn(model, other)
    with pytest.warns(SwansongWarning, match="training has ended, and no update was seen"):
        run.__exit__(None, None, None)


def test_a_loop_without_any_step_end_is_told_after_a_hundred_updates(tmp_path):
    model, optimizer = small()
    with swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m"):
        for _ in range(99):
            learn(model, optimizer)
        with pytest.warns(SwansongWarning, match="100 updates were seen, and no step's end"):
            learn(model, optimizer)


def test_a_loop_that_iterates_its_loader_by_itself_is_told_at_the_first_step(tmp_path):
    model, optimizer = small()
    loader = pairs(3)
    with swansong.torch.protect(
        model=model, optimizer=optimizer, loader=loader, directory=tmp_path, prefix="m"
    ) as run:
        batches = iter(loader)
        next(batches)
        learn(model, optimizer)
        with pytest.warns(SwansongWarning, match=r"run\.batches\(\)"):
            run.step_end()
        for _ in batches:
            learn(model, optimizer)
            run.step_end()
    assert run.step == 3


def test_parameters_replaced_before_protect_are_refused(tmp_path):
    model, optimizer = small()
    model.weight = nn.Parameter(torch.zeros(1, 2))
    with pytest.raises(ConfigError, match="1 of its parameters are not the model's"):
        swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m")


def test_parameters_replaced_after_protect_are_noticed_at_the_first_step(tmp_path):
    model, optimizer = small()
    run = swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m")
    run.__enter__()
    model.weight = nn.Parameter(torch.zeros(1, 2))
    learn(model, optimizer)
    with pytest.raises(ConfigError, match="1 of its parameters are not the model's") as caught:
        run.step_end()
    run.__exit__(type(caught.value), caught.value, None)


def test_a_sole_holder_is_told_what_its_death_would_cost(tmp_path, monkeypatch):
    model, optimizer = small()
    two = type("Two", (), {"rank": 1, "size": 2})
    monkeypatch.setattr(protecting, "Ranks", two)
    monkeypatch.setattr(protecting.Vote, "of_all_ranks", lambda: None)
    given = {"model": model, "optimizer": optimizer, "directory": tmp_path, "prefix": "m"}
    given |= {"ttp": "127.0.0.1:2000", "incarnation": b"i" * 16}
    with pytest.warns(SwansongWarning, match="rank 1 is the only holder"):
        swansong.torch.protect(**given).__enter__().__exit__(ValueError, ValueError(), None)
    swansong.torch.protect(**given, replicas="all").__enter__().__exit__(ValueError, ValueError(), None)


def test_a_module_on_a_device_that_no_clock_covers_is_refused(tmp_path):
    with torch.device("meta"):
        model, optimizer = small()
    with pytest.raises(NotSupportedError, match="meta"):
        swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"overlap": True}, NotSupportedError),
        ({"when_busy": "skip"}, NotSupportedError),
        ({"optimizer": []}, ConfigError),
        ({"optimizer": object()}, ConfigError),
        ({"scheduler": object()}, ConfigError),
        ({"also": {"thing": object()}}, ConfigError),
        ({"ttp": "nowhere"}, ConfigError),
        ({"config": CheckpointConfig(1), "save": EverySteps(1)}, ConfigError),
    ],
    ids=["overlap", "when_busy", "no optimizer", "no optimizer at all", "scheduler", "also", "ttp", "both"],
)
def test_arguments_that_cannot_be_are_refused(tmp_path, arguments, error):
    model, optimizer = small()
    given = {"model": model, "optimizer": optimizer, "directory": tmp_path, "prefix": "m"} | arguments
    with pytest.raises(error):
        swansong.torch.protect(**given)


def test_resume_comes_first(tmp_path):
    model, optimizer = small()
    with swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m") as run:
        learn(model, optimizer)
        with pytest.raises(ConfigError, match="first"):
            run.resume()
        run.step_end()


def test_what_needs_a_loader_or_a_config_says_so(tmp_path):
    model, optimizer = small()
    with swansong.torch.protect(model=model, optimizer=optimizer, directory=tmp_path, prefix="m") as run:
        learn(model, optimizer)
        run.step_end()
        with pytest.raises(ConfigError, match="loader"):
            next(run.batches())
        with pytest.raises(NotSupportedError, match="config"):
            run.save()
        with pytest.raises(NotSupportedError, match="ttp"):
            run.persist_and_stop()
