"""What a controller costs while nothing happens: CPU and memory with thousands of registered ranks.

The ranks are connections of one process, each with the whole handshake, registered with a world map that all
have read to its end. Memory is what the controller alone has (Anonymous in smaps_rollup, proc(5)), less what
it had before the first connection; what the kernel keeps for its sockets is not counted.
"""

from __future__ import annotations

import re
import selectors
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bar, Finding
from benchmarks.engine_controller import PATIENCE_S, Job, controller

from swansong.engine.inquiry import ask
from swansong.engine.processes import host_name, raise_descriptor_limit, start_time
from swansong.engine.transport import Connection, connect
from swansong.protocol import messages as m
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.operator import Status, StatusRequest

TITLE = "A controller whose ranks are all registered and idle"
_CPU_BAR = 1.0
_MEMORY_BAR = 64.0
_WINDOWS = 4
_QUIET_S = 1.0


@dataclass(frozen=True, slots=True)
class _Cost:
    """Of one controller."""

    cpu: tuple[float, ...]
    """Percent of a core, in each window."""
    memory: float
    """KiB per rank."""
    peak: float
    """KiB per rank, resident, at most; the world map has gone out by then."""


def findings(ranks: int, seconds: float, progress: Callable[[str], None]) -> list[Finding]:
    """Measure the bars with so many ranks, over so many seconds; under TLS too."""
    raise_descriptor_limit(2 * ranks + 64)
    plain = _measure(ranks, seconds, progress, secure=False)
    secure = _measure(ranks, seconds, progress, secure=True)
    found: list[Finding] = []
    for name, cost in (("", plain), (", TLS", secure)):
        what = f"{ranks:,} ranks{name}: "
        found += [
            Finding(
                what=f"{what}CPU of a core",
                value=statistics.median(cost.cpu),
                unit="%",
                bar=Bar(_CPU_BAR),
                samples=cost.cpu,
            ),
            Finding(what=f"{what}memory of each", value=cost.memory, unit="KiB", bar=Bar(_MEMORY_BAR)),
            Finding(what=f"{what}peak of each", value=cost.peak, unit="KiB"),
        ]
    return found


def _measure(ranks: int, seconds: float, progress: Callable[[str], None], *, secure: bool) -> _Cost:
    with controller(ranks, secure=secure) as job:
        before, resident = _memory(job.pid, "smaps_rollup", "Anonymous"), _memory(job.pid, "status", "VmRSS")
        with _registered(job, ranks, progress):
            progress(f"{ranks} idle ranks")
            time.sleep(_QUIET_S)
            cpu = tuple(_busy(job.pid, seconds / _WINDOWS) for _ in range(_WINDOWS))
            after, peak = _memory(job.pid, "smaps_rollup", "Anonymous"), _memory(job.pid, "status", "VmHWM")
            _check(job, ranks)
    return _Cost(cpu, (after - before) / ranks, (peak - resident) / ranks)


@contextmanager
def _registered(job: Job, ranks: int, progress: Callable[[str], None]) -> Iterator[None]:
    """So many ranks, which know the world."""
    connections: list[Connection] = []
    try:
        for rank in range(ranks):
            progress(f"{rank + 1} of {ranks} ranks")
            me = Identity(role=Role.RANK, rank=rank, incarnation=job.incarnation)
            connection = connect(job.address, job.token, me, timeout_s=PATIENCE_S, tls=job.tls)
            connections.append(connection)
            connection.send(m.Register(member=_member(rank, job.pid), world_size=ranks))
        progress("the world map")
        _await_world(connections)
        yield
    finally:
        for connection in connections:
            connection.close()


def _await_world(connections: list[Connection]) -> None:
    """Read until everybody has the world map. Raises TimeoutError."""
    ends = time.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while selector.get_map():
            if time.monotonic() >= ends:
                raise TimeoutError(f"{len(selector.get_map())} ranks heard no world map in {PATIENCE_S:g} s")
            for key, _ in selector.select(1.0):
                if any(isinstance(message, m.World) for message in key.data.poll()):
                    selector.unregister(key.fileobj)


def _check(job: Job, ranks: int) -> None:
    """All are still here. Raises RuntimeError."""
    answer = ask(job.address, job.token, StatusRequest(), timeout_s=PATIENCE_S, tls=job.tls)
    if not isinstance(answer, Status) or answer.counts != {"connected": ranks}:
        raise RuntimeError(f"wanted {ranks} connected ranks, got {answer}")


def _member(rank: int, pid: int) -> m.Member:
    """A rank of a data-parallel job with a sharded optimizer. Its process is watched, as on one host: the
    dearest case."""
    entries = tuple(
        m.ComponentEntry(key=key, label=label, nbytes=1 << 30)
        for key, label in ((f"{0:032x}", "model"), (f"{rank + 1:032x}", f"optimizer shard {rank}"))
    )
    return m.Member(rank=rank, host=host_name(), pid=pid, start_time=start_time(pid), components=entries)


def _busy(pid: int, seconds: float) -> float:
    """Percent of a core that a process uses, in all its threads, over so many seconds from now."""
    clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) returns: CPUCLOCK_SCHED of a process
    began, used = time.monotonic(), time.clock_gettime(clock)
    time.sleep(seconds)
    return 100 * (time.clock_gettime(clock) - used) / (time.monotonic() - began)


def _memory(pid: int, file: str, field: str) -> float:
    """KiB, from a file of proc(5)."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"/proc/{pid}/{file} has no {field}")
    return float(found[1])
