"""What is to be known before a CUDA device is followed: which, how much memory, and what could end survivors.

What is said of NCCL is from PyTorch's documentation, "PYTORCH ProcessGroupNCCL Environment Variables"
(https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html), and from the declarations in
`torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp` and `Utils.hpp` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import distributed as dist

from swansong.errors import ConfigError, NotSupportedError

EXPERIMENTAL: Final = (
    "fault saving of state on a CUDA device is experimental: it was written and reviewed, and its logic is "
    "tested, but it has never run on a device. Do not rely on it alone; keep periodic checkpoints"
)
"""To be said once, at start."""

_HANDLING: Final = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""The former name is read where the present one is not set."""
_DEFAULT: Final = 3
_OFF: Final = 0
_DOES: Final = {
    1: "aborts the communicators and ends the process",
    2: "aborts the communicators, and updates that were queued behind them run on garbage",
    3: "ends the process",
}
"""What each mode does when a collective fails or takes too long, as it does when a peer has died."""
_TRUE: Final = ("y", "yes", "1", "t", "true")
"""How such a variable says yes, in any case."""


def sole_device(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.device | None:
    """The CUDA device that all `tensors`, by name, are on; None if all are on the CPU.

    A clock tells the order of the writes on one device only. Raises ConfigError if they are spread,
    NotSupportedError for a device of another kind.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors:
        device = tensor.device
        if device.type not in ("cpu", "cuda"):
            raise NotSupportedError(f"{name}: it is on {device}; updates are followed on the CPU and on CUDA")
        if first is None:
            first = name, device
        elif device != first[1]:
            raise ConfigError(
                f"{name}: it is on {device}, but {first[0]} on {first[1]}; wanted all parameters on one "
                "device, since one clock follows one device. Move the model to it, or protect a process per "
                "device"
            )
    return first[1] if first is not None and first[1].type == "cuda" else None


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may take without anything being swapped out or killed.

    MemAvailable of /proc/meminfo (proc_meminfo(5)), and no more than the control group has left, files cached
    for it not counted (cgroups(7), both versions). `root` is where proc and sys are.
    """
    text = (root / "proc/meminfo").read_text()
    available = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:"))
    rooms = [available * 1024]
    groups = root / "sys/fs/cgroup"
    for folder, limit, used, cached in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        if most != "max":
            files = sum(int(line.split()[1]) for line in lines if line.split()[0] == cached)
            rooms.append(int(most) - taken + files)
    return max(0, min(rooms))


def uses_nccl() -> bool:
    """True if the default process group of torch.distributed is there and has NCCL."""
    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config()


def nccl_warning(environment: Mapping[str, str]) -> str | None:
    """What is to be said at start of how NCCL's failures are handled; None if survivors survive.

    `environment` as it was when the process group was made. Off is what leaves the survivors' memory alone:
    a collective without its peer then never ends, and the state stays where it is. With
    TORCH_NCCL_BLOCKING_WAIT there is no watchdog, and updates are not dispatched before the collective is
    over.
    """
    if _says_yes(environment.get("TORCH_NCCL_BLOCKING_WAIT", environment.get("NCCL_BLOCKING_WAIT", ""))):
        return None
    name = next((name for name in _HANDLING if name in environment), _HANDLING[0])
    mode = _whole(environment.get(name, str(_DEFAULT)))
    how = (
        f"{name}={environment[name]}" if name in environment else f"{name} is not set, which means {_DEFAULT}"
    )
    if mode == _OFF:
        debugging = _debugging(environment)
        if debugging is None:
            return None
        mode, how = _DEFAULT, f"{debugging} turns {_HANDLING[0]} on again"
    return (
        "unprotected: when a rank dies, NCCL's watchdog on each of the others "
        f"{_DOES.get(mode, _DOES[_DEFAULT])} ({how}). Set {_HANDLING[0]}=0 before "
        "torch.distributed.init_process_group()"
    )


def connections_warning(environment: Mapping[str, str]) -> str | None:
    """What is to be said at start if the device has one queue for all streams; None if it has more.

    A copy on a stream of its own would then wait behind a collective that hangs on another. See
    CUDA_DEVICE_MAX_CONNECTIONS in "CUDA Environment Variables" of the CUDA C++ Programming Guide.
    """
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    return (
        "unprotected: with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a device may share one queue, and "
        "state could not be read while a collective hangs; unset it, or set it to 8 or more"
    )


def _debugging(environment: Mapping[str, str]) -> str | None:
    """What makes PyTorch handle errors though it was told not to."""
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    name = "TORCH_NCCL_DESYNC_DEBUG"
    return name if _says_yes(environment.get(name, environment.get("NCCL_DESYNC_DEBUG", ""))) else None


def _says_yes(value: str) -> bool:
    return value.lower() in _TRUE


def _whole(text: str) -> int:
    """The number that PyTorch reads; the default for what it refuses itself."""
    try:
        return int(text)
    except ValueError:
        return _DEFAULT
