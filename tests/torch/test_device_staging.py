"""State on a device, copied while its streams may hang: as it lies, whole, and never waited for too long."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from array_job import until
from device_queue import SIDE, QueuedCopies, QueuedCounters, QueuedDevice
from swansong.errors import ClockNotReadableError, ConfigError, UnrepresentableError
from swansong.state import tree
from swansong.torch.device_clock import DeviceClock
from swansong.torch.device_staging import DeviceStaging
from swansong.torch.tensors import host_tensor

torch.set_num_threads(1)


class Job:
    """A component on a device, its clock and its staging; the time is what the test says."""

    def __init__(self, available=1 << 30, **state):
        self.device = QueuedDevice()
        self.state = {name: self.device.move(tensor) for name, tensor in state.items()}
        self.clock = DeviceClock("k", QueuedCounters(self.device))
        self.device.run()
        self.copies = QueuedCopies(self.device)
        self.now = 0.0
        self.hangs = False
        self.staging = DeviceStaging(
            self.copies,
            self.clock,
            lambda as_tensor: tree.flatten(self.state, as_tensor),
            patience_s=1.0,
            available=lambda: available,
            monotonic=lambda: self.now,
            pause=lambda seconds: self.pause(seconds),
        )

    def pause(self, seconds):
        self.now += seconds
        if not self.hangs:
            self.device.run(1, stream=SIDE)

    def update(self):
        self.clock.queue()
        self.clock.begin()
        for tensor in self.state.values():
            self.device.queue(lambda tensor=tensor: tensor.add_(1))
        self.clock.finish()


def dense(*shape, dtype=torch.float32):
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float64).reshape(shape).to(dtype)


def equal(shown, tensor):
    wanted = host_tensor(tensor, "wanted")
    assert (shown.dtype, shown.shape) == (wanted.dtype, wanted.shape)
    assert shown.array.tobytes() == wanted.array.tobytes()


# -- what is shown ------------------------------------------------------------------------------------


TENSORS = {
    "float32": dense(3, 4),
    "float64": dense(5, dtype=torch.float64),
    "float16": dense(7, dtype=torch.float16),
    "bfloat16": dense(2, 3, dtype=torch.bfloat16),
    "float8": dense(9, dtype=torch.float8_e4m3fn),
    "complex": torch.complex(dense(3), dense(3)),
    "bool": torch.tensor([True, False, True]),
    "int64": dense(4, dtype=torch.int64),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "transposed": dense(3, 5).t(),
    "channels last": dense(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": dense(6, 8)[1::2, 2:5],
    "expanded": dense(1, 4).expand(3, 4),
    "parameter": torch.nn.Parameter(dense(4)),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_shown_bit_for_bit_in_other_memory(kind):
    tensor = TENSORS[kind]
    job = Job(other=dense(33), tensor=tensor)
    job.staging.prepare()
    flat = job.staging.show()
    equal(flat.tensors["tensor"], tensor)
    equal(flat.tensors["other"], job.state["other"])
    address = flat.tensors["tensor"].array.__array_interface__["data"][0]
    assert tensor.data_ptr() != address


def test_tensors_in_one_piece_of_memory_do_not_overlap():
    job = Job(**{f"layer{n}": dense(7, n + 1) + n for n in range(5)})
    job.staging.prepare()
    flat = job.staging.show()
    assert len(job.copies.pinned) == 1
    for name, tensor in job.state.items():
        equal(flat.tensors[name], tensor)


def test_what_is_shown_does_not_change_with_the_device():
    job = Job(weight=dense(4))
    job.staging.prepare()
    flat = job.staging.show()
    job.update()
    job.device.run()
    equal(flat.tensors["weight"], dense(4))
    equal(job.staging.show().tensors["weight"], dense(4) + 1)


def test_tied_tensors_are_copied_once_and_stay_tied():
    weight = dense(128, 8)
    job = Job(first=weight, second=weight, view=weight.t())
    job.staging.prepare()
    flat = job.staging.show()
    assert flat.aliases == {"second": "first"}
    assert job.copies.pinned == [weight.nbytes]
    equal(flat.tensors["view"], weight.t())


def test_tensors_on_the_cpu_are_shown_in_place():
    job = Job(weight=dense(4))
    job.state["step"] = step = torch.tensor(7.0)
    job.staging.prepare()
    shown = job.staging.show().tensors["step"]
    step.fill_(8.0)
    equal(shown, step)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.complex(dense(3), dense(3)).conj(), id="conjugated"),
        pytest.param(torch.empty(3, device="meta"), id="on-another-device"),
        pytest.param(dense(3).to_sparse(), id="sparse"),
    ],
)
def test_what_does_not_lie_there_as_it_is_is_refused_at_start_by_name(tensor):
    job = Job(weight=dense(4))
    job.state["odd"] = [job.device.move(tensor) if tensor.layout is torch.strided else tensor]
    with pytest.raises(UnrepresentableError, match=r"odd\[0\]"):
        job.staging.prepare()


# -- memory -------------------------------------------------------------------------------------------


def test_nothing_is_taken_during_an_incident():
    job = Job(weight=dense(100), bias=dense(3))
    job.staging.prepare()
    taken = job.staging.nbytes
    job.device.calls.clear()
    job.staging.show()
    assert job.staging.nbytes == taken
    assert set(job.device.calls) == {"start", "over"}


def test_state_that_appears_is_given_memory_at_the_next_boundary():
    job = Job(a=dense(10), z=dense(300))
    job.staging.prepare()
    job.state = {"a": job.state["a"], "m": job.device.move(dense(200)), "z": job.state["z"]}
    with pytest.raises(
        ClockNotReadableError, match="state on the device have appeared since the last boundary"
    ):
        job.staging.show()
    assert not job.device.calls["start"]
    job.staging.prepare()
    flat = job.staging.show()
    for name, tensor in job.state.items():
        equal(flat.tensors[name], tensor)
    job.staging.prepare()
    assert len(job.copies.pinned) == 2


def test_state_that_moved_to_other_memory_needs_no_more():
    job = Job(a=dense(10), b=dense(20))
    job.staging.prepare()
    job.state = {name: job.device.move(tensor.clone() * 2) for name, tensor in job.state.items()}
    job.staging.prepare()
    equal(job.staging.show().tensors["b"], dense(20) * 2)
    assert len(job.copies.pinned) == 1


def test_too_little_host_memory_is_said_before_any_is_taken():
    job = Job(available=1000, weight=dense(300))
    with pytest.raises(ConfigError, match=r"wanted 1536 bytes of host memory .* 1000 are available"):
        job.staging.prepare()
    assert not job.copies.pinned


def test_memory_is_given_back_at_the_end():
    job = Job(weight=dense(300))
    job.staging.prepare()
    job.staging.show()
    job.staging.close()
    assert not job.copies.pinned


def test_memory_that_a_copy_may_yet_write_to_is_not_given_back():
    job = Job(weight=dense(300))
    job.staging.prepare()
    job.hangs = True
    with pytest.raises(ClockNotReadableError):
        job.staging.show()
    job.staging.close()
    assert job.copies.pinned
    job.device.run(stream=SIDE)


# -- a device that hangs, moves or fails --------------------------------------------------------------


def test_a_copy_that_hangs_is_waited_for_no_longer_than_patience_and_is_gone_on_with_later():
    job = Job(weight=dense(4), bias=dense(2))
    job.staging.prepare()
    job.hangs = True
    for _ in range(3):
        begun = job.now
        with pytest.raises(ClockNotReadableError, match="not copied yet; the device may hang"):
            job.staging.show()
        assert job.now - begun == pytest.approx(1.0, abs=0.01)
    assert job.device.calls["start"] == 1
    job.hangs = False
    equal(job.staging.show(within_s=0.5).tensors["weight"], dense(4))
    assert job.device.calls["start"] == 1


def test_no_second_copy_is_queued_behind_one_that_hangs():
    job = Job(weight=dense(4))
    job.staging.prepare()
    job.hangs = True
    for _ in range(3):
        with pytest.raises(ClockNotReadableError, match="not copied yet"):
            job.staging.show()
        job.staging.forget()
    assert job.device.calls["start"] == 1


def test_memory_that_was_copied_to_again_is_not_shown_as_the_former_step():
    job = Job(weight=dense(4))
    job.staging.prepare()
    job.staging.show()
    job.update()
    job.device.run()
    job.hangs = True
    with pytest.raises(ClockNotReadableError, match="not copied yet"):
        job.staging.show()
    job.hangs = False
    job.clock.reset(0)  # another state of the same step was loaded
    job.device.run()
    equal(job.staging.show().tensors["weight"], dense(4) + 1)


def test_a_stream_that_hangs_in_an_update_is_not_asked_for_anything():
    job = Job(weight=dense(4))
    job.staging.prepare()
    job.update()
    job.device.run(3)
    job.device.calls.clear()
    with pytest.raises(ClockNotReadableError, match="being updated"):
        job.staging.show()
    assert not job.device.calls


def test_a_copy_during_which_the_clock_moved_is_void():
    job = Job(weight=dense(4), bias=dense(2))
    job.staging.prepare()
    job.hangs = True
    with pytest.raises(ClockNotReadableError, match="not copied yet"):
        job.staging.show()
    job.update()  # as after a false alarm
    job.device.run(stream=SIDE)
    job.device.run()
    job.hangs = False
    flat = job.staging.show()
    assert job.device.calls["start"] == 2
    equal(flat.tensors["weight"], dense(4) + 1)


def test_an_update_that_comes_between_the_copies_of_two_tensors_voids_both():
    job = Job(weight=dense(4), bias=dense(2))
    job.staging.prepare()

    def pause(_):
        job.device.run(1, stream=SIDE)
        if job.clock.read().queued == 0:
            job.update()
            job.device.run()

    job.pause = pause
    with pytest.raises(ClockNotReadableError, match="was updated while it was copied"):
        job.staging.show()
    flat = job.staging.show()
    equal(flat.tensors["weight"], dense(4) + 1)
    equal(flat.tensors["bias"], dense(2) + 1)


def test_what_is_being_copied_is_not_freed_before_that_is_over():
    job = Job(weight=dense(4))
    job.staging.prepare()
    job.hangs = True
    with pytest.raises(ClockNotReadableError):
        job.staging.show()
    job.state.clear()
    gc.collect()
    assert job.device.run(stream=SIDE) == 2


def test_what_was_copied_is_kept_alive_no_longer():
    job = Job(weight=dense(4))
    job.staging.prepare()
    flat = job.staging.show()
    assert list(flat.tensors) == ["weight"]
    assert [source() for source in job.copies.sources] == [None]


def test_the_same_step_is_copied_once_unless_it_is_to_be_forgotten():
    job = Job(weight=dense(4))
    job.staging.prepare()
    first = job.staging.show()
    assert job.staging.show() is first
    assert job.device.calls["start"] == 1
    job.state["weight"].mul_(2)  # by the loop itself, outside of updates
    job.staging.forget()
    equal(job.staging.show().tensors["weight"], dense(4) * 2)


@pytest.mark.parametrize("when", ["start", "over"])
def test_a_device_that_has_failed_is_said_to_have(when):
    job = Job(weight=dense(4))
    job.staging.prepare()
    if when == "over":
        job.hangs = True
        with pytest.raises(ClockNotReadableError):
            job.staging.show()
    job.device.failed = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(ClockNotReadableError, match="cannot be read any more: CUDA error: an illegal memory"):
        job.staging.show()


def test_two_threads_share_one_copy():
    job = Job(weight=dense(4))
    job.staging.prepare()
    waiting, goes_on = threading.Event(), threading.Event()

    def pause(seconds):
        waiting.set()
        assert goes_on.wait(10.0)
        Job.pause(job, seconds)

    job.pause = pause
    shown = []
    threads = [
        threading.Thread(target=lambda: shown.append(job.staging.show(10.0)), daemon=True) for _ in "12"
    ]
    for thread in threads:
        thread.start()
    assert waiting.wait(10.0)
    with pytest.raises(ClockNotReadableError, match="copied in another thread"):
        job.staging.show(0.0)
    goes_on.set()
    until(lambda: len(shown) == 2)
    assert shown[0] is shown[1]
    assert job.device.calls["start"] == 1
