"""What is said at start of a job with devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from swansong.errors import ConfigError, NotSupportedError
from swansong.torch.device_setup import (
    available_memory,
    connections_warning,
    nccl_warning,
    sole_device,
    uses_nccl,
)

NAME = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def on(*devices):
    """Stand-ins for parameters on devices that this host need not have."""
    return [(f"layer{n}", SimpleNamespace(device=torch.device(device))) for n, device in enumerate(devices)]


# -- the device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        pytest.param(["cpu", "cpu"], None, id="cpu"),
        pytest.param(["cuda:1", "cuda:1"], torch.device("cuda:1"), id="cuda"),
        pytest.param([], None, id="no-parameters"),
    ],
)
def test_the_one_device_is_found(devices, found):
    assert sole_device(on(*devices)) == found


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param(["cuda:0", "cuda:1"], "layer1: it is on cuda:1, but layer0 on cuda:0", id="two"),
        pytest.param(["cuda:0", "cpu"], "layer1: it is on cpu, but layer0 on cuda:0", id="partly-on-the-cpu"),
    ],
)
def test_parameters_elsewhere_are_refused_by_name(devices, message):
    with pytest.raises(ConfigError, match=f"{message}; wanted all parameters on one device"):
        sole_device(on(*devices))


def test_devices_of_other_kinds_are_refused():
    with pytest.raises(NotSupportedError, match="layer0: it is on xpu:0"):
        sole_device(on("xpu:0"))


# -- what could end survivors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({NAME: "0"}, id="off"),
        pytest.param({"NCCL_ASYNC_ERROR_HANDLING": "0"}, id="off-by-its-former-name"),
        pytest.param({"TORCH_NCCL_BLOCKING_WAIT": "1"}, id="no-watchdog"),
        pytest.param({"TORCH_NCCL_BLOCKING_WAIT": "True", NAME: "3"}, id="no-watchdog-whatever-else"),
        pytest.param({NAME: "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, id="little-debugging"),
    ],
)
def test_no_warning_where_survivors_survive(environment):
    assert nccl_warning(environment) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        pytest.param({}, f"ends the process ({NAME} is not set, which means 3)", id="by-default"),
        pytest.param({NAME: "3"}, f"ends the process ({NAME}=3)", id="ended"),
        pytest.param({NAME: "1"}, f"aborts the communicators and ends the process ({NAME}=1)", id="both"),
        pytest.param({NAME: "2"}, f"run on garbage ({NAME}=2)", id="aborted"),
        pytest.param({NAME: "1", "NCCL_ASYNC_ERROR_HANDLING": "0"}, f"{NAME}=1", id="the-present-name-wins"),
        pytest.param({NAME: "0", "TORCH_NCCL_DESYNC_DEBUG": "1"}, "turns " + NAME + " on again", id="desync"),
        pytest.param(
            {NAME: "0", "TORCH_DISTRIBUTED_DEBUG": "detail"},
            "TORCH_DISTRIBUTED_DEBUG=DETAIL turns",
            id="much-debugging",
        ),
        pytest.param({NAME: "off"}, f"ends the process ({NAME}=off)", id="no-number"),
        pytest.param({"TORCH_NCCL_BLOCKING_WAIT": "0"}, "is not set", id="watchdog-not-turned-off"),
    ],
)
def test_a_warning_says_what_would_end_survivors_and_what_to_do(environment, said):
    warning = nccl_warning(environment)
    assert warning is not None
    assert warning.startswith("unprotected: ")
    assert said in warning
    assert f"Set {NAME}=0 before torch.distributed.init_process_group()" in warning


def test_without_a_process_group_there_is_no_nccl():
    assert not uses_nccl()


def test_one_queue_for_all_streams_is_warned_of():
    warning = connections_warning({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert warning is not None
    assert warning.startswith("unprotected: ")
    assert connections_warning({}) is None
    assert connections_warning({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) is None


# -- memory -------------------------------------------------------------------------------------------


V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")


@pytest.mark.parametrize(
    ("files", "values", "wanted"),
    [
        pytest.param((), (), 8192 * 1024, id="no-group"),
        pytest.param(V2, ("max", "5000", "inactive_file 1"), 8192 * 1024, id="no-limit"),
        pytest.param(V2, ("9000", "5000", "anon 7\ninactive_file 300"), 4300, id="version-2"),
        pytest.param(V1, ("9000", "5000", "inactive_file 1\ntotal_inactive_file 200"), 4200, id="version-1"),
        pytest.param(V2, ("5000", "9000", "inactive_file 1"), 0, id="over-the-limit"),
    ],
)
def test_available_memory_is_the_hosts_and_no_more_than_the_groups(tmp_path, files, values, wanted):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999 kB\nMemFree: 10 kB\nMemAvailable:    8192 kB\n")
    for name, value in zip(files, values, strict=True):
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    assert available_memory(tmp_path) == wanted


def test_this_host_has_memory():
    assert available_memory() > 0
