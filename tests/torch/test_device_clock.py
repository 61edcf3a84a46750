"""A clock that a device keeps: whole only when the device has done all that Python dispatched."""

from __future__ import annotations

import threading
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from array_job import until
from device_queue import QueuedCounters, QueuedDevice
from swansong.engine.clock import UNKNOWN, Gate, GateState, Reading
from swansong.errors import ConfigError, NotSupportedError, TrainingInterrupted
from swansong.protocol.messages import Action, FaultKind, Outcome, Release
from swansong.torch.device_clock import DeviceClock
from swansong.torch.updates import Updates

torch.set_num_threads(1)


class Training:
    """A component of two values on a device, which every update raises one after the other."""

    def __init__(self, step=0):
        self.device = QueuedDevice()
        self.counters = QueuedCounters(self.device)
        self.values = [float(step)] * 2
        self.clock = DeviceClock("k", self.counters, step=step, pause=lambda _: self.device.run(1))
        self.device.run()

    def write(self, amount=1.0):
        """Dispatch the kernels of an update, or of a part of one."""
        for place in range(2):
            self.device.queue(lambda place=place: self._add(place, amount))

    def update(self):
        self.clock.queue()
        self.clock.begin()
        self.write()
        self.clock.finish()

    def go_on(self):
        """A second optimizer steps in the same step, and takes nothing back: the value ends half higher."""
        self.clock.reopen()
        self.write(0.5)
        self.clock.finish()

    def _add(self, place, amount):
        self.values[place] += amount

    @property
    def at(self):
        reading = self.clock.read()
        return reading.queued, reading.begun, reading.done


# -- one update ---------------------------------------------------------------------------------------


def test_begun_arrives_before_the_first_write_and_done_after_the_last():
    training = Training()
    training.update()
    seen = [(training.at, tuple(training.values))]
    while training.device.run(1):
        seen.append((training.at, tuple(training.values)))
    assert seen == [
        ((1, 0, 0), (0.0, 0.0)),
        ((1, 0, 0), (0.0, 0.0)),
        ((1, 1, 0), (0.0, 0.0)),
        ((1, 1, 0), (1.0, 0.0)),
        ((1, 1, 0), (1.0, 1.0)),
        ((1, 1, 0), (1.0, 1.0)),
        ((1, 1, 1), (1.0, 1.0)),
    ]


def test_a_stream_that_hangs_leaves_the_clock_readable_and_not_whole():
    training = Training()
    training.update()
    training.device.failed = "asked a device that hangs"
    for _ in range(3):
        assert training.clock.read() == Reading(1, 0, 0)
        assert training.clock.read().step is None


def test_updates_that_python_dispatched_ahead_are_waited_for():
    training = Training(step=5)
    for _ in range(3):
        training.update()
    steps = [training.clock.read().step]
    while training.device.run(1):
        steps.append(training.clock.read().step)
    assert steps == [None] * (len(steps) - 1) + [8]


# -- updates that go on, are left out, or never come --------------------------------------------------


def test_an_update_that_goes_on_is_not_whole_from_that_moment_though_the_device_has_seen_nothing_of_it():
    training = Training()
    training.update()
    training.device.run()
    assert training.clock.read().step == 1
    training.clock.reopen()
    assert training.at == (1, 1, 0)
    training.write(0.5)
    training.clock.finish()
    assert training.at == (1, 1, 0)
    training.device.run()
    assert training.clock.read().step == 1
    assert training.values == [1.5, 1.5]


def test_an_update_that_goes_on_while_its_first_part_runs_is_whole_only_after_both():
    training = Training()
    training.update()
    training.go_on()
    steps = [training.clock.read().step]
    while training.device.run(1):
        steps.append(training.clock.read().step)
    assert steps == [None] * (len(steps) - 1) + [1]


def test_a_step_that_is_left_out_counts_once_the_device_has_come_to_it():
    training = Training(step=2)
    training.update()
    training.clock.skip()
    assert training.clock.read().step is None
    training.device.run()
    assert training.clock.read().step == 4


def test_what_was_queued_and_has_not_begun_is_taken_back_and_what_was_dispatched_stays():
    training = Training()
    training.update()
    training.clock.queue()
    training.clock.queue()
    training.clock.withdraw()
    training.clock.abandon()
    assert training.at == (1, 0, 0)
    training.device.run()
    assert training.clock.read().step == 1


def test_after_a_reset_it_is_whole_once_the_device_has_done_what_loads_the_state():
    training = Training()
    training.update()
    training.device.queue(lambda: training.values.__setitem__(slice(None), [9.0, 9.0]))
    training.clock.reset(9)
    seen = [(training.clock.read().step, training.values[0])]
    while training.device.run(1):
        seen.append((training.clock.read().step, training.values[0]))
    assert {step for step, value in seen if value != 9.0} == {None}
    assert seen[-1] == (9, 9.0)
    training.update()
    training.device.run()
    assert training.clock.read().step == 10


@given(data=st.data(), step=st.integers(0, 3))
def test_a_copy_between_two_equal_whole_readings_is_of_that_step_whatever_happens_meanwhile(data, step):
    training = Training(step=step)
    expected = {step: [float(step)] * 2}
    latest = step
    value = float(step)
    for action in data.draw(
        st.lists(
            st.sampled_from(["update", "go on", "skip", "withdraw", "abandon", "copy", "run"]), max_size=12
        )
    ):
        if action == "update":
            training.update()
            latest, value = latest + 1, value + 1
        elif action == "go on" and latest > step:
            training.go_on()
            value += 0.5
        elif action == "skip":
            training.clock.skip()
            latest += 1
        elif action in ("withdraw", "abandon"):
            training.clock.queue()
            getattr(training.clock, action)()
        elif action == "copy":
            before = training.clock.read()
            copy = [training.values[0]]
            training.device.run(data.draw(st.integers(0, 8)))
            copy.append(training.values[1])
            if before.step is not None and training.clock.read() == before:
                assert copy == expected[before.step]
        else:
            training.device.run(data.draw(st.integers(1, 8)))
        expected[latest] = [value] * 2
        reading = training.clock.read()
        assert reading.done <= reading.begun <= reading.queued
    training.device.run()
    assert training.clock.read().step == latest
    assert training.values == expected[latest]


# -- what it needs ------------------------------------------------------------------------------------


def test_the_record_that_outlives_the_process_does_not_claim_to_know_the_device():
    cells = memoryview(array("q", [0, 0, 0]))
    device = QueuedDevice()
    clock = DeviceClock("k", QueuedCounters(device), step=3, cells=cells)
    assert list(cells) == [3, UNKNOWN, UNKNOWN]
    device.run()
    clock.queue()
    clock.begin()
    clock.finish()
    device.run()
    assert list(cells) == [4, UNKNOWN, UNKNOWN]
    assert clock.read().step == 4


def test_an_update_that_has_not_passed_the_gate_is_refused():
    training = Training()
    with pytest.raises(RuntimeError, match="component k: an update begins that has not passed the gate"):
        training.clock.begin()
    training.device.run()
    assert training.clock.read().step == 0


def test_a_negative_step_is_refused():
    with pytest.raises(ConfigError, match="step of component k: wanted 0 or more, got -1"):
        Training().clock.reset(-1)


@pytest.mark.parametrize("call", ["await_device", "begin", "check_stream"])
def test_an_update_that_is_captured_into_a_graph_is_refused(call):
    training = Training()
    training.clock.queue()
    training.device.capturing = True
    with pytest.raises(NotSupportedError, match="captured into a CUDA graph, whose replays pass no hook"):
        getattr(training.clock, call)()


def test_optimizers_of_one_step_on_two_streams_are_refused():
    training = Training()
    training.clock.queue()
    training.clock.begin()
    training.clock.check_stream()
    training.device.current = "another"
    with pytest.raises(NotSupportedError, match="the optimizers of one step run on different CUDA streams"):
        training.clock.check_stream()


def test_the_end_of_an_update_is_told_on_its_own_stream_wherever_it_is_noticed():
    training = Training()
    training.device.current = "updates"
    training.clock.queue()
    training.clock.begin()
    training.write()
    training.device.current = "main"
    training.clock.finish()
    assert not training.device.run()
    assert training.clock.read().step is None
    training.device.run(stream="updates")
    assert training.clock.read().step == 1


# -- waiting before the gate --------------------------------------------------------------------------


def test_an_update_waits_for_the_backward_pass_so_a_collective_that_hangs_leaves_the_state_whole():
    training = Training()
    gradients = []
    training.device.queue(lambda: gradients.append("there"))
    training.clock.await_device(Gate(lease_s=10.0))
    assert gradients == ["there"]
    assert training.clock.read().step == 0


def test_who_waits_for_a_stream_that_hangs_can_be_interrupted_and_has_queued_nothing():
    training = Training()
    gate = Gate(lease_s=10.0)
    looked = threading.Event()
    clock = DeviceClock("k", QueuedCounters(training.device), pause=lambda _: looked.set())
    raised = []

    def train():
        try:
            clock.await_device(gate)
        except TrainingInterrupted as error:
            raised.append(error)

    training.device.queue(lambda: None)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert looked.wait(10.0)
    gate.close()
    until(lambda: gate.state() is GateState.PARKED)
    gate.interrupt(
        Release(incident="i", action=Action.STOP, cause=FaultKind.LOST, outcome=Outcome.NOTHING, step=1)
    )
    thread.join(10.0)
    assert [error.step for error in raised] == [1]
    assert clock.read().queued == 0


# -- with the optimizers' hooks -----------------------------------------------------------------------


class OnDevice(torch.optim.Optimizer):
    """Adds one to its parameters, later."""

    def __init__(self, parameters, device):
        super().__init__(parameters, {})
        self.device = device

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.device.queue(lambda parameter=parameter: parameter.data.add_(1.0))


def test_the_hooks_of_several_optimizers_keep_it_and_it_is_whole_only_at_steps():
    device = QueuedDevice()
    model = nn.Linear(1, 1)
    model.weight.data.zero_()
    model.bias.data.zero_()
    parts = [OnDevice([parameter], device) for parameter in model.parameters()]
    updates = Updates({"0": parts[0], "1": parts[1]})
    clock = DeviceClock("k", QueuedCounters(device))
    updates.attach(lambda: None)
    updates.use(clock, None)
    for _ in range(3):
        for part in parts:
            part.step()
        updates.boundary()
    seen = []
    while device.run(1):
        step = clock.read().step
        seen.append(step)
        assert step is None or model.weight.item() == model.bias.item() == step
    assert seen[-1] == 3
    updates.detach()
