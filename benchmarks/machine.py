"""What the figures were measured on, and with."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from swansong.store.clock import SystemClock

_PACKAGES = (
    "swansong",
    "numpy",
    "cryptography",
    "xxhash",
    "torch",
    "safetensors",
    "mindspore",
)


def described(directory: Path) -> dict[str, Any]:
    """Machine, versions and the moment; `directory` is where the files are written."""
    return {
        "date": datetime.fromtimestamp(SystemClock().wall(), UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_at_start": os.getloadavg()[0],
        "machine": {
            "processor": _processor(),
            "cpus": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "file_system": _file_system(directory),
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """Type of the file system that holds a directory: the longest mount point above it."""
    place = directory.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(point), kind) for point, kind in mounts if place.is_relative_to(point)]
    return max(above)[1] if above else "unknown"
