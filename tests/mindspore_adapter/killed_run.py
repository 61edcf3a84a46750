"""A run in a process of its own: resumes if it can, kills itself at a given step, prints its final state."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

from mindspore.train import Callback

import tiny_training as tiny
from swansong.mindspore import CheckpointConfig, ModelCheckpoint, resume


class KillAt(Callback):
    """SIGKILL at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, run_context) -> None:
        if run_context.original_args().cur_step_num == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(model) -> str:
    """One number for all Parameters."""
    return hashlib.sha256(repr(sorted(tiny.state(model).items())).encode()).hexdigest()


def main() -> None:
    model, dataset = tiny.model(), tiny.generated()
    point = resume(model, Path(sys.argv[1]), "net", dataset)
    callback = ModelCheckpoint("net", sys.argv[1], CheckpointConfig(4))
    callbacks = [callback, KillAt(int(sys.argv[2]))]
    model.train(3, dataset, callbacks=callbacks, initial_epoch=point.initial_epoch)
    print(point.step, digest(model))


if __name__ == "__main__":
    main()
