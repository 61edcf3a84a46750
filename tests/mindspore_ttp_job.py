"""Jobs of MindSpore processes under protection: their ranks, and what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from array_job import free_port, running, until

SCRIPT = Path(__file__).with_name("mindspore_ttp_rank.py")
PATIENCE_S = 100.0
QUICK: dict[str, Any] = {"exit_grace_s": 2.0, "freeze_timeout_s": 1.0, "settle_timeout_s": 1.0}


class RankProcess:
    """A process, and what it says on both streams."""

    def __init__(self, plan: dict[str, Any], environment: dict[str, str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(plan)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parent), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[list[Any]] = []
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(json.JSONDecodeError):  # MindSpore writes to standard output, too
                said = json.loads(line)
                if isinstance(said, list):
                    self.said.append(said)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)

    def last(self, what: str) -> list[Any] | None:
        """What was said of something last, or None."""
        return next((said[1:] for said in reversed(self.said) if said[:1] == [what]), None)

    def code(self) -> int:
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(5)
        return code

    def errors(self) -> str:
        return "".join(self._errors)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Job:
    """One start of a job of `size` ranks; `ranks` are in the order of MindSpore's own numbers."""

    def __init__(self, directory: Path, size: int, **given: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.size, self.port = directory, size, given.pop("port", None) or free_port()
        plan: dict[str, Any] = {
            "directory": str(directory),
            "port": self.port,
            "mode": "pynative",
            "size": size,
            "fault": None,
            "epochs": 3,
            "options": QUICK,
            "key": None,
            "every": 100,
            "reference": False,
        }
        plan |= given
        self.scheduler: RankProcess | None = None
        common: dict[str, str] = {}
        if size > 1:
            common = {
                "MS_WORKER_NUM": str(size),
                "MS_SCHED_HOST": "127.0.0.1",
                "MS_SCHED_PORT": str(free_port()),
            }
            self.scheduler = RankProcess(plan, common | {"MS_ROLE": "MS_SCHED"}, directory)
        roles = [{"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(n)} if size > 1 else {} for n in range(size)]
        self._started = [RankProcess(plan, common | role, directory) for role in roles]

    @property
    def ranks(self) -> list[RankProcess]:
        ends = time.monotonic() + PATIENCE_S
        while not all(one.last("rank") or one.process.poll() is not None for one in self._started):
            assert time.monotonic() < ends, "the ranks did not find each other"
            time.sleep(0.05)
        return sorted(self._started, key=lambda one: one.last("rank") or [99])

    def codes(self) -> list[int]:
        return [rank.code() for rank in self.ranks]

    def close(self) -> None:
        for one in [*self._started, *([self.scheduler] if self.scheduler else [])]:
            one.close()
        log = self.directory / "ttp" / ".swansong" / "controller.log"
        text = log.read_text() if log.exists() else ""
        pids = [int(pid) for pid in re.findall(r"controller (\d+):", text)]
        for pid in set(pids):
            until(lambda pid=pid: not running(pid))  # type: ignore[misc]


@contextmanager
def job(directory: Path, size: int, **given: Any) -> Iterator[Job]:
    """A job of which nothing is left at the end."""
    started = Job(directory, size, **given)
    try:
        yield started
    finally:
        started.close()
