"""A process of `memory`: holds a state, saves it once in one way, and says how much memory that took.

python -m benchmarks.memory_probe WAY DIRECTORY MIB

Prints the peak of the resident memory during the save, less what was resident before, in KiB. A small save
comes first, so that code that is loaded at the first use is not counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import mindspore_savers, ours, peers
from benchmarks.blocking import saving_loop
from benchmarks.states import State, state

ASYNCHRONOUS = "swansong, asynchronous"
_WARM_UP = 1 << 16


def main() -> None:
    """Measure."""
    way, directory, mebibytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    prepared(way, state(_WARM_UP), directory / "small")()
    save = prepared(way, state(mebibytes << 20), directory / "large")
    gc.collect()
    # Resets the peak to what is resident now: proc_pid_clear_refs(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    save()
    print(resident("VmHWM") - before)


def prepared(way: str, arrays: State, directory: Path) -> Callable[[], object]:
    """What saves once, and waits until that is done."""
    directory.mkdir()
    if way == ASYNCHRONOUS:
        return lambda: _saved_asynchronously(arrays, directory)
    if way in mindspore_savers.PLAIN:
        return mindspore_savers.plain(arrays, way).prepare(directory)
    if way in (ours.NATIVE, ours.SEALED):
        entries = ours.natives(arrays)
    else:  # these import frameworks
        entries = [*peers.savers(arrays), peers.distributed_async(arrays)]
    return next(one for one in entries if one.name == way).prepare(directory)


def _saved_asynchronously(arrays: State, directory: Path) -> None:
    with saving_loop(arrays, directory, "thread") as loop:
        loop.blocked()


def resident(field: str) -> int:
    """KiB of this process, from proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status: no {field}")


if __name__ == "__main__":
    main()
