"""A process that is killed at any moment leaves a flight recorder that says where it stood."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.recorder_victim import SLOT, payload
from swansong.engine.record_places import place_of
from swansong.engine.recorder_reading import Recorded, read_recorder, sweep_recorders
from swansong.engine.slots import Record, slot_size

KILLS = 150
TORN = 10
"""So many kills at least must hit a write, or this shows nothing; a busy machine takes more kills."""
TESTS = Path(__file__).parent.parent


def test_every_kill_leaves_the_last_two_boundaries_readable(tmp_path: Path) -> None:
    torn = number = 0
    with subprocess.Popen(
        [sys.executable, "-m", "engine.recorder_victim"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        while number < KILLS or (torn < TORN and number < 10 * KILLS):
            nursery.stdin.write(f"{tmp_path} {number}\n")
            nursery.stdin.flush()
            said = json.loads(nursery.stdout.readline())
            path = place_of(tmp_path, job="killed", incarnation=f"i{number}", rank=0)
            recorded = read_recorder(path)
            judge(recorded, said, number)
            torn += being_written(path)
            assert sweep_recorders(tmp_path, job="killed", keep="next") == [path.parent]
            number += 1
        nursery.stdin.close()
    assert torn >= TORN


def judge(recorded: Recorded, said: dict[str, int], number: int) -> None:
    """What is recorded is what was acknowledged, or one act further."""
    where = f"kill {number}: {said}"
    assert said["ended"] == -9, where
    assert recorded.whose.pid == said["pid"], where
    newest, older = recorded.boundaries
    assert newest.step in (said["boundary"], said["boundary"] + 1), where
    assert older.step == newest.step - 1, where
    for record in recorded.boundaries:
        assert record.payload == payload("boundary", record.step), where
    check_provisional(recorded.provisional, newest.step, said, where)
    for reading in recorded.clocks.values():
        assert said["done"] <= reading.done <= reading.begun <= reading.queued <= said["provisional"], where
        assert reading.begun <= said["begun"], where
    assert recorded.phase.startswith("step "), where
    assert int(recorded.phase[5:]) in (said["provisional"], said["provisional"] + 1), where
    assert len(recorded.boundary_times) in (
        min(128, newest.step),
        min(128, newest.step - 1),
    ), where
    assert list(recorded.boundary_times) == sorted(recorded.boundary_times), where


def check_provisional(record: Record | None, boundary: int, said: dict[str, int], where: str) -> None:
    """There is one exactly if it was written after the newest boundary; it is of the step to come."""
    if record is None:
        assert said["provisional"] <= boundary, where
        return
    assert record.step == boundary + 1, where
    assert record.step in (said["provisional"], said["provisional"] + 1), where
    assert record.payload == payload("provisional", record.step), where


def being_written(path: Path) -> bool:
    """True if some slot has number 0, though all four were written before: a write was under way."""
    content = path.read_bytes()
    start = len(content) - 4 * slot_size(SLOT)
    start -= start % 4096
    return any(content[start + n * slot_size(SLOT) :][:8] == bytes(8) for n in range(4))


@pytest.mark.parametrize("kind", ["boundary", "provisional"])
def test_payloads_of_the_victim_differ_from_step_to_step(kind: str) -> None:
    assert len({payload(kind, step) for step in range(1, 50)}) == 49
    assert max(len(payload(kind, step)) for step in range(1, 500)) <= SLOT
