"""What a healthy step pays for protection in PyTorch, on the CPU: time, and bytes that are copied.

Time: the same loop over the same batches with and without `swansong.torch.protect` and its controller, in
turns of some hundred steps; the difference of the medians counts. Bytes: what the flight recorder holds of
one step, its boundary and the record before it, of a model whose parameters are much larger.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.bars import Bar, Finding
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import swansong.torch
from swansong.engine.recorder import RecorderOptions
from swansong.persist.records import RecordPlaces

TITLE = "What a healthy step pays for protection, PyTorch on the CPU"
_TIME_BAR = 50.0
_BYTES_BAR = 64.0
_TURNS = 8
_PATIENCE_S = 60.0


def findings(steps: int, mebibytes: int, progress: Callable[[str], None]) -> list[Finding]:
    """Measure with so many steps a turn, and with parameters of so many MiB."""
    torch.set_num_threads(1)
    plain, protected = _times(steps, progress)
    extra = statistics.median(protected) - statistics.median(plain)
    copied = _copied(mebibytes, progress)
    return [
        Finding(what="time of a step, added", value=extra, unit="us", bar=Bar(_TIME_BAR)),
        Finding(what="  plain", value=statistics.median(plain), unit="us", samples=tuple(plain)),
        Finding(what="  protected", value=statistics.median(protected), unit="us", samples=tuple(protected)),
        Finding(
            what=f"bytes copied a step, {mebibytes} MiB of parameters",
            value=copied / 1024,
            unit="KiB",
            bar=Bar(_BYTES_BAR),
        ),
    ]


def _times(steps: int, progress: Callable[[str], None]) -> tuple[list[float], list[float]]:
    """Microseconds of each step, without and with protection."""
    plain, protected = _Loop(), _Loop()
    with tempfile.TemporaryDirectory() as folder, protected.protect(Path(folder)) as run:
        run.resume()
        batches = (batch for _, batch in run.batches(epochs=1_000_000))
        endless = (batch for _ in range(1_000_000) for batch in plain.loader)
        protected.step(next(batches))
        _await(lambda: run.protected)
        times: tuple[list[float], list[float]] = [], []
        for turn in range(2 * _TURNS):
            progress(f"steps, turn {turn + 1} of {2 * _TURNS}")
            loop, source = (plain, endless) if turn % 2 == 0 else (protected, batches)
            times[turn % 2].extend(loop.timed(source, steps))
    return times


def _copied(mebibytes: int, progress: Callable[[str], None]) -> int:
    """Bytes that one step records, of a model of that size."""
    progress(f"a step of {mebibytes} MiB")
    width = int((mebibytes * 2**20 / 4) ** 0.5)
    loop = _Loop(nn.Linear(width, width, bias=False), width)
    with tempfile.TemporaryDirectory() as folder, loop.protect(Path(folder)) as run:
        run.resume()
        batches = (batch for _, batch in run.batches(epochs=2))
        for _ in range(3):
            loop.step(next(batches))
            _await(lambda: run.protected)
        places = RecordPlaces.of(RecorderOptions(), Path(folder), "model", loop.incarnation)
        recorded = places.here.read(0)
    if recorded is None or recorded.provisional is None:
        raise RuntimeError("nothing was recorded")
    return recorded.boundaries[0].nbytes + recorded.provisional.nbytes


class _Loop:
    """A model, what trains it, and its data."""

    def __init__(self, model: nn.Module | None = None, width: int = 32) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(256, width), torch.randint(0, 10, (256,)))
        self.loader = DataLoader(data, batch_size=4, shuffle=True)
        self.incarnation = secrets.token_bytes(16)

    def protect(self, directory: Path) -> swansong.torch.Run:
        """With a controller of its own."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return swansong.torch.protect(
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            directory=directory,
            prefix="model",
            ttp=f"127.0.0.1:{port}",
            incarnation=self.incarnation,
        )

    def step(self, batch: Any) -> None:
        """Forward, backward, update."""
        inputs, labels = batch
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    def timed(self, batches: Iterator[Any], steps: int) -> list[float]:
        """Microseconds of so many steps, what comes between them included."""
        times = []
        before = time.perf_counter()
        for _ in range(steps):
            self.step(next(batches))
            now = time.perf_counter()
            times.append((now - before) * 1e6)
            before = now
        return times


def _await(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + _PATIENCE_S
    while not what():
        if time.monotonic() > ends:
            raise TimeoutError("the controller did not come")
        time.sleep(0.01)
