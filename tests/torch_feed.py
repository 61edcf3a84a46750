"""Training runs that do nothing but draw: undisturbed, and resumed from each of their boundaries."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from swansong.state.tree import flatten, unflatten
from swansong.torch.position import Feed


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> tuple[float, ...]:
    """One of each; normal deviates too, of which generators keep a second one in store."""
    return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(1).item())


def stored(state: object) -> Any:
    """The state as it comes back from a checkpoint."""
    flat = flatten(state, lambda value: None)
    assert not flat.tensors
    return unflatten(json.loads(json.dumps(flat.skeleton)), {})


class Squares(Dataset):
    """Sample i is (i, seed of the loader's workers, what `augment` draws); `loaded` lists them."""

    def __init__(self, length: int, augment: Callable[[], float] = lambda: 0.0) -> None:
        self.length = length
        self.augment = augment
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        self.loaded.append(int(index))
        worker = get_worker_info()
        return int(index), 0 if worker is None else worker.seed - worker.id, self.augment()


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


class Stream(IterableDataset):
    def __init__(self, augment=lambda: 0.0):
        self.augment = augment

    def __iter__(self):
        for value in torch.randperm(5).tolist():
            yield value, self.augment()


def batched(dataset, **options):
    return DataLoader(dataset, collate_fn=lambda samples: samples, **options)


def main_process_draws() -> float:
    return torch.rand(1).item() + random.random() + np.random.randn()


@dataclass
class Boundary:
    position: dict[str, Any]
    generators: dict[str, Any]
    seen: int
    """How much of the trace came before."""


@dataclass
class Run:
    feed: Feed
    trace: list[Any] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)

    def train(self, epochs: int) -> Run:
        for epoch in self.feed.epochs(epochs):
            self.trace.append(("begin", epoch, draws()))
            for batch in self.feed.batches():
                self.trace.append((batch, draws()))
                self.boundary()
            self.trace.append(("end", epoch, draws()))
            self.boundary()
        return self

    def boundary(self) -> None:
        generators = self.feed.generators.capture()
        self.boundaries.append(Boundary(stored(self.feed.state()), stored(generators), len(self.trace)))


def undisturbed(loader: Any, epochs: int, **options: Any) -> Run:
    seed_all(7)
    return Run(Feed(loader, **options)).train(epochs)


def resumed(loader: Any, at: Boundary, epochs: int, **options: Any) -> Run:
    """A new process would begin with other seeds; the loop's own code draws, then the rest is trained."""
    seed_all(1234)
    feed = Feed(loader, **options)
    feed.load(at.position, restore=lambda: feed.generators.restore(at.generators))
    draws()
    run = Run(feed).train(epochs)
    if at.position["batch"]:
        # The epoch's begin is gone through again, before the boundary is reached.
        del run.trace[0]
    return run


def after(run: Run, at: Boundary) -> list[Boundary]:
    return run.boundaries[run.boundaries.index(at) + 1 :]


def positions(boundaries: list[Boundary]) -> list[dict[str, Any]]:
    return [boundary.position for boundary in boundaries]


def plain(loader: Any, epochs: int, set_epoch: Callable[[int], object] = lambda epoch: None) -> list[Any]:
    """The same loop without swansong."""
    seed_all(7)
    trace: list[Any] = []
    for epoch in range(1, epochs + 1):
        trace.append(("begin", epoch, draws()))
        set_epoch(epoch - 1)
        trace += [(batch, draws()) for batch in loader]
        trace.append(("end", epoch, draws()))
    return trace
