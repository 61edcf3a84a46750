"""Whatever comes to the controller's port: real ranks are served meanwhile, and memory stays bounded."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from engine_support import (
    TOKEN,
    Rank,
    finish_incident,
)
from port_support import OPERATOR, dial, ended, proved, rank_identity
from swansong.engine.address import Address, resolve
from swansong.engine.inquiry import ask
from swansong.errors import ProtocolError, UnreachableError
from swansong.protocol import messages as m
from swansong.protocol.codec import Channel
from swansong.protocol.operator import PersistRequest, Status, StatusRequest

MIB = 1 << 20


def join(address: Address, rank: int) -> Rank:
    """A rank that tries until it is connected, as processors do: among strangers it may have to make room."""
    while True:
        with suppress(ProtocolError, UnreachableError):
            return Rank(address, rank)


@contextmanager
def controller_process(world_size: int) -> Iterator[tuple[Address, subprocess.Popen[str]]]:
    program = Path(__file__).parents[1] / "controller_process.py"
    with subprocess.Popen(
        [sys.executable, str(program), str(world_size)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield resolve("127.0.0.1", int(process.stdout.readline())), process
        finally:
            process.kill()


def peak_memory(pid: int) -> int:
    """Bytes, at most so far (proc(5), VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# ---- crowds, each in a thread, until told to stop


def silent_crowd(address: Address, stop: threading.Event) -> None:
    socks = [dial(address) for _ in range(500)]
    stop.wait()
    for sock in socks:
        sock.close()


def trickle(address: Address, stop: threading.Event) -> None:
    """A greeting, one byte a second, on several connections."""
    greeting = Channel(TOKEN, rank_identity(0), nonce=os.urandom(32)).greeting
    socks = [dial(address) for _ in range(5)]
    for number in range(len(greeting)):
        for sock in socks:
            with suppress(OSError):
                sock.sendall(greeting[number : number + 1])
        if stop.wait(1.0):
            break
    for sock in socks:
        sock.close()


def noise(address: Address, stop: threading.Event) -> None:
    randomness = random.Random(20)
    while not stop.is_set():
        with dial(address) as sock, suppress(OSError):
            sock.sendall(randomness.randbytes(randomness.choice([1, 5, 100, 4096, 200_000])))


def cut_short(address: Address, stop: threading.Event) -> None:
    """Proved to be an operator, then a part of a frame, and gone; or a length that promises a lot."""
    randomness = random.Random(21)
    while not stop.is_set():
        with suppress(OSError), ExitStack() as stack:
            sock, channel = proved(address, OPERATOR)
            stack.enter_context(sock)
            frame = channel.send(PersistRequest(who="somebody" * 50))
            if randomness.random() < 0.5:
                sock.sendall(frame[: randomness.randrange(len(frame))])
            else:
                sock.sendall(b"\x00\x0f\xff\x00" + b"x" * 100_000)


def test_ranks_register_and_an_incident_is_handled_among_500_silent_and_noisy_strangers() -> None:
    stop = threading.Event()
    with controller_process(4) as (address, process):
        before = peak_memory(process.pid)
        crowds: list[Callable[[Address, threading.Event], None]] = [silent_crowd, trickle, noise, cut_short]
        threads = [threading.Thread(target=crowd, args=(address, stop)) for crowd in crowds]
        for thread in threads:
            thread.start()
        try:
            ranks = [join(address, rank) for rank in range(4)]
            for rank in ranks:
                rank.register(4)
            for rank in ranks:
                rank.hear(m.World)
            for _ in range(20):
                assert isinstance(ask(address, TOKEN, StatusRequest(), timeout_s=20), Status)
            ranks[3].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=3)))
            release = finish_incident(ranks, step=11)
            assert (release.outcome, release.step) == (m.Outcome.SAVED, 11)
            assert peak_memory(process.pid) - before < 32 * MIB
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for rank in ranks:
            rank.connection.close()
        assert process.wait(20) == 0


def test_controller_that_was_stopped_under_load_serves_when_it_goes_on() -> None:
    with controller_process(1) as (address, process):
        os.kill(process.pid, signal.SIGSTOP)
        crowd = [dial(address) for _ in range(300)]
        for sock in crowd:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        os.kill(process.pid, signal.SIGCONT)
        assert all(ended(sock) for sock in crowd)
        with Rank(address, 0) as rank:
            rank.register(1)
            rank.hear(m.World)


def let_open(process: subprocess.Popen[str], descriptors: int) -> int:
    """Let a process open so many files more; return the limit that it had."""
    used = {int(entry.name) for entry in Path(f"/proc/{process.pid}/fd").iterdir()}
    free = [number for number in range(len(used) + descriptors + 1) if number not in used]
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free[descriptors], hard))
    return soft


def test_strangers_make_room_when_descriptors_run_out() -> None:
    with controller_process(1) as (address, process):
        let_open(process, 10)
        crowd = [dial(address) for _ in range(50)]
        with join(address, 0) as rank:
            rank.register(1)
            rank.hear(m.World)
        for sock in crowd:
            sock.close()


def test_controller_without_descriptors_serves_its_ranks_and_accepts_again_when_it_can() -> None:
    with controller_process(2) as (address, process):
        ranks = [join(address, rank) for rank in range(2)]
        for rank in ranks:
            rank.register(2)
        for rank in ranks:
            rank.hear(m.World)
        limit = let_open(process, 0)
        with pytest.raises(UnreachableError):
            ask(address, TOKEN, StatusRequest(), timeout_s=0.3)
        ranks[1].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.STALLED, rank=1, step=3)))
        assert finish_incident(ranks, step=3).outcome is m.Outcome.SAVED
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        assert isinstance(ask(address, TOKEN, StatusRequest(), timeout_s=20), Status)
