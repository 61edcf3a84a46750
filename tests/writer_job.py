"""A job for tests of `async_save="process"`: saves twice, and may die while it gives its second order.

    writer_job.py DIRECTORY FATE [fork]

It says the id of its worker after the first save and then waits to be told to go on. FATE is "lives", or at
which moment of the second order it kills itself. With "fork", a child made behind Python's back holds all its
descriptors until it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from swansong.persist.saver import Request, Saver
from swansong.policy.keep import KeepLast
from swansong.state.tensors import HostTensor
from swansong.store.channel import Channel
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.series import Series


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_halfway(channel: Channel, payload: bytes, descriptors: tuple[int, ...]) -> None:
    channel._put(len(payload).to_bytes(8, "big"), descriptors)
    channel._put(payload[: len(payload) // 2], ())
    die()


def die_afterwards(channel: Channel, payload: bytes, descriptors: tuple[int, ...]) -> None:
    real_send(channel, payload, descriptors)
    die()


def die_answered(channel: Channel, limit: int) -> None:
    assert real_receive(channel, limit) is not None
    die()


real_send, real_receive = Channel.send, Channel.receive
FATES: dict[str, tuple[str, Any]] = {
    "before the order": ("send", die),
    "within the order": ("send", die_halfway),
    "after the order": ("send", die_afterwards),
    "after the answer": ("receive", die_answered),
}


def main(directory: Path, fate: str, *forks: str) -> None:
    saver = Saver(Files(), KeepLast(5), SaveOptions(), background="process", on_error="raise")
    series = Series.fresh(directory, "m", Files())

    def save(step: int) -> None:
        content = Content(tensors={"w": HostTensor.of(np.full(1000, step, np.float32))})
        saver.save(
            lambda: Request(
                series=series, name=f"m-{step}", content=content, point=Point(step=step), kind="periodic"
            )
        )

    save(1)
    saver.wait()
    if forks and ctypes.CDLL(None).fork() == 0:
        signal.pause()
    assert saver._remote is not None
    assert saver._remote._worker is not None
    print(saver._remote._worker._process.pid, flush=True)
    try:
        os.read(0, 1)
        if fate in FATES:
            setattr(Channel, *FATES[fate])
        save(2)
        saver.wait()
    except KeyboardInterrupt:
        saver.wait()
    saver.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
