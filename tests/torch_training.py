"""A training script for tests: batch-norm, dropout, a scheduler, averages, shuffled data, several loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swansong.torch
from torch_feed import draws, seed_all

SAMPLES, BATCH, EPOCHS = 11, 3, 3
PER_EPOCH = 4
"""Batches, the last of them short."""
STEPS = EPOCHS * PER_EPOCH

torch.set_num_threads(1)  # threads that wait for each other make tests slow where others run, too

Hook = Callable[[str, int], None]
"""Called at moments of the loop, with the name of the moment and the step that is under way, from 1."""


def no_hook(moment: str, step: int) -> None:
    pass


class Training:
    """Everything that a script makes before its loop, from the seed on."""

    def __init__(self, *, adam: dict[str, Any] | None = None, several: bool = False) -> None:
        seed_all(11)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )
        kinds = {"lr": 0.01, **(adam or {})}
        if several:
            self.optimizers = [
                torch.optim.Adam(self.model[:2].parameters(), **kinds),
                torch.optim.SGD(self.model[4].parameters(), lr=0.05, momentum=0.9),
            ]
        else:
            self.optimizers = [torch.optim.Adam(self.model.parameters(), **kinds)]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.7)
        self.averages = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        data = TensorDataset(torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,)))
        self.loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        self.losses: list[float] = []
        self.drawn: tuple[float, ...] = ()
        """What would be drawn next, when the loop has ended."""

    def protect(self, directory: Any, **given: Any) -> swansong.torch.Run:
        arguments: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizers,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "also": {"averages": self.averages},
            "directory": directory,
            "prefix": "net",
        }
        return swansong.torch.protect(**(arguments | given))

    def learn(self, batch: Any, at: Callable[[str], None]) -> None:
        """One step, but for its end."""
        images, labels = batch
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        at("forward")
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        at("backward")
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.averages.update_parameters(self.model)
        at("updated")

    def end(self) -> None:
        self.drawn = draws()

    def epoch_end(self) -> None:
        self.scheduler.step()
        self.losses.append(sum(draws()))

    def outcome(self) -> dict[str, Any]:
        """All that must be equal bit for bit, in plain values; what is drawn next included."""
        tensors = {
            **self.model.state_dict(),
            **{f"ema {k}": v for k, v in self.averages.state_dict().items()},
        }
        found: dict[str, Any] = {name: bits(tensor) for name, tensor in tensors.items()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, entry in optimizer.state_dict()["state"].items():
                found |= {f"{number}/{parameter}/{key}": bits(value) for key, value in entry.items()}
            found[f"{number} rate"] = optimizer.param_groups[0]["lr"]
        return found | {"scheduler": self.scheduler.state_dict(), "drawn": self.drawn}


def bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value.dtype, value.shape, value.detach().reshape(-1).contiguous().view(torch.uint8).tolist())


def by_epochs(training: Training, run: Any, hook: Hook = no_hook) -> None:
    """Work between epochs."""
    for _ in run.epochs(EPOCHS):
        for batch in run.batches():
            training.learn(batch, moments(run, hook))
        training.epoch_end()
    training.end()


def by_batches(training: Training, run: Any, hook: Hook = no_hook) -> None:
    """The shortest loop."""
    for _, batch in run.batches(epochs=EPOCHS):
        training.learn(batch, moments(run, hook))
        training.scheduler.step()
    training.end()


def by_hand(training: Training, run: Any, hook: Hook = no_hook) -> None:
    """A loop that draws its own batches."""
    images, labels = training.loader.dataset.tensors
    while run.step < STEPS:
        chosen = torch.randperm(SAMPLES)[:BATCH]
        training.learn((images[chosen], labels[chosen]), moments(run, hook))
        run.step_end()
    training.end()


LOOPS = {"epochs": by_epochs, "batches": by_batches, "by hand": by_hand}


def moments(run: Any, hook: Hook) -> Callable[[str], None]:
    return lambda moment: hook(moment, run.step + 1)


class Bare:
    """A run that protects nothing: what the loop would be without."""

    def __init__(self, training: Training) -> None:
        self._loader, self.step = training.loader, 0

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(1, count + 1)

    def batches(self, epochs: int | None = None) -> Iterator[Any]:
        if epochs is not None:
            for epoch in self.epochs(epochs):
                for batch in self.batches():
                    yield epoch, batch
            return
        for batch in self._loader:
            yield batch
            self.step += 1

    def step_end(self) -> None:
        self.step += 1


def without(loop: str, **given: Any) -> Training:
    """Trained to the end, without any protection."""
    training = Training(**given)
    LOOPS[loop](training, Bare(training))
    return training
