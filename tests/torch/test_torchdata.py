"""torchdata's StatefulDataLoader, the real one: a run that stops within an epoch goes on where it stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import swansong.torch
from swansong.errors import LoadError
from swansong.torch.loader_state import pack_loader, unpack_loader

# Its own code calls what PyTorch has given up.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def train(directory, *, workers, stop=None):
    """(the step at which it began, what it took of the data, the weights at its end)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(20, 4))
    loader = StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    taken = []
    with swansong.torch.protect(
        model=model,
        optimizer=optimizer,
        loader=loader,
        directory=directory,
        prefix="m",
        config=swansong.torch.CheckpointConfig(save_checkpoint_steps=1),
    ) as run:
        begun = run.resume()
        for _, (batch,) in run.batches(epochs=2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(batch.sum().item())
            if run.step + 1 == stop:
                break
    return begun, taken, model[0].weight.detach().clone()


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_data_go_on_within_an_epoch_and_end_with_the_same_bits(tmp_path, workers):
    _, whole, weights = train(tmp_path / "whole", workers=workers)
    assert len(whole) == 10
    for stop in (3, 7):
        _, first, _ = train(tmp_path / f"parted{stop}", workers=workers, stop=stop)
        begun, rest, resumed = train(tmp_path / f"parted{stop}", workers=workers)
        assert begun == stop
        assert first + rest == whole
        assert torch.equal(resumed, weights)


def test_a_state_comes_back_with_its_tensors_shared_ones_too():
    shared = torch.arange(3)
    state = {"a": [shared, shared], "b": (1, None, torch.tensor(2.5)), "c": {}}
    packed = pack_loader(state)
    shown = dict(packed["dict"])
    plain = {
        "skeleton": shown["skeleton"],
        "tensors": [[t.name, t.dtype, list(t.shape), t.data] for t in shown["tensors"]],
    }
    back = unpack_loader(plain)
    assert [t.tolist() for t in back["a"]] == [[0, 1, 2]] * 2
    assert (back["b"][:2], back["b"][2].item(), back["c"]) == ((1, None), 2.5, {})
    assert pack_loader(None) is unpack_loader(None) is None


@pytest.mark.parametrize(
    "packed",
    [3, {}, {"skeleton": b"{", "tensors": []}, {"skeleton": b"1", "tensors": [["x", "float32", [2], b"1"]]}],
)
def test_what_is_no_state_of_a_loader_is_refused(packed):
    with pytest.raises(LoadError, match="position in the data: loader"):
        unpack_loader(packed)
