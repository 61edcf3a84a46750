"""`swansong controller` as a process, for tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from array_job import PATIENCE_S


class ByHand:
    """A controller that was started by hand, and listens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.told: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
        """What it says once it listens; {}: it does not."""

    def code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.code()

    def errors(self) -> str:
        """All that it said, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def by_hand(
    directory: Path, world_size: int, *more: str, incarnation: str, port: int = 0
) -> Iterator[ByHand]:
    """At a port of 127.0.0.1; at the end it is gone."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "swansong.cli", "controller", f"127.0.0.1:{port}", str(directory)]
    command += ["--world-size", str(world_size), "--incarnation", incarnation, "--json", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield ByHand(process)
        finally:
            process.kill()
