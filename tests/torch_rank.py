"""One rank of a protected PyTorch job; started by tests/torch_job.py. Tells a file of its own what it does.

Entries, JSON lists, one a line:

    ["start", step, pid, number of the start, inexact]
    ["step", step]            the optimizer has made the update of this step
    ["at", step, digest]      the loop stands at this boundary, with these bits of everything
    ["end", step, digest]     training is over
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import swansong.torch
from swansong.policy.save import EverySteps, Never

PATIENCE_S = 100.0


class Faults:
    """What this rank does to itself, and where."""

    def __init__(self, plan: dict[str, Any], rank: int, start: int) -> None:
        mine = [fault for fault in plan["faults"] if rank in fault["ranks"] and start == fault["start"]]
        self._mine, self._out, self._rank = mine, Path(plan["out"]), rank
        self._slow_s = plan["slow_s"]
        self.run: Any = None
        """The run, once there is one."""

    def __call__(self, where: str) -> None:
        """The loop has come to a place."""
        if self._slow_s:
            time.sleep(self._slow_s)
        for fault in self._mine:
            if self.run is not None and (fault["at"], fault["step"]) == (where, self.run.step + 1):
                self._mine.remove(fault)
                if "awaits" in fault:
                    patient(lambda fault=fault: self._has_come(fault["awaits"], fault["step"]))
                self._fail(fault["kind"])
                return

    def _has_come(self, rank: int, step: int) -> bool:
        """Whether another rank has that step, and its boundary, behind it."""
        said = (self._out / f"rank-{rank}").read_text().splitlines()
        return any(line.startswith(f'["at", {step},') for line in said)

    def _fail(self, kind: str) -> None:
        if kind == "throw":
            throw()
        if kind in ("mark", "wait"):
            (self._out / f"waits-{self._rank}").touch()
            patient(lambda: kind == "mark" or (self._out / "go").exists())
        elif kind == "persist":
            self.run.persist_and_stop()
        else:
            os.kill(os.getpid(), signal.Signals[kind])


def throw(*_: Any) -> None:
    raise ValueError("this batch is no good")


def patient(what: Any) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > ends:
            raise SystemExit("it did not come to be")
        time.sleep(0.005)


class Net(nn.Module):
    """Something of everything that moves: statistics, dropout, parameters in two groups."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.second = nn.Linear(16, 4)
        self._faults = faults

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.training:
            self._faults("forward")
            if hidden.requires_grad:
                hidden.register_hook(self._backward)
        return self.second(self.drop(hidden))

    def _backward(self, gradient: torch.Tensor) -> None:
        self._faults("backward")


class Momentum(torch.optim.SGD):
    """SGD that has updated the first group of parameters, and not yet the second, at a place of its own."""

    def __init__(self, *args: Any, faults: Faults, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._faults = faults

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        if group is self.param_groups[1]:
            self._faults("update")
        return super()._init_group(group, *lists)


class Samples(Dataset):
    def __init__(self, count: int, faults: Faults) -> None:
        self._faults = faults
        self._x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
        self._y = (self._x.sum(1) > 0).long() + 2 * (self._x[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._faults("data")
        return self._x[index], self._y[index]


class Training:
    """One rank's loop."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self.rank = plan, dist.get_rank()
        self.start = plan["start"] + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.faults = faults = Faults(plan, self.rank, self.start)
        torch.manual_seed(7 + self.rank)  # each rank has dropout of its own
        self.model = Net(faults)
        # Else buckets are made anew after the first backward pass, and gradients of the first step after a
        # resume would be summed in another order than undisturbed.
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.ddp.register_comm_hook(faults, reduced)
        compiled = plan["compiled"]
        self.whole = self.ddp if compiled is None else torch.compile(self.ddp, backend=compiled)
        groups = [{"params": layer.parameters()} for layer in (self.model.first, self.model.second)]
        groups[0]["params"] = [*self.model.first.parameters(), *self.model.norm.parameters()]
        self.optimizer = Momentum(groups, lr=0.05, momentum=0.9, foreach=False, faults=faults)
        self.scheduler = StepLR(self.optimizer, step_size=3, gamma=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        data = Samples(plan["samples"], faults)
        sampler = DistributedSampler(data, seed=3)
        self.loader = DataLoader(data, batch_size=4, sampler=sampler)
        self._log = (Path(plan["out"]) / f"rank-{self.rank}").open("a", buffering=1)

    def protected(self) -> swansong.torch.Run:
        plan = self.plan
        return swansong.torch.protect(
            model=self.whole,
            optimizer=self.optimizer,
            loader=self.loader,
            scheduler=self.scheduler,
            scaler=self.scaler,
            also={"average": self.average},
            directory=plan["directory"],
            prefix="model",
            save=EverySteps(plan["save_steps"]) if plan["save_steps"] else Never(),
            ttp=plan["ttp"],
            options=swansong.torch.TTPOptions(**plan["options"]),
        )

    def run(self) -> None:
        with self.protected() as run:
            run.resume()
            self.say("start", run.step, os.getpid(), self.start, run.inexact)
            self.faults.run = run
            for _ in run.epochs(self.plan["epochs"]):
                for x, y in run.batches():
                    self.step(run, x, y)
                self.faults("after an epoch")
                with run.phase("evaluate"):
                    self.model.eval()
                    self.faults("evaluation")
                    self.model(torch.zeros(1, 8))
                    self.model.train()
        self.say("end", run.step, self.digest())

    def step(self, run: swansong.torch.Run, x: torch.Tensor, y: torch.Tensor) -> None:
        self.say("at", run.step, self.digest())
        if self.plan["ttp"]:
            patient(lambda: run.protected)
        self.faults("begin")
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.whole(x), y)
        self.scaler.scale(loss).backward()
        self.faults("before update")
        self.scaler.step(self.optimizer)
        self.say("step", run.step + 1)
        self.faults("after update")
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)

    def say(self, *entry: Any) -> None:
        self._log.write(json.dumps(entry) + "\n")

    def digest(self) -> str:
        """Of the bits of everything that this rank has and that counts.

        Not so batch-norm statistics on other ranks than 0, their own values, which are overwritten with those
        of rank 0 before they are used; nor the copies of them that the average makes after every step.
        """
        hashed = xxhash.xxh3_64()
        tensors = [*self.model.parameters(), *self.average.module.parameters(), self.average.n_averaged]
        for tensor in (*tensors, *(self.model.buffers() if self.rank == 0 else ())):
            hashed.update(tensor.detach().numpy().tobytes())
        for parameter in self.model.parameters():
            momentum = self.optimizer.state[parameter].get("momentum_buffer")
            hashed.update(b"" if momentum is None else momentum.numpy().tobytes())
        said = [self.scheduler.state_dict(), self.scaler.state_dict(), self.optimizer.param_groups[0]["lr"]]
        hashed.update(repr(said).encode())
        hashed.update(torch.get_rng_state().numpy().tobytes())
        return hashed.hexdigest()


def reduced(faults, bucket):  # PyTorch does not take annotations that are strings
    """Average the gradients of a bucket: what DistributedDataParallel does, with a place of its own."""
    faults("collective")
    mine = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(mine, async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, throw)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=plan["init_method"], rank=rank, world_size=size)
    Training(plan).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
