"""A run on a device, from its first copy to the last: a stand-in carries everything out at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from device_queue import QueuedCopies, QueuedCounters, QueuedDevice
from swansong.engine.clock import Gate
from swansong.errors import ClockNotReadableError, SwansongWarning
from swansong.torch.device_setup import EXPERIMENTAL
from swansong.torch.on_device import OnDevice, warnings_for
from swansong.torch.state import TrainingState
from swansong.torch.updates import Updates


class Prompt(QueuedDevice):
    """Never behind."""

    def queue(self, work, stream=None):
        work()


class Loop:
    def __init__(self, optimizer=torch.optim.Adam):
        torch.manual_seed(1)
        self.device = Prompt()
        self.model = nn.Linear(3, 2)
        for parameter in self.model.parameters():
            self.device.move(parameter)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        state = TrainingState(self.model, {"optimizer": self.optimizer}, {})
        with pytest.warns(SwansongWarning, match="experimental"):
            self.on_device = OnDevice(torch.device("cuda:0"), state.live)
        counters, copies = QueuedCounters(self.device), QueuedCopies(self.device)
        self.clock = self.on_device.begin_with(counters, copies, key="k", step=4, cells=None)
        self.updates = Updates({"optimizer": self.optimizer})
        self.updates.attach(lambda: None)
        self.updates.use(self.clock, Gate(lease_s=60))

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        for values in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                self.device.move(values[name])

    def boundary(self):
        self.updates.boundary()
        self.on_device.boundary()


def test_at_every_boundary_the_state_is_shown_as_it_is_in_other_memory():
    loop = Loop()
    for step in range(4, 8):
        assert loop.clock.read().step == step
        shown = loop.on_device.show().tensors
        for name, parameter in loop.model.named_parameters():
            there = torch.from_numpy(shown[f"model/{name}"].array)
            assert torch.equal(there, parameter)
            assert there.data_ptr() != parameter.data_ptr()
        moments = [values["exp_avg"] for values in loop.optimizer.state.values()]
        assert len(moments) == (0 if step == 4 else 2)
        for number, moment in enumerate(moments):
            array = shown[f"optimizer/state/{number}/exp_avg"].array
            assert torch.equal(torch.from_numpy(array), moment)
        loop.step()
        loop.boundary()


def test_in_the_midst_of_an_update_nothing_is_shown():
    loop = Loop()
    found = []

    def look(*_):
        with pytest.raises(ClockNotReadableError):
            loop.on_device.show()
        found.append(loop.clock.read().step)

    handle = loop.optimizer.register_step_pre_hook(look)  # after ours, before the first write
    loop.step()
    handle.remove()
    assert found == [None]


def test_when_the_run_is_over_the_memory_is_given_back_and_nothing_is_shown():
    loop = Loop()
    loop.on_device.close()
    loop.on_device.close()
    loop.on_device.boundary()
    with pytest.raises(ClockNotReadableError, match="is over"):
        loop.on_device.show()


def test_what_is_to_be_known_is_said_before_a_device_is_followed():
    assert list(warnings_for({})) == [EXPERIMENTAL]
    assert len(list(warnings_for({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))) == 2
