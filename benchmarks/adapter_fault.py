"""How fast a fault is saved: from a rank's SIGKILL to the committed checkpoint of the others' live state.

Four ranks hold equal state and wait; one is killed. Held against a plain durable save of the same bytes into
the same directory, in turns.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmarks.bars import Bar, Finding

from swansong.persist.job import VARIABLE
from swansong.state.tensors import HostTensor
from swansong.store import catalog
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer

TITLE = "A killed rank's job, saved by the survivors"
_BAR = 1.2
_RANKS = 4
_PATIENCE_S = 120.0


def findings(
    mebibytes: int, rounds: int, progress: Callable[[str], None], directory: Path | None = None
) -> list[Finding]:
    """Measure with a state of so many MiB on each rank."""
    plain, fault = [], []
    with tempfile.TemporaryDirectory(prefix="swansong-bench-", dir=directory) as folder:
        for number in range(rounds):
            place = Path(folder) / "run"
            progress(f"round {number + 1} of {rounds}: plain save")
            plain.append(_plain(place, mebibytes))
            progress(f"round {number + 1} of {rounds}: a kill")
            fault.append(_fault(place, mebibytes))
    ratio = statistics.median(fault) / statistics.median(plain)
    what = f"{mebibytes} MiB, kill to commit"
    return [
        Finding(what=f"{what} / plain durable save", value=ratio, bar=Bar(_BAR)),
        Finding(what=f"  {what}", value=statistics.median(fault), unit="s", samples=tuple(fault)),
        Finding(what="  plain durable save", value=statistics.median(plain), unit="s", samples=tuple(plain)),
    ]


def _plain(place: Path, mebibytes: int) -> float:
    random = np.random.default_rng(0)
    arrays = {f"layer{n:02d}": random.random((mebibytes * 4, 1024), np.float32) for n in range(64)}
    content = Content(tensors={name: HostTensor.of(array) for name, array in arrays.items()})
    files = Files()
    series = Series.fresh(place, "model", files)
    writer = Writer(files)
    began = time.perf_counter()
    save(series, writer, "model-2", content, Point(step=2), kind="periodic", seq=1, options=SaveOptions())
    took = time.perf_counter() - began
    writer.close()
    shutil.rmtree(place)
    return took


def _fault(place: Path, mebibytes: int) -> float:
    place.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {VARIABLE: secrets.token_hex(16)}
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.adapter_rank", str(place), str(port)),
                *(str(rank), str(_RANKS), str(mebibytes)),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    try:
        for rank in ranks:
            if rank.stdout is None or rank.stdout.readline() != "ready\n":
                raise RuntimeError("a rank did not come up")
        began = time.perf_counter()
        ranks[-1].send_signal(signal.SIGKILL)
        while not any(found.committed for found in catalog.scan(place)):
            if time.perf_counter() - began > _PATIENCE_S:
                raise TimeoutError("nothing was saved")
            time.sleep(0.001)
        return time.perf_counter() - began
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for stream in (rank.stdin, rank.stdout):
                if stream is not None:
                    stream.close()
        _await_controller(port)
        _remove(place)


def _remove(place: Path) -> None:
    """The controller may be removing what it has made there meanwhile."""
    ends = time.monotonic() + _PATIENCE_S
    while place.exists() and time.monotonic() < ends:
        shutil.rmtree(place, ignore_errors=True)


def _await_controller(port: int) -> None:
    """Until it has ended: it may still be writing its report."""
    ends = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.05)
