"""LeNet5 in MindSpore on several processes, data parallel, protected by MindIOTTPAdapter; and their launcher.

    python examples/lenet5_ranks.py --launch 4

The launcher starts a scheduler and the ranks, and all of them again when a rank has failed: not before the
others have ended, which takes MindSpore's collectives about 30 s to bring about. `msrun --join=True` would
end them within a second, and leave nothing to save.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESTARTS = 3
GRACE_S = 90.0
"""How long ranks may take to end after one has failed."""


def launch(ranks: int, arguments: list[str]) -> int:
    """Run the job, `RESTARTS` times again if need be; its exit code."""
    for _ in range(RESTARTS + 1):
        started = start(ranks, arguments)
        try:
            if wait(started[1:]):
                return 0
            codes = [process.returncode for process in started[1:]]
            print(f"launcher: the ranks ended with {codes} (None: not within {GRACE_S:g} s)", file=sys.stderr)
        finally:
            for process in started:
                process.kill()
                process.wait()
    return 1


def start(ranks: int, arguments: list[str]) -> list[subprocess.Popen[bytes]]:
    """A scheduler and ranks, in this order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"MS_WORKER_NUM": str(ranks), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
    workers = [{"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(number)} for number in range(ranks)]
    return [
        subprocess.Popen([sys.executable, __file__, *arguments], env=os.environ | job | role)
        for role in ({"MS_ROLE": "MS_SCHED"}, *workers)
    ]


def wait(ranks: list[subprocess.Popen[bytes]]) -> bool:
    """Until all have ended; True if all went well."""
    failed_at = None
    while any(rank.poll() is None for rank in ranks):
        if failed_at is None and any(rank.poll() for rank in ranks):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
            return False
        time.sleep(0.05)
    return all(rank.returncode == 0 for rank in ranks)


def train(arguments: argparse.Namespace) -> None:
    """One rank, or the scheduler."""
    import lenet5
    import mindspore as ms
    import mindspore.dataset as ds
    from mindspore.communication import get_rank, init
    from mindspore.train import Callback

    from swansong.mindspore import CheckpointConfig, MindIOTTPAdapter, ModelCheckpoint, resume
    from swansong.ttp_options import TTPOptions

    class StepLog(Callback):
        """What this rank has done, written by itself and at once: kill_demo.py counts by it."""

        def __init__(self, directory: Path, rank: int, adapter: MindIOTTPAdapter) -> None:
            self._file = (directory / f"rank-{rank}").open("a", buffering=1)
            self._adapter = adapter

        def write(self, line: str) -> None:
            self._file.write(f"{line}\n")

        def on_train_step_end(self, run_context: Any) -> None:
            self.write(f"step {run_context.original_args().cur_step_num}")
            while not self._adapter.protected:  # training takes seconds here, and the demo kills soon
                time.sleep(0.01)

    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank, size = get_rank(), int(os.environ["MS_WORKER_NUM"])
    data_parallel = ms.ParallelMode.DATA_PARALLEL
    ms.set_auto_parallel_context(parallel_mode=data_parallel, gradients_mean=True, device_num=size)
    signal.signal(signal.SIGUSR1, no_good)
    _, model = lenet5.create_model()
    ds.config.set_seed(lenet5.SEED)
    dataset = lenet5.create_dataset(arguments.data, shards=size, shard=rank)
    faults = arguments.checkpoints / "faults"
    point = resume(model, arguments.checkpoints, "lenet5", dataset, ttp_directory=faults)
    host, _, port = arguments.ttp.partition(":")
    options = TTPOptions(stall_timeout_s=arguments.stall_timeout_s)
    adapter = MindIOTTPAdapter(host, int(port), faults, options=options)
    saving = ModelCheckpoint("lenet5", arguments.checkpoints, CheckpointConfig(save_checkpoint_steps=1000))
    callbacks: list[Callback] = [saving, adapter]
    if arguments.step_log is not None:
        log = StepLog(arguments.step_log, rank, adapter)
        log.write(f"start {point.step} {os.getpid()}")
        callbacks.insert(0, log)
    if not point.finished(arguments.epochs):
        model.train(arguments.epochs, dataset, callbacks=callbacks, initial_epoch=point.initial_epoch)


def no_good(*_: Any) -> None:
    """What kill_demo.py --signal raise brings about, with SIGUSR1."""
    raise RuntimeError("this batch is no good")


def main() -> int:
    """Run the launcher, or what it starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launch", type=int, metavar="RANKS", help="start so many ranks of what follows")
    parser.add_argument("--data", type=Path, default=Path("MNIST_Data"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoint"))
    parser.add_argument("--ttp", default="127.0.0.1:2000")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stall-timeout-s", type=float, default=60.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch is None:
        train(arguments)
        return 0
    arguments_of_rank = [word for word in sys.argv[1:] if not word.startswith("--launch")]
    return launch(arguments.launch, arguments_of_rank)


if __name__ == "__main__":
    sys.exit(main())
