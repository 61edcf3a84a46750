"""From the SIGKILL of a rank to the gates of the others: how long training goes on with a dead peer.

Each sample is a job of its own: the product's controller, and ranks that are processes with the product's
thread, transport, clock and gate. The time is from just before kill(2) until the *last* survivor has closed
its gate; the controller sent its order before that, so a bar for the sending that this time meets is met.

The kernel gives back a killed process's memory before it closes its sockets and lets its pidfd tell
(do_exit in kernel/exit.c: exit_mm, then exit_files and exit_notify), and nobody can notice the end before
that. So a rank that holds much memory in small pages is measured apart, with the kernel's share.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from benchmarks.bars import Bar, Finding, percentile
from benchmarks.engine_controller import HOST, PATIENCE_S, controller

from swansong.engine.address import resolve
from swansong.engine.clock import Gate, UpdateClock
from swansong.engine.processes import host_name, start_time
from swansong.engine.processor import ProcessorThread
from swansong.engine.token import job_token
from swansong.engine.transport import connect
from swansong.errors import SaveError, TrainingInterrupted
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.processor import Processor

RANKS = 4
TITLE = f"From the SIGKILL of 1 of {RANKS} ranks to the last gate closed, 99th percentile"
_BAR_MS = 50.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rank's process is told; of plain values, which reach any process."""

    directory: Path
    port: int
    incarnation: bytes
    trains: bool
    """It computes and updates without a pause; otherwise it waits."""
    rank: int = 0
    held: int = 0
    """Bytes that it has touched, in pages of the smallest size."""


def findings(kills: int, held_mebibytes: int, progress: Callable[[str], None]) -> list[Finding]:
    """The bar, from `kills` samples; for information, a fifth of that with ranks that compute, and a
    twentieth with ranks of which the killed one holds memory."""
    draw = random.Random(0)
    idle = _samples(kills, draw, progress, "waiting ranks")
    busy = _samples(max(1, kills // 5), draw, progress, "computing ranks", trains=True)
    heavy = _samples(max(1, kills // 20), draw, progress, "big ranks", held=held_mebibytes << 20)
    held = f"{held_mebibytes} MiB held"
    return [
        _finding("all ranks wait", [sample.closed for sample in idle], Bar(_BAR_MS)),
        _finding("all ranks compute", [sample.closed for sample in busy]),
        _finding(held, [sample.closed for sample in heavy]),
        _finding(f"{held}, kernel's share", [sample.ended for sample in heavy]),
    ]


def _finding(how: str, seconds: list[float], bar: Bar | None = None) -> Finding:
    samples = tuple(1000 * value for value in seconds)
    return Finding(what=how, value=percentile(samples, 99), unit="ms", bar=bar, samples=samples)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Seconds since the kill."""

    ended: float
    """Until the killed process's end could be seen."""
    closed: float
    """Until the last gate was closed."""


def _samples(
    count: int,
    draw: random.Random,
    progress: Callable[[str], None],
    name: str,
    *,
    trains: bool = False,
    held: int = 0,
) -> list[_Sample]:
    """So many jobs, of each of which one rank is killed."""
    samples: list[_Sample] = []
    for number in range(count):
        progress(f"kill {number + 1} of {count}, {name}")
        victim = draw.randrange(RANKS)
        with controller(RANKS) as job:
            plan = Plan(job.directory, job.address.port, job.incarnation, trains)
            plans = [replace(plan, rank=rank, held=held * (rank == victim)) for rank in range(RANKS)]
            samples.append(_kill(plans, victim, draw.uniform(0.05, 0.1)))
    return samples


def _kill(plans: list[Plan], victim: int, rest_s: float) -> _Sample:
    """Kill a rank once all are protected and have gone on for `rest_s`."""
    with _ranks(plans) as ranks:
        for _, said in ranks:
            _hear(said)
        time.sleep(rest_s)  # past the burst of registering, and at no fixed place in a step
        end = os.pidfd_open(ranks[victim][0].pid or 0)
        killed_at = time.monotonic()
        ranks[victim][0].kill()
        wait([end], PATIENCE_S)
        ended_at = time.monotonic()
        os.close(end)
        closed_at = max(_hear(said) for rank, (_, said) in enumerate(ranks) if rank != victim)
        return _Sample(ended_at - killed_at, closed_at - killed_at)


@contextmanager
def _ranks(plans: list[Plan]) -> Iterator[list[tuple[BaseProcess, Pipe]]]:
    """Processes of ranks, and what they say; forked from one that has imported all this, and no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks: list[tuple[BaseProcess, Pipe]] = []
    try:
        for plan in plans:
            ours, theirs = multiprocessing.Pipe()
            process: BaseProcess = context.Process(target=run_rank, args=(plan, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        yield ranks
    finally:
        for process, said in ranks:
            process.kill()
            process.join()
            said.close()


def _hear(said: Pipe) -> float:
    """The next moment that a rank tells. Raises TimeoutError, EOFError."""
    if not said.poll(PATIENCE_S):
        raise TimeoutError(f"a rank said nothing in {PATIENCE_S:g} s")
    moment: float = said.recv()
    return moment


# -- in a rank's process ---------------------------------------------------------------------------------


class _Rank:
    """What the processor's thread needs done, for one component. Tells when the gate has closed."""

    def __init__(self, said: Pipe, lease_s: float) -> None:
        self.gate, self.clock = Gate(lease_s=lease_s), UpdateClock("weights")
        self._said: Pipe | None = said

    def close_gate(self) -> None:
        self.gate.close()
        if self._said is not None:
            self._said.send(time.monotonic())
            self._said = None

    def open_gate(self) -> None:
        self.gate.open()

    def read_state(self) -> m.StateRead:
        step = self.clock.read().step
        return m.StateRead({self.clock.key: Held(step, str(step))}, step is not None, step, "trains")

    def save(self, order: m.StartSave, progress: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        raise SaveError("this rank is measured until its gate is closed, and saves nothing")

    def wake(self, release: m.Release) -> None:
        self.gate.interrupt(release)

    def depart(self) -> None:
        pass

    def unprotected(self, reason: str) -> None:
        pass

    def watch(self, now: float) -> m.Fault | None:
        return None


def run_rank(plan: Plan, said: Pipe) -> None:
    """Be a rank, and tell two moments: when it is protected, and when its gate has closed.

    Ends by a signal, or once nobody listens any more.
    """
    ballast, options = _touched(plan.held), ProtocolOptions()
    rank = _Rank(said, options.gate_lease_s)
    me = Identity(role=Role.RANK, rank=plan.rank, incarnation=plan.incarnation)
    address, token = resolve(HOST, plan.port), job_token(plan.directory, {}, create=False)
    thread = ProcessorThread(
        Processor(_member(plan.rank), RANKS, options, time.monotonic()),
        rank,
        lambda: connect(address, token, me, timeout_s=1.0),
    )
    thread.start()
    while not thread.protected:
        time.sleep(0.002)
    said.send(time.monotonic())
    if plan.trains:
        with suppress(TrainingInterrupted):
            _train(rank, said)
    wait([said])
    ballast.close()


def _train(rank: _Rank, said: Pipe) -> None:
    """Steps of a few milliseconds, most of them outside the interpreter lock, until nobody listens."""
    weights = np.zeros((512, 512), np.float32)
    inputs = np.ones_like(weights)
    while not said.poll():
        gradients = inputs @ inputs
        rank.gate.enter([rank.clock])
        with rank.clock.window():
            weights += gradients


def _touched(size: int) -> mmap.mmap:
    """So many bytes of memory, resident."""
    memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return memory


def _member(rank: int) -> m.Member:
    pid = os.getpid()
    entry = m.ComponentEntry(key="weights", label="weights", nbytes=1 << 20)
    return m.Member(rank=rank, host=host_name(), pid=pid, start_time=start_time(pid), components=(entry,))
