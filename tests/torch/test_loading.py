"""Loading into live parameters: all of it or none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import swansong.torch
from store_support import flip
from swansong.errors import DamagedError
from swansong.policy.save import EverySteps
from swansong.state.tensors import HostTensor
from swansong.torch.tensors import fill, torch_tensor
from torch_training import bits

KEY = bytes(range(32))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))


def saved(directory, key):
    """A trained model, and the checkpoint of it."""
    torch.manual_seed(1)
    trained = model()
    optimizer = torch.optim.Adam(trained.parameters())
    with swansong.torch.protect(
        model=trained, optimizer=optimizer, directory=directory, prefix="run", save=EverySteps(100), key=key
    ) as run:
        for _ in range(3):
            trained(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            run.step_end()
        path = run.save()
    return trained, path


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("by", ["path", "directory"])
def test_a_damaged_checkpoint_changes_nothing_and_a_sound_one_everything(tmp_path, key, by):
    trained, path = saved(tmp_path, key)
    source = path if by == "path" else tmp_path
    fresh = model()
    data = next(path.glob("c*"))
    before = [bits(tensor) for tensor in fresh.state_dict().values()]
    where = int(data.stat().st_size * 0.9)
    flip(data, where)
    if by == "path":
        with pytest.raises(DamagedError):
            swansong.torch.load_state(source, into=fresh, key=key)
        assert [bits(tensor) for tensor in fresh.state_dict().values()] == before
    flip(data, where)
    places = [tensor.data_ptr() for tensor in fresh.state_dict().values()]
    assert swansong.torch.load_state(source, into=fresh, key=key) == 3
    assert [bits(t) for t in fresh.state_dict().values()] == [bits(t) for t in trained.state_dict().values()]
    assert [tensor.data_ptr() for tensor in fresh.state_dict().values()] == places


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_a_run_resumes_what_it_found_sound_without_reading_it_again(tmp_path, key, monkeypatch):
    trained, path = saved(tmp_path, key)
    opened = []
    real = swansong.persist.loading.open_checkpoint
    monkeypatch.setattr(
        swansong.persist.loading, "open_checkpoint", lambda *a, **k: opened.append(a) or real(*a, **k)
    )
    fresh = model()
    optimizer = torch.optim.Adam(fresh.parameters())
    with swansong.torch.protect(
        model=fresh, optimizer=optimizer, directory=tmp_path, prefix="run", save=EverySteps(100), key=key
    ) as run:
        assert run.resume() == 3
        assert opened == [(path,)]
        assert bits(fresh[0].weight) == bits(trained[0].weight)


@pytest.mark.parametrize("how", ["aligned", "unaligned", "read-only", "turned"])
def test_a_parameter_is_filled_from_memory_of_any_kind(how):
    want = np.arange(12, dtype=np.float32).reshape(3, 4)
    raw = np.zeros(49, np.uint8)
    array = {
        "aligned": want.copy(),
        "unaligned": raw[1:49].view(np.float32).reshape(3, 4),
        "read-only": np.frombuffer(want.tobytes(), np.float32).reshape(3, 4),
        "turned": np.ascontiguousarray(want.T).T,
    }[how]
    if how == "unaligned":
        array[...] = want
    target = nn.Parameter(torch.zeros(3, 4))
    fill(target, HostTensor.of(array))
    assert torch.equal(target, torch.from_numpy(want))
    made = torch_tensor(HostTensor.of(array))
    assert torch.equal(made, torch.from_numpy(want))
    made[...] = 0
    assert np.array_equal(array, want)
