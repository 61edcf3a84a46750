"""The jobs of kill_demo.py: how each framework's are started, and how they are seen from outside."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from swansong.engine.address import resolve
from swansong.engine.token import FILE_NAME, read_token
from swansong.engine.transport import connect
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.operator import Status, StatusRequest

OUT = Path("demo_out") / "kill"
HERE = Path(__file__).parent
EPOCHS, DIGITS, BATCH = 4, 1437, 16


@dataclass(frozen=True)
class Framework:
    """How a job is started that trains with it."""

    command: tuple[str, ...]
    """With Python before it, the number of ranks in it, and the options after it that `Job` gives."""
    short_batches: bool
    """An epoch's last batch may be short, and is not left out."""
    faults: str = "."
    """Where checkpoints of faults are, seen from the others."""
    patience: str = ""
    """What there is to know for whoever waits for the incident."""

    def steps(self, ranks: int) -> int:
        """In all epochs, on so many ranks."""
        full, rest = divmod(-(-DIGITS // ranks), BATCH)
        return EPOCHS * (full + (rest > 0 and self.short_batches))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
FRAMEWORKS = {
    "torch": Framework(
        (*TORCHRUN, "--nproc-per-node={ranks}", "--max-restarts=3", str(HERE / "lenet5_torch.py")),
        short_batches=True,
    ),
    "mindspore": Framework(
        (str(HERE / "lenet5_ranks.py"), "--launch={ranks}"),
        short_batches=False,
        faults="faults",
        patience="MindSpore's collectives, in which the others are, take about 30 s to notice a death",
    ),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Else a restarted job finds the keys of the start before in torchrun's store (PyTorch issue 135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOG_v": "3",  # MindSpore: errors only
}


class Job:
    """A job under its launcher, seen from outside."""

    def __init__(self, framework: str, name: str, ranks: int, *options: str) -> None:
        self.name, self.port, self.framework = name, free_port(), FRAMEWORKS[framework]
        self.ranks = range(ranks)
        self.faults = OUT / name / self.framework.faults
        """Directory of the checkpoints of faults."""
        job = [word.replace("{ranks}", str(ranks)) for word in self.framework.command]
        job += [f"--ttp=127.0.0.1:{self.port}"]
        job += [f"--data={OUT / 'MNIST_Data'}", f"--checkpoints={OUT / name}", f"--epochs={EPOCHS}"]
        job += [f"--step-log={OUT / f'{name}-steps'}", *options]
        (OUT / f"{name}-steps").mkdir()
        self.output = OUT / f"{name}.txt"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *job], env=os.environ | ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT
            )

    def log(self, rank: int) -> list[list[str]]:
        """What a rank has written, without a line that is not whole."""
        path = OUT / f"{self.name}-steps" / f"rank-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [line.split() for line in lines]

    def step(self, rank: int) -> int:
        """The last that it has made."""
        return next((int(entry[1]) for entry in reversed(self.log(rank))), 0)

    def pid(self, rank: int) -> int:
        """Its process."""
        return int([entry[2] for entry in self.log(rank) if entry[0] == "start"][-1])

    def controllers(self) -> list[int]:
        """The controllers' processes so far."""
        lines = (self.faults / ".swansong" / "controller.log").read_text().splitlines()
        return [int(line.split()[1].rstrip(":")) for line in lines if ": listens on" in line]

    def ended(self) -> bool:
        """True once launcher and ranks are gone."""
        return self.process.poll() is not None

    def incidents(self) -> list[dict[str, Any]]:
        """The reports, in their order."""
        paths = sorted((self.faults / ".swansong" / "incidents").glob("*.json"), key=os.path.getmtime)
        return [json.loads(path.read_text()) for path in paths]

    def starts(self) -> list[tuple[int, int]]:
        """Of each start: the step it began after, and the last that any rank made in it."""
        found: list[tuple[int, int]] = []
        for rank in self.ranks:
            number = -1
            for kind, step, *_ in self.log(rank):
                number += kind == "start"
                if number == len(found):
                    found.append((int(step), int(step)))
                found[number] = found[number][0], max(found[number][1], int(step))
        return found

    def steps_lost(self) -> int:
        """Steps that a rank had made, and that were to be made again."""
        return sum(max(0, before[1] - after[0]) for before, after in pairwise(self.starts()))

    def close(self) -> None:
        """End it, if it has not ended."""
        if not self.ended():
            self.process.terminate()
            self.process.wait(60)


@contextmanager
def controller_of(job: Job) -> Iterator[Iterator[Status]]:
    """Ask a job's controller how it stands, again and again."""
    token = read_token(job.faults / FILE_NAME)
    me = Identity(role=Role.OPERATOR)

    def statuses() -> Iterator[Status]:
        while True:
            connection.send(StatusRequest())
            answer = connection.receive(10.0)
            if not isinstance(answer, Status):
                return
            yield answer
            time.sleep(0.001)

    with connect(resolve("127.0.0.1", job.port), token, me, timeout_s=10.0) as connection:
        yield statuses()


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(framework: str, name: str, ranks: int, *options: str) -> Iterator[Job]:
    """A job of which nothing is left."""
    job = Job(framework, name, ranks, *options)
    try:
        yield job
    finally:
        job.close()
