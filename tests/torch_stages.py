"""Two ranks that hold different stages: `torch_stages.py DIRECTORY`, with jobs, JSON, one a line, on stdin.

Each job is {"run": name of its directory, "port", "fails": [rank, step] or null}; the answer is, for each
rank, [exit code, what it said]. Ranks are forked, so that no job waits for imports.
"""

from __future__ import annotations

import json
import os
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

STEPS = 8


def train(directory: Path, rank: int, job: dict[str, Any]) -> list[Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2 + rank), nn.Dropout(0.2), nn.BatchNorm1d(2 + rank))
    optimizer = torch.optim.Adam(model.parameters())
    with swansong.torch.protect(
        model=model,
        optimizer=optimizer,
        directory=directory,
        prefix="m",
        ttp=f"127.0.0.1:{job['port']}",
        replicas=f"stage {rank}",
        options=TTPOptions(**QUICK),
    ) as run:
        begun = run.resume()
        while not run.protected:
            time.sleep(0.005)
        while run.step < STEPS:
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().sum().backward()
            if job["fails"] == [rank, run.step + 1]:
                raise ValueError("no good")
            optimizer.step()
            run.step_end()
    values = [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())]
    return [begun, values, torch.rand(1).item()]


def become(directory: Path, store: Path, rank: int, job: dict[str, Any], said: Path) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", SwansongWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
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
        pids, files = [], [directory / f"{number} {rank}.json" for rank in range(2)]
        for rank, said in enumerate(files):
            pid = os.fork()
            if pid == 0:
                os._exit(
                    become(
                        directory / json.loads(line)["run"],
                        directory / f"store {number}",
                        rank,
                        json.loads(line),
                        said,
                    )
                )
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        ends = [json.loads(said.read_text()) if said.exists() else None for said in files]
        print(json.dumps(list(zip(codes, ends, strict=True))), flush=True)


if __name__ == "__main__":
    main()
