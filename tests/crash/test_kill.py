"""SIGKILL at random moments of each phase of a save, in real processes.

Unlike a power cut, a kill loses nothing that was done; but it stops in the middle of a call, and takes no
notice of locks, threads and `finally`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from crash.crash_judge import Judge
from crash.crash_places import directory_in_memory
from crash.crash_victim import PHASES, Order

SEED = 31415
TESTS = Path(__file__).parent.parent
KILLS = 12
"""In each phase, half of them while a name is overwritten; half at the end of a call, half at any time."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """The process that forks the victims."""
    with subprocess.Popen(
        [sys.executable, "-m", "crash.crash_victim"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_kill_leaves_the_last_good_checkpoint_and_the_next_save_works(
    phase: str, asynchronous: bool, nursery: subprocess.Popen[str]
) -> None:
    chance = random.Random(f"{SEED} {phase} {asynchronous}")
    begun = 0
    for number in range(KILLS):
        with directory_in_memory() as root:
            order = Order(
                root=str(root),
                container="ckpt" if number // 2 % 2 else "directory",
                overwrite=number % 2 == 0,
                asynchronous=asynchronous,
                phase=phase,
                calls=chance.randint(1, 6) if number // 4 % 2 else None,
            )
            jitter_s = 10 ** chance.uniform(-5, -2.5)
            reports = kill(nursery, order, jitter_s)
            returned = max(int(line.split()[1]) for line in reports if line.startswith("returned"))
            begun += "phase" in reports
            assert returned == 1 or phase == "prune"
            assert f"dead {int(signal.SIGKILL)}" in reports
            judge = Judge(order.scenario, root)
            violations = judge.violations_at(root, returned)
            assert not violations, f"seed {SEED}, kill {number}, after {jitter_s:.6f} s: {order}, {reports}"
    assert begun == KILLS


def kill(nursery: subprocess.Popen[str], order: Order, jitter_s: float) -> list[str]:
    """Have a victim made, kill it in its phase, and return all that was reported of it."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write(json.dumps(asdict(order)) + "\n")
    nursery.stdin.flush()
    reports: list[str] = []
    while not reports or not reports[-1].startswith("dead"):
        line = nursery.stdout.readline()
        assert line, f"the nursery ended: {reports}"
        reports.append(line.strip())
        if reports[-1] == ("phase" if order.calls is None else "stopped"):
            time.sleep(jitter_s)  # not to wait for anything: the moment of death is what varies
            os.kill(pid_of(reports), signal.SIGKILL)
    return reports


def pid_of(reports: list[str]) -> int:
    """The victim's process id."""
    return next(int(line.split()[1]) for line in reports if line.startswith("pid"))
