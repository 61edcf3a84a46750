"""How people save today, each followed by the fsyncs that it lacks: PyTorch's ways and safetensors."""

from __future__ import annotations

import importlib
import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.states import State
from benchmarks.turns import Candidate, make_durable

TORCH = "torch.save + fsync"
SAFETENSORS = "safetensors + fsync"
DISTRIBUTED = "torch.distributed.checkpoint, {} writer thread{}"
DISTRIBUTED_ASYNC = "torch.distributed.checkpoint.async_save"


def savers(arrays: State) -> list[Candidate]:
    """All of them, durable when they return; torch.distributed.checkpoint comes last."""
    import safetensors.numpy
    import torch

    shared = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def torch_save(directory: Path) -> None:
        torch.save(shared, directory / "bench.pt")
        make_durable(directory / "bench.pt", directory)

    def safetensors_save(directory: Path) -> None:
        safetensors.numpy.save_file(arrays, directory / "bench.safetensors")
        make_durable(directory / "bench.safetensors", directory)

    return [
        Candidate(TORCH, lambda directory: partial(torch_save, directory)),
        Candidate(SAFETENSORS, lambda directory: partial(safetensors_save, directory)),
        *(distributed(arrays, threads) for threads in (1, 2)),
    ]


def distributed(arrays: State, threads: int) -> Candidate:
    """torch.distributed.checkpoint of one process, which syncs its files by itself."""
    import torch

    checkpoint = _distributed_checkpoint()
    shared = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def run(directory: Path) -> None:
        writer = checkpoint.FileSystemWriter(directory, thread_count=threads, sync_files=True)
        checkpoint.save(shared, storage_writer=writer, no_dist=True)
        make_durable(directory)

    name = DISTRIBUTED.format(threads, "s" * (threads > 1))
    return Candidate(name, lambda directory: partial(run, directory))


def distributed_async(arrays: State) -> Candidate:
    """The time for which its asynchronous save blocks; its end is awaited outside that."""
    import torch

    checkpoint = _distributed_checkpoint()
    shared = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def prepare(directory: Path) -> Callable[[], float]:
        def run() -> float:
            writer = checkpoint.FileSystemWriter(directory, thread_count=2, sync_files=True)
            began = time.perf_counter()
            saving = checkpoint.async_save(shared, storage_writer=writer, no_dist=True)
            blocked = time.perf_counter() - began
            saving.result()
            return blocked

        return run

    return Candidate(DISTRIBUTED_ASYNC, prepare)


def _distributed_checkpoint() -> Any:
    """The module, which warns at each call that it is used without process group, as is wanted here."""
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    return importlib.import_module("torch.distributed.checkpoint")
