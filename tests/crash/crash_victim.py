"""Saving processes that wait to be killed. See test_kill.

    python -m crash.crash_victim

reads one order a line (JSON, the fields of Order) from its standard input. For each it forks a process that
saves twice; the second save stops when it leaves the wanted phase. What happens is reported line by line on
standard output: "pid N", "returned N" (a save has), "phase" (the wanted one has begun), "stopped" (it is
over, or the wanted number of its calls is), "dead STATUS".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from crash.crash_mutants import is_temporary
from crash.crash_recorder import Recorder
from crash.crash_scenarios import DIRECTORY, SERIES, Scenario
from swansong.policy.keep import KeepLast
from swansong.store.background import Background
from swansong.store.checkpoint import Container, Saved
from swansong.store.series import Series

PHASES = ("before", "data", "manifest", "rename", "prune")
LIFETIME_S = 60
"""A victim that nobody kills ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a victim is to do."""

    root: str
    container: Container
    overwrite: bool
    """The second save is under the first one's name; otherwise the first one is pruned."""
    asynchronous: bool
    phase: str
    calls: int | None
    """Stop before this call of the phase (from 1); None: run to the end of the phase."""

    @property
    def scenario(self) -> Scenario:
        """The saves: some megabytes each, so that a kill may fall into the writing."""
        suffix = "" if self.container == "directory" else ".ckpt"
        names = ("net-1_1", "net-1_1" if self.overwrite else "net-1_2")
        return Scenario(
            names=tuple(name + suffix for name in names),
            container=self.container,
            rest=self.container == "ckpt",
            rows=10_000,
            keep=KeepLast(1),
        )


class Victim(Recorder):
    """Announces the wanted phase of a save and does not get beyond it."""

    def __init__(self, order: Order) -> None:
        super().__init__(Path(order.root))
        self.armed = False
        self._order = order
        self._phase = "before"
        self._calls = 0

    def before(self, call: str, path: str) -> None:
        if not self.armed:
            return
        self._phase = _next(self._phase, call, path)
        if self._phase == self._order.phase:
            self._calls += 1
            if self._calls == 1:
                report("phase")
            if self._calls == self._order.calls:
                stop()
        elif PHASES.index(self._phase) > PHASES.index(self._order.phase):
            stop()


def _next(phase: str, call: str, path: str) -> str:
    """The phase that a call belongs to, given that of the call before it."""
    if phase == "before" and call in ("create", "make_directory") and is_temporary(path):
        return "data"
    if phase == "data" and call == "create" and path.endswith(".json"):
        return "manifest"
    if phase == "manifest" and call == "rename":
        return "rename"
    if phase == "rename" and call in ("unlink", "lock"):
        return "prune"
    return phase


def report(what: str) -> None:
    """One line for whoever kills; short enough to be written in one piece."""
    os.write(sys.stdout.fileno(), f"{what}\n".encode())


def stop() -> None:
    """Do nothing more."""
    report("stopped")
    while True:
        time.sleep(LIFETIME_S)


def be_killed(order: Order) -> None:
    """Save twice."""
    scenario, files = order.scenario, Victim(order)
    series = Series.fresh(Path(order.root) / DIRECTORY, SERIES, files)
    scenario.save(series, 1, scenario.names[0])
    report("returned 1")
    files.armed = True

    def save() -> Saved:
        saved = scenario.save(series, 2, scenario.names[1])
        report("returned 2")
        series.prune(scenario.keep, saved.id)
        return saved

    if order.asynchronous:
        background = Background[Saved]("saver")
        background.start(save)
        background.wait()
    else:
        save()
    stop()


def main() -> None:
    """Fork a victim for each order, and see it die."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIFETIME_S)
            report(f"pid {os.getpid()}")
            try:
                be_killed(Order(**json.loads(line)))
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        report(f"dead {status}")


if __name__ == "__main__":
    main()
