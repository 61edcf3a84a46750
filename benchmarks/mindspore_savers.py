"""MindSpore's `.ckpt`, written by its own ModelCheckpoint and by ours, each driven as its loop does."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.states import State
from benchmarks.turns import Candidate, make_durable

SCHEMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "crc": {"crc_check": True},
    "AES-GCM": {"enc_key": bytes(range(32)), "enc_mode": "AES-GCM"},
    "AES-CBC": {"enc_key": bytes(range(32)), "enc_mode": "AES-CBC"},
}
THEIRS = "MindSpore ModelCheckpoint, {}, + fsync"
OURS = "swansong ModelCheckpoint, {}"
PLAIN = {"MindSpore save_checkpoint": None, "MindSpore save_checkpoint, AES-GCM": bytes(range(32))}
"""Name -> key."""
_PATIENCE_S = 120.0


def pairs(arrays: State, place: Path, schemes: tuple[str, ...]) -> list[Candidate]:
    """Theirs and ours of each scheme. Below `place` they have directories of their own, as a run has one."""
    import mindspore
    from mindspore.train import CheckpointConfig, ModelCheckpoint

    import swansong.mindspore

    mindspore.set_seed(1)  # ours warns of a run without seed
    network = _network(arrays)
    entries = []
    for scheme in schemes:
        options = SCHEMES[scheme]
        folder = place / f"theirs {scheme}"
        theirs = ModelCheckpoint("net", str(folder), CheckpointConfig(1, **options))
        entries.append(Candidate(THEIRS.format(scheme), _Loop(theirs, network, folder, sync=True).prepare))
        folder = place / f"ours {scheme}"
        config = swansong.mindspore.CheckpointConfig(1, **options)
        ours = swansong.mindspore.ModelCheckpoint("net", folder, config)
        entries.append(Candidate(OURS.format(scheme), _Loop(ours, network, folder, sync=False).prepare))
    return entries


@dataclass
class _Loop:
    """Ends steps, and removes what the step before has saved."""

    callback: Any
    network: Any
    folder: Path
    sync: bool
    step: int = 0

    def prepare(self, _: Path) -> Callable[[], None]:
        """The end of the next step."""
        from mindspore.train import RunContext
        from mindspore.train.callback import _InternalCallbackParam

        for path in self.folder.glob("*.ckpt"):
            path.chmod(0o600)
            path.unlink()
        self.step += 1
        now = _InternalCallbackParam()
        now.update(
            train_network=self.network,
            cur_epoch_num=1,
            cur_step_num=self.step,
            batch_num=1000,
            dataset_sink_mode=False,
        )

        def run() -> None:
            self.callback.step_end(RunContext(now))
            if self.sync:
                make_durable(*self.folder.glob("*.ckpt"), self.folder)

        return run


def plain(arrays: State, name: str) -> Candidate:
    """MindSpore's save_checkpoint without any callback, durable; `name` is one of PLAIN."""
    import mindspore

    parameters = [{"name": name, "data": mindspore.Tensor(array)} for name, array in arrays.items()]
    key = PLAIN[name]

    def run(directory: Path) -> None:
        mindspore.save_checkpoint(parameters, str(directory / "bench.ckpt"), enc_key=key)
        make_durable(directory / "bench.ckpt", directory)

    return Candidate(name, lambda directory: partial(run, directory))


def asynchronous(arrays: State) -> list[Candidate]:
    """The time for which MindSpore's asynchronous saves block; their end is awaited outside that."""
    import mindspore

    parameters = [{"name": name, "data": mindspore.Tensor(array)} for name, array in arrays.items()]

    def of(mode: str) -> Callable[[Path], Callable[[], float]]:
        def prepare(directory: Path) -> Callable[[], float]:
            def run() -> float:
                began = time.perf_counter()
                mindspore.save_checkpoint(parameters, str(directory / "bench.ckpt"), async_save=mode)
                blocked = time.perf_counter() - began
                _await_saves()
                return blocked

            return run

        return prepare

    return [
        Candidate(f"MindSpore save_checkpoint, async_save={mode!r}", of(mode))
        for mode in ("thread", "process")
    ]


def _await_saves() -> None:
    """As MindSpore itself waits for them before the next save."""
    import multiprocessing
    import threading

    workers: list[Any] = [*multiprocessing.active_children(), *threading.enumerate()]
    for worker in workers:
        if worker.name == "asyn_save_ckpt":
            worker.join(_PATIENCE_S)


def _network(arrays: State) -> Any:
    import mindspore
    from mindspore import nn

    warnings.filterwarnings("ignore", module="mindspore.*")

    class Network(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parameters = mindspore.ParameterTuple(
                [mindspore.Parameter(mindspore.Tensor(array), name=name) for name, array in arrays.items()]
            )

    return Network()
