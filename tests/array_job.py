"""Jobs of real processes for tests: ranks of `array_rank.py`, their controller, and their end."""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from swansong.engine.address import resolve
from swansong.engine.inquiry import Answer, ask
from swansong.engine.token import FILE_NAME, read_token
from swansong.protocol.operator import OperatorRequest
from swansong.store import catalog
from swansong.store.catalog import Found
from swansong.store.opening import open_checkpoint

PATIENCE_S = 30.0
"""How long a test waits for what should come soon; only a failing test waits for so long."""
SHARED_MEMORY = Path("/dev/shm")
QUICK: dict[str, Any] = {"exit_grace_s": 1.0, "freeze_timeout_s": 1.0, "settle_timeout_s": 1.0}

T = TypeVar("T")


def until(what: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    ends = time.monotonic() + patience_s
    while not (value := what()):
        assert time.monotonic() < ends, "it did not come to be"
        time.sleep(0.005)
    return value


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has, and that the kernel gives to no connection before it is used."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # below the ephemeral ports
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankProcess:
    """A rank's process, and what it says."""

    def __init__(self, number: int, plan: dict[str, Any], stderr: Path) -> None:
        self.number, self._stderr = number, stderr
        script = Path(__file__).with_name("array_rank.py")
        with stderr.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._said: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def hear(self, what: str) -> list[Any]:
        try:
            said = self._said.get(timeout=PATIENCE_S)
        except queue.Empty:
            said = ["nothing"]
        assert (said or ["the end"])[0] == what, f"rank {self.number}: {said}\n{self.errors()}"
        return (said or [])[1:]

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def errors(self) -> str:
        return self._stderr.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class Job:
    """One start of a job."""

    def __init__(self, directory: Path, size: int, **given: Any) -> None:
        self.directory, self.port = directory, given.pop("port", None) or free_port()
        directory.mkdir(exist_ok=True)
        self.incarnation = incarnation = secrets.token_hex(16)
        per_rank: Callable[[int], dict[str, Any]] = given.pop("per_rank", lambda rank: {})
        self.ranks: list[RankProcess] = []
        for rank in range(size):
            plan = {
                "rank": rank,
                "world_size": size,
                "directory": str(directory),
                "prefix": "model",
                "ttp": f"127.0.0.1:{self.port}",
                "replicas": "all",
                "incarnation": incarnation,
                "options": QUICK,
                "save_steps": 0,
                "hold_saves": False,
                "elements": 1000,
                "largest_file": None,
            }
            plan |= given | per_rank(rank)
            stderr = directory.with_name(f"{directory.name}-{incarnation[:4]}-{rank}.txt")
            self.ranks.append(RankProcess(rank, plan, stderr))

    def begin(self) -> list[list[Any]]:
        """Wait until it is protected; what each rank began with."""
        began = [rank.hear("began") for rank in self.ranks]
        for rank in self.ranks:
            rank.hear("ready")
        return began

    def steps(self, count: int, *ranks: int) -> None:
        """So many steps in lockstep, of all ranks or of those given."""
        chosen = [self.ranks[rank] for rank in ranks] or self.ranks
        for _ in range(count):
            for rank in chosen:
                rank.tell("step")
            for rank in chosen:
                rank.hear("step")

    def tell(self, command: str, *ranks: int) -> None:
        for rank in [self.ranks[rank] for rank in ranks] or self.ranks:
            rank.tell(command)

    def codes(self) -> list[int]:
        return [rank.code() for rank in self.ranks]

    # -- the controller -------------------------------------------------------------------------------

    def controllers(self) -> list[int]:
        """Process ids of those that came to listen, oldest first."""
        log = self.directory / ".swansong" / "controller.log"
        text = log.read_text() if log.exists() else ""
        return [
            int(pid) for pid in re.findall(rf"controller (\d+): listens on 127.0.0.1:{self.port}\n", text)
        ]

    def ask(self, request: OperatorRequest) -> Answer:
        token = read_token(self.directory / FILE_NAME)
        return ask(resolve("127.0.0.1", self.port), token, request, timeout_s=PATIENCE_S)

    # -- what is left ---------------------------------------------------------------------------------

    def incident(self) -> dict[str, Any]:
        """The report of the only incident, once it is there."""
        incidents = self.directory / ".swansong" / "incidents"
        until(lambda: incidents.is_dir() and list(incidents.glob("*.json")))
        (path,) = incidents.glob("*.json")
        report: dict[str, Any] = json.loads(path.read_text())
        return report

    def incidents(self) -> int:
        return len(list((self.directory / ".swansong" / "incidents").glob("*.json")))

    def recorders(self) -> list[str]:
        """Names of the flight recorders on this host."""
        return [path.name for path in SHARED_MEMORY.glob(f"swansong-*-{self.incarnation}/*")]

    def checkpoints(self) -> list[Found]:
        """Newest first."""
        return catalog.scan(self.directory)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for pid in self.controllers():
            try:
                until(lambda pid=pid: not running(pid))  # type: ignore[misc]
            except AssertionError:
                os.kill(pid, signal.SIGKILL)
                raise
        for left in SHARED_MEMORY.glob(f"swansong-*-{self.incarnation}"):
            shutil.rmtree(left)  # where ranks and controller were killed, it would be the next start's to do


def running(pid: int) -> bool:
    """True if a process is there, and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] != "Z"


@contextmanager
def job(directory: Path, size: int, **given: Any) -> Iterator[Job]:
    """A job that is protected; at the end nothing of it is left."""
    started = Job(directory, size, **given)
    try:
        yield started
    finally:
        started.close()


def values(path: Path, name: str = "weights") -> set[float]:
    """The different elements of a stored array, read and verified."""
    with open_checkpoint(path) as checkpoint:
        return {float(value) for value in checkpoint.read(name).array.reshape(-1)}


def trained(step: int) -> float:
    """What every element is after so many steps."""
    return float(sum(range(1, step + 1)))
