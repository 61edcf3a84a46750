"""What is measured: our saves, the raw disk, and the savers that people use today."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer


@dataclass(frozen=True)
class Candidate:
    """A way to save: `save(directory)` returns when everything is durable."""

    name: str
    save: Callable[[Path], None]


def candidates(tensors: dict[str, np.ndarray]) -> list[Candidate]:
    """Everything but the raw limit. Frameworks are imported here, so that the limits run without them."""
    return [*ours(tensors), *peers(tensors)]


def ours(tensors: dict[str, np.ndarray]) -> list[Candidate]:
    """swansong, in each container, without and with a key."""
    content = Content(tensors={name: HostTensor.of(array) for name, array in tensors.items()})
    files = Files()
    writer = Writer(files)
    key = Key(bytes(range(32)))

    def saver(name: str, options: SaveOptions) -> Callable[[Path], None]:
        def run(directory: Path) -> None:
            series = Series.fresh(directory, "bench", files)
            save(
                series,
                writer,
                name,
                content,
                Point(step=1),
                kind="periodic",
                seq=series.draw(),
                options=options,
            )

        return run

    return [
        Candidate("swansong, native directory", saver("bench-1_1", SaveOptions())),
        Candidate("swansong, native directory, AES-256-GCM", saver("bench-1_1", SaveOptions(key=key))),
        Candidate("swansong, .ckpt", saver("bench-1_1.ckpt", SaveOptions(container="ckpt"))),
        Candidate(
            "swansong, .ckpt, AES-GCM", saver("bench-1_1.ckpt", SaveOptions(container="ckpt", key=key))
        ),
    ]


def peers(tensors: dict[str, np.ndarray]) -> list[Candidate]:
    """torch.save, safetensors and MindSpore's save_checkpoint, each followed by the fsyncs it lacks."""
    import mindspore
    import safetensors.numpy
    import torch

    shared = {name: torch.from_numpy(array) for name, array in tensors.items()}
    parameters = [{"name": name, "data": mindspore.Tensor(array)} for name, array in tensors.items()]

    def torch_save(directory: Path) -> None:
        torch.save(shared, directory / "bench.pt")
        make_durable(directory / "bench.pt")

    def safetensors_save(directory: Path) -> None:
        safetensors.numpy.save_file(tensors, directory / "bench.safetensors")
        make_durable(directory / "bench.safetensors")

    def mindspore_save(directory: Path) -> None:
        mindspore.save_checkpoint(parameters, str(directory / "bench.ckpt"))
        make_durable(directory / "bench.ckpt")

    def mindspore_encrypted(directory: Path) -> None:
        mindspore.save_checkpoint(parameters, str(directory / "bench.ckpt"), enc_key=bytes(range(32)))
        make_durable(directory / "bench.ckpt")

    return [
        Candidate("torch.save + fsync", torch_save),
        Candidate("safetensors + fsync", safetensors_save),
        Candidate("MindSpore save_checkpoint + fsync", mindspore_save),
        Candidate("MindSpore save_checkpoint, AES-GCM, + fsync", mindspore_encrypted),
    ]


def raw_limit(size: int) -> list[Candidate]:
    """Plain O_DIRECT writes of `size` bytes that lie ready in aligned memory."""
    return [
        Candidate(f"{threads} thread{'s' * (threads > 1)} x {piece} MiB", _raw(size, threads, piece << 20))
        for threads in (1, 2, 4)
        for piece in (4, 16)
    ]


def _raw(size: int, threads: int, piece: int) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        path = directory / "raw"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(descriptor, 0, size)

        def work(first: int) -> None:
            buffer = mmap.mmap(-1, piece)
            buffer.write(b"\xa5" * piece)
            for offset in range(first * piece, size, threads * piece):
                os.pwrite(descriptor, memoryview(buffer)[: min(piece, size - offset)], offset)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.close(descriptor)
        make_durable(path)

    return run


def make_durable(path: Path) -> None:
    """fsync a file and its directory."""
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
