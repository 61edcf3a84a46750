"""One rank of a protected MindSpore job; started by mindspore_ttp_job.py. Says what it sees as JSON lines.

The plan, in argv: directory, port, mode, size, fault {kind, rank, step}, epochs, options, key.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.communication import get_rank, init
from mindspore.train import Callback

import tiny_training as tiny
from swansong.errors import SwansongWarning
from swansong.mindspore import CheckpointConfig, MindIOTTPAdapter, ModelCheckpoint, resume
from swansong.ttp_options import TTPOptions


class BatchNormed(nn.Cell):
    """What `tiny.Net` does, behind statistics that the forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, momentum=0.9)
        self.inner = tiny.Net(16)

    def construct(self, x):
        return self.inner(self.norm(x))


class Images(tiny.Samples):
    """The samples as images of one channel, four by four."""

    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        return x.reshape(1, 4, 4), y


class Faults(Callback):
    """Waits until the job is protected, and fails as planned."""

    def __init__(self, plan: dict[str, Any], adapter: MindIOTTPAdapter, rank: int) -> None:
        self.fault, self.adapter, self.rank = plan["fault"], adapter, rank
        self.waits = True

    def on_train_step_begin(self, run_context) -> None:
        step = run_context.original_args().cur_step_num
        self._maybe("begin", step)

    def on_train_step_end(self, run_context) -> None:
        step = run_context.original_args().cur_step_num
        say("step", step)
        ends = time.monotonic() + 60
        while self.waits and not self.adapter.protected:
            if time.monotonic() > ends:
                raise SystemExit("never protected")
            time.sleep(0.01)
        self.waits = False
        self._maybe("end", step)

    def _maybe(self, where: str, step: int) -> None:
        fault = self.fault
        if not fault or (fault.get("at", "end"), fault["step"]) != (where, step):
            return
        if self.rank not in fault["ranks"]:
            return
        match fault["kind"]:
            case "raise":
                raise RuntimeError("boom")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stop":
                self.adapter.persist_and_stop()
            case "wait":
                say("waits")
                sys.stdin.readline()


def say(*what: Any) -> None:
    print(json.dumps(what), flush=True)


def model() -> ms.Model:
    ms.set_seed(3)
    ds.config.set_seed(3)
    network = BatchNormed()
    optimizer = nn.Adam(network.trainable_params(), nn.exponential_decay_lr(0.1, 0.9, 1000, 4, 1))
    return ms.Model(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), optimizer)


def dataset(rank: int, size: int) -> ds.Dataset:
    source = ds.GeneratorDataset(Images(), ["x", "y"], shuffle=True, num_shards=size, shard_id=rank)
    return source.batch(tiny.BATCH)


def state(trained: ms.Model) -> dict[str, str]:
    return {name: data.hex() for name, data in tiny.state(trained).items() if not name.startswith("swansong")}


def main() -> None:
    plan = json.loads(sys.argv[1])
    warnings.simplefilter("always", SwansongWarning)
    graph = plan["mode"] == "graph"
    ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE, device_target="CPU")
    rank, size = 0, plan["size"]
    if size > 1:
        init()
        ms.set_auto_parallel_context(
            parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=size
        )
        rank = get_rank()
    directory = Path(plan["directory"])
    say("rank", rank)
    if plan["reference"]:
        undisturbed = model()
        undisturbed.train(plan["epochs"], dataset(rank, size))
        say("reference", state(undisturbed))
    trained, data = model(), dataset(rank, size)
    key = bytes.fromhex(plan["key"]) if plan["key"] else None
    point = resume(trained, directory, "net", data, ttp_directory=directory / "ttp", dec_key=key)
    say("began", point.step, str(point.path or ""))
    if point.path is not None:
        place = point.path.name.removeprefix("ttp_saved_checkpoints-")
        own = point.path / f"rank_{rank}" / f"iteration-{place}.ckpt"
        network = model().train_network
        weights = MindIOTTPAdapter.load_checkpoint_with_backup(own, None, network, dec_key=key)
        say("backup", int(weights["global_step"].asnumpy()[0]), own.exists())
    adapter = MindIOTTPAdapter(
        "127.0.0.1", plan["port"], directory / "ttp", options=TTPOptions(**plan["options"]), enc_key=key
    )
    config = CheckpointConfig(plan["every"], keep_checkpoint_max=50, enc_key=key)
    callbacks = [ModelCheckpoint("net", directory, config), adapter, Faults(plan, adapter, rank)]

    @adapter.wrapper_ttp_persist
    def train() -> None:
        trained.train(plan["epochs"], data, callbacks=callbacks, initial_epoch=point.initial_epoch)

    train()
    say("ended", state(trained))


if __name__ == "__main__":
    main()
