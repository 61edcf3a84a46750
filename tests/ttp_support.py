"""A protected training in one process, for the tests of MindIOTTPAdapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mindspore.train import Callback

import tiny_training as tiny
from array_job import free_port, until
from swansong.mindspore import CheckpointConfig, MindIOTTPAdapter, ModelCheckpoint
from swansong.ttp_options import TTPOptions

QUICK: dict[str, Any] = {"exit_grace_s": 30.0, "freeze_timeout_s": 1.0, "settle_timeout_s": 1.0}


class Waits(Callback):
    """At a step's end, until the job is protected."""

    def __init__(self, protects: MindIOTTPAdapter) -> None:
        self.protects = protects

    def on_train_step_end(self, run_context) -> None:
        until(lambda: self.protects.protected)


def adapter(tmp_path: Path, **how: Any) -> MindIOTTPAdapter:
    options = how.pop("options", TTPOptions(**QUICK))
    return MindIOTTPAdapter("127.0.0.1", free_port(), tmp_path / "ttp", options=options, **how)


def fails_at(
    tmp_path: Path,
    step: int,
    where: str = "on_train_step_end",
    *,
    first: bool = False,
    every: int = 100,
    **how: Any,
) -> BaseException:
    """Train until a callback raises at a step; return what came out of `train`."""
    model, protects = tiny.model(), adapter(tmp_path, **how)
    raises = tiny.RaiseAt(step, where)
    config = CheckpointConfig(every, enc_key=how.get("enc_key"))
    callbacks = [ModelCheckpoint("net", tmp_path, config), protects, Waits(protects)]
    with pytest.raises(RuntimeError, match="boom") as raised:
        model.train(3, tiny.generated(), callbacks=[raises, *callbacks] if first else [*callbacks, raises])
    return raised.value
