"""Four processes train plain NumPy arrays; one is killed, and the newest step is on disk a moment later.

    python examples/kill_arrays.py

Each process has a quarter of the data and a whole copy of the model; they average their gradients at every
step. No checkpoint is saved before the end, so what the kill leaves is what the survivors saved. Started
again, they go on at the next step, and end with the very bits of a run that was never disturbed.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import secrets
import shutil
import signal
import socket
import time
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import numpy as np

import swansong.arrays
from swansong import CheckpointConfig
from swansong.errors import TrainingInterrupted
from swansong.store.latest import choose
from swansong.store.opening import open_checkpoint

OUT = Path("kill_arrays_out")
RANKS, FEATURES, STEPS = 4, 4096, 60
VICTIM, KILLED_AT = 1, 25
SPAWN = mp.get_context("spawn")


class AllReduce:
    """Averages a vector over processes; BrokenBarrierError if one does not come."""

    def __init__(self) -> None:
        self._memory: Any = RawArray("d", RANKS * FEATURES)
        self._barrier = SPAWN.Barrier(RANKS)

    def mean(self, rank: int, vector: np.ndarray) -> np.ndarray:
        table = np.frombuffer(self._memory).reshape(RANKS, FEATURES)
        table[rank] = vector
        self._barrier.wait(timeout=2.0)
        mean: np.ndarray = table.mean(axis=0)
        self._barrier.wait(timeout=2.0)
        return mean


def train(
    rank: int, name: str, port: int, incarnation: bytes, reduce: AllReduce, killed_at: Any, victim: int
) -> None:
    """One process. `victim` is the rank that kills itself, -1 for none; `killed_at` takes the time."""
    weights, momentum = np.zeros(FEATURES), np.zeros(FEATURES)
    target = np.random.default_rng(0).standard_normal(FEATURES)
    try:
        with swansong.arrays.protect(
            {"weights": weights, "momentum": momentum},
            rank=rank,
            world_size=RANKS,
            directory=OUT / name,
            prefix="model",
            config=CheckpointConfig(save_checkpoint_steps=10 * STEPS),
            ttp=f"127.0.0.1:{port}",
            replicas="all",
            incarnation=incarnation,
        ) as run:
            if run.resume() and rank == 0:
                print(f"  resumed after step {run.step}: {run.objects}")
            while not run.protected:
                time.sleep(0.01)
            while run.step < STEPS:
                if rank == victim and run.step == KILLED_AT:
                    killed_at.value = time.monotonic()
                    os.kill(os.getpid(), signal.SIGKILL)
                batch = np.random.default_rng([run.step, rank]).standard_normal(FEATURES)
                gradient = reduce.mean(rank, weights - target + batch)
                with run.update():
                    momentum *= 0.9
                    momentum += gradient
                    weights -= 0.01 * momentum
                run.step_end(loss=float(np.abs(gradient).mean()))
    except (TrainingInterrupted, BrokenBarrierError) as end:
        print(f"  rank {rank}: {type(end).__name__} {end}", *getattr(end, "__notes__", ()))


class Job(NamedTuple):
    """Processes, and what they share: it must be there when they begin."""

    ranks: list[Any]
    reduce: AllReduce
    killed_at: Any
    """When the victim was killed, in seconds of the monotonic clock."""

    def join(self) -> None:
        for rank in self.ranks:
            rank.join()


def start(name: str, *, victim: int = -1) -> Job:
    """Start a job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reduce, killed_at = AllReduce(), SPAWN.Value("d", 0.0)
    common = name, port, secrets.token_bytes(16), reduce, killed_at, victim
    ranks = [SPAWN.Process(target=train, args=(rank, *common)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    return Job(ranks, reduce, killed_at)


def weights_of(name: str) -> tuple[int, np.ndarray]:
    """The newest checkpoint of a run: its step, and the weights, verified."""
    newest = choose([OUT / name], "model").newest
    if newest is None or newest.manifest is None:
        raise SystemExit(f"{name}: no checkpoint")
    with open_checkpoint(newest.path) as checkpoint:
        return newest.manifest.step, checkpoint.read("weights").array


def main() -> None:
    """Run it; the exit code is not 0 if something else happens than what is said above."""
    shutil.rmtree(OUT, ignore_errors=True)
    print(f"A run of {STEPS} steps that nobody disturbs.")
    start("undisturbed").join()

    print(f"The same, but rank {VICTIM} is killed after step {KILLED_AT}.")
    job = start("disturbed", victim=VICTIM)
    saved = OUT / "disturbed" / f"model-{KILLED_AT}"
    while not saved.exists() and any(rank.is_alive() for rank in job.ranks):
        time.sleep(0.001)
    print(f"  {saved} was there {1000 * (time.monotonic() - job.killed_at.value):.0f} ms after the kill")
    job.join()
    (path,) = (OUT / "disturbed" / ".swansong" / "incidents").iterdir()
    report = json.loads(path.read_text())
    shown = ("kind", "outcome", "step", "path", "savers", "seconds")
    print("  incident:", json.dumps({name: report[name] for name in shown}))

    print("Started again.")
    start("disturbed").join()
    (_, expected), (step, found) = weights_of("undisturbed"), weights_of("disturbed")
    if step != STEPS or not np.array_equal(expected, found):
        raise SystemExit("the weights differ from those of the undisturbed run")
    print(f"  after step {step} the weights are those of the undisturbed run, bit for bit")


if __name__ == "__main__":
    main()
