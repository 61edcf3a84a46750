"""Ranks that hold two stages in turn: `torch_stages.py DIRECTORY`, with jobs, JSON, one a line, on stdin.

Each job is {"run": name of its directory, "port", "size", "fails": [rank, step, where] or null}: it throws
in its "loop", or is killed in its vote, "before its voice", "after its voice" or "after the outcome". The
answer is, for each rank, [exit code, what it said]. Ranks are forked, so that no job waits for imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers would, in each rank, and it takes long
from torch import distributed as dist
from torch import nn

import swansong.torch
from array_job import QUICK
from swansong import TTPOptions
from swansong.errors import SwansongWarning
from swansong.torch import protecting
from swansong.torch.vote import Vote

STEPS = 8


class Doomed(Vote):
    """Kills its process at one vote."""

    step = 0
    where = ""

    def _cast(self, step: int, yes: bool) -> None:
        self._die("before its voice", step)
        super()._cast(step, yes)
        self._die("after its voice", step)

    def _all_said_yes(self, ballot: Any) -> bool:
        said = super()._all_said_yes(ballot)
        self._die("after the outcome", ballot.step)
        return said

    def _die(self, where: str, step: int) -> None:
        if (where, step) == (self.where, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory: Path, rank: int, job: dict[str, Any]) -> list[Any]:
    stage = rank % 2
    torch.manual_seed(stage)
    model = nn.Sequential(nn.Linear(2, 2 + stage), nn.Dropout(0.2), nn.BatchNorm1d(2 + stage))
    optimizer = torch.optim.Adam(model.parameters())
    with swansong.torch.protect(
        model=model,
        optimizer=optimizer,
        directory=directory,
        prefix="m",
        ttp=f"127.0.0.1:{job['port']}",
        replicas=f"stage {stage}",
        options=TTPOptions(**QUICK),
    ) as run:
        begun = run.resume()
        while not run.protected:
            time.sleep(0.005)
        while run.step < STEPS:
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().sum().backward()
            if job["fails"] == [rank, run.step + 1, "loop"]:
                raise ValueError("no good")
            optimizer.step()
            run.step_end()
    values = [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())]
    return [begun, values, torch.rand(1).item()]


def become(directory: Path, store: Path, rank: int, job: dict[str, Any], said: Path) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", SwansongWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job["size"])
    if job["fails"] and job["fails"][0] == rank:
        _, Doomed.step, Doomed.where = job["fails"]
        protecting.Vote = Doomed  # type: ignore[misc, attr-defined]
    try:
        said.write_text(json.dumps(train(directory, rank, job)))
    except Exception:
        said.write_text(json.dumps(traceback.format_exc()))
        return 1
    dist.destroy_process_group()
    return 0


def main() -> None:
    directory = Path(sys.argv[1])
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        pids, files = [], [directory / f"{number} {rank}.json" for rank in range(job["size"])]
        for rank, said in enumerate(files):
            pid = os.fork()
            if pid == 0:
                os._exit(become(directory / job["run"], directory / f"store {number}", rank, job, said))
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        ends = [json.loads(said.read_text()) if said.exists() else None for said in files]
        print(json.dumps(list(zip(codes, ends, strict=True))), flush=True)


if __name__ == "__main__":
    main()
