"""LeNet5 learns handwritten digits in PyTorch, on several processes, protected by swansong.

    python examples/digits.py
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/lenet5_torch.py

What protects it is marked with (1), (2) and (3). Killed, it is started again by torchrun and goes on where it
was; started again by hand, too. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: without it, a job that
is restarted finds the keys of the start before in torchrun's store and hangs or fails (PyTorch issue 135712).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import swansong.torch
from swansong.torch import CheckpointConfig, TTPOptions

BATCH, SEED = 16, 1


class LeNet5(nn.Module):
    """LeNet5 with what makes resuming hard: batch normalisation and dropout."""

    def __init__(self, ballast_mib: int = 0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.3), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )
        self.ballast = nn.Parameter(torch.zeros(ballast_mib << 18), requires_grad=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, 1, 28, 28] to logits [n, 10]."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def read_digits(directory: Path) -> TensorDataset:
    """The training part of what digits.py has written: IDX files."""
    images = np.fromfile(directory / "train" / "train-images-idx3-ubyte", np.uint8, offset=16)
    labels = np.fromfile(directory / "train" / "train-labels-idx1-ubyte", np.uint8, offset=8)
    pixels = torch.from_numpy(images.reshape(-1, 1, 28, 28).astype(np.float32) / 255)
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))


def train(arguments: argparse.Namespace) -> None:
    """One rank."""
    rank = distributed.get_rank()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED + rank)  # each rank has dropout of its own
    # DistributedDataParallel makes its buckets of gradients anew after its first backward pass, so that in
    # the first step after a resume four ranks would add them in another order than the undisturbed run did
    # in that step, and last bits could differ. With find_unused_parameters it does not make them anew.
    model = DistributedDataParallel(LeNet5(arguments.ballast_mib), find_unused_parameters=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=200)
    digits = read_digits(arguments.data)
    loader = DataLoader(digits, batch_size=BATCH, sampler=DistributedSampler(digits, seed=SEED))
    log = StepLog(arguments.step_log, rank)
    with swansong.torch.protect(  # (1)
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler,
        directory=arguments.checkpoints, prefix="lenet5", config=CheckpointConfig(save_checkpoint_steps=1000),
        ttp=arguments.ttp, options=TTPOptions(stall_timeout_s=arguments.stall_timeout_s),
    ) as run:  # fmt: skip
        run.resume()  # (2)
        log.write(f"start {run.step} {os.getpid()}")
        while log.wanted and not run.protected:  # training takes two seconds here, and the demo kills soon
            time.sleep(0.01)
        for _, (images, labels) in run.batches(epochs=arguments.epochs):  # (3)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            log.write(f"step {run.step + 1}")
            scheduler.step()


class StepLog:
    """What this rank has done, written by itself and at once: kill_demo.py counts by it."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._file = None if directory is None else (directory / f"rank-{rank}").open("a", buffering=1)

    @property
    def wanted(self) -> bool:
        """True if somebody reads it."""
        return self._file is not None

    def write(self, line: str) -> None:
        """One line."""
        if self._file is not None:
            self._file.write(f"{line}\n")


def no_good(*_: Any) -> None:
    """What kill_demo.py --signal raise brings about, with SIGUSR1."""
    raise RuntimeError("this batch is no good")


def main() -> None:
    """Run one rank; torchrun runs several."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--data", type=Path, default=Path("MNIST_Data"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoint"))
    parser.add_argument("--ttp", default="127.0.0.1:2000")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stall-timeout-s", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--ballast-mib", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGUSR1, no_good)
    distributed.init_process_group("gloo")
    train(arguments)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
