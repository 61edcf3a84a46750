"""Under torch.compile: models are resumed to the same bits, and compiled updates are seen like others."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from array_job import until
from swansong.config import CheckpointConfig
from swansong.engine.clock import Gate, GateState, UpdateClock
from swansong.torch.updates import Updates
from torch_training import Training, by_batches, without

EAGER = {"backend": "eager", "fullgraph": True}


def wrapped(model):
    return torch.compile(model, **EAGER)


def in_place(model):
    model.compile(**EAGER)
    return model


class Net(nn.Module):
    """Layers of their own: PyTorch compiles no nn.Sequential in place."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def train(directory, compiled, fails_at=None):
    training = Training()
    plain = training.model
    training.model = compiled(Net(plain))

    def fail(moment, step):
        if (moment, step) == ("updated", fails_at):
            raise ValueError("no good")

    with training.protect(directory, config=CheckpointConfig(save_checkpoint_steps=3)) as run:
        resumed = run.resume()
        by_batches(training, run, fail)
    training.model = plain
    return resumed, training.outcome()


@pytest.mark.parametrize("compiled", [wrapped, in_place], ids=lambda how: how.__name__)
def test_a_compiled_model_is_resumed_to_the_bits_of_one_that_is_not_compiled(tmp_path, compiled):
    torch.compiler.reset()
    with pytest.raises(ValueError, match="no good"):
        train(tmp_path, compiled, fails_at=5)
    assert train(tmp_path, compiled) == (3, without("batches").outcome())


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_a_compiled_update_writes_only_within_its_window_and_waits_at_a_closed_gate(foreach):
    torch.compiler.reset()
    model, gate, clock = nn.Linear(2, 1), Gate(lease_s=60), UpdateClock("k")
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
    updates, seen = Updates({"optimizer": optimizer}), []
    updates.attach(lambda: None)
    updates.use(clock, gate)

    def look():
        reading = clock.read()
        seen.append((reading.begun, reading.done, model.weight.tolist()))

    def watched(graph, inputs):
        def run(*given):
            look()
            result = graph.forward(*given)
            look()
            return result

        return run

    step = torch.compile(optimizer.step, backend=watched)
    for number in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        seen.clear()
        before = model.weight.tolist()
        step()
        (*window, first), (*still, last) = seen
        assert (window, still, first) == ([number, number - 1], [number, number - 1], before)
        assert model.weight.tolist() == last != before
        assert clock.read().step == number
        updates.boundary()

    gate.close()
    thread = threading.Thread(target=step)
    thread.start()
    until(lambda: gate.state() is GateState.PARKED)
    assert (clock.read().step, model.weight.tolist()) == (2, last)
    gate.open()
    thread.join()
    assert clock.read().step == 3
