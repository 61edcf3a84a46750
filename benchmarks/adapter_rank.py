"""A rank of `adapter_fault`: holds arrays of so many MiB, makes two steps, and waits.

python -m benchmarks.adapter_rank DIRECTORY PORT RANK WORLD_SIZE MIB
"""

from __future__ import annotations

import sys
import time

import numpy as np

import swansong.arrays


def main() -> None:
    """Say "ready" once the state is worth saving; then wait for the gate, as a loop would."""
    directory, port, rank, world_size, mebibytes = sys.argv[1], *map(int, sys.argv[2:6])
    random = np.random.default_rng(0)
    state = {f"layer{n:02d}": random.random((mebibytes * 4, 1024), np.float32) for n in range(64)}
    with swansong.arrays.protect(
        state,
        directory=directory,
        prefix="model",
        rank=rank,
        world_size=world_size,
        ttp=f"127.0.0.1:{port}",
        replicas="all",
    ) as run:
        while run.step < 2 or not run.protected:
            with run.update():
                state["layer00"][0, 0] = run.step
            run.step_end()
            time.sleep(0.02)
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
