"""What a healthy step pays for protection in PyTorch, on the CPU: time, and bytes that are copied.

Time: the same loop over the same batches with and without `swansong.torch.protect` and its controller, in
turns of some hundred steps; the difference of the medians counts. A third loop does by itself, with what
Python, NumPy and PyTorch offer, the least of it: at the end of each forward pass and of each update it puts
the three generators' states into shared memory. Bytes: what the flight recorder holds of one step, its
boundary and the record before it, of a model whose parameters are much larger.
"""

from __future__ import annotations

import mmap
import random
import secrets
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
    plain, protected, minimal = _times(steps, progress)
    extra = statistics.median(protected) - statistics.median(plain)
    least = statistics.median(minimal) - statistics.median(plain)
    copied = _copied(mebibytes, progress)
    return [
        Finding(what="time of a step, added", value=extra, unit="us", bar=Bar(_TIME_BAR)),
        Finding(what="  plain", value=statistics.median(plain), unit="us", samples=tuple(plain)),
        Finding(what="  protected", value=statistics.median(protected), unit="us", samples=tuple(protected)),
        Finding(what="  added by the minimal program", value=least, unit="us", samples=tuple(minimal)),
        Finding(
            what=f"bytes copied a step, {mebibytes} MiB of parameters",
            value=copied / 1024,
            unit="KiB",
            bar=Bar(_BYTES_BAR),
        ),
    ]


def _times(steps: int, progress: Callable[[str], None]) -> tuple[list[float], ...]:
    """Microseconds of each step, without and with protection, and of the minimal program."""
    plain, protected, minimal = _Loop(), _Loop(), _Loop()
    minimal.record()
    with tempfile.TemporaryDirectory() as folder, protected.protect(Path(folder)) as run:
        run.resume()
        batches = (batch for _, batch in run.batches(epochs=1_000_000))
        sources = (plain.endless(), batches, minimal.endless())
        protected.step(next(batches))
        _await(lambda: run.protected)
        times: tuple[list[float], ...] = [], [], []
        for turn in range(_TURNS):
            progress(f"steps, turn {turn + 1} of {_TURNS}")
            for loop, source, taken in zip((plain, protected, minimal), sources, times, strict=True):
                taken.extend(loop.timed(source, steps))
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

    def record(self) -> None:
        """Have the generators' states recorded from now on, by the least of programs."""
        memory = mmap.mmap(-1, 1 << 20)

        def put(*_: object) -> None:
            python, numpy = random.getstate()[1], np.random.get_state(legacy=False)["state"]["key"]
            packed = struct.pack("625I", *python) + numpy.tobytes() + torch.get_rng_state().numpy().tobytes()
            memory[: len(packed)] = packed

        self.model.register_forward_hook(put)
        self.optimizer.register_step_post_hook(put)

    def endless(self) -> Iterator[Any]:
        """Batches, epoch after epoch."""
        while True:
            yield from self.loader

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
