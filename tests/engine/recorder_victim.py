"""Writes a flight recorder until it is killed; started by test_recorder_killed.

Reads lines "DIRECTORY NUMBER" and for each forks a victim, kills it after a random moment, and answers with
what the victim had acknowledged. One process for all, since starting Python takes longer than a victim lives.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from swansong.engine.clock import Gate, UpdateClock
from swansong.engine.recorder import Recorder, RecorderOptions

SLOT = 256 * 1024
KEYS = ("a", "b")
ACKNOWLEDGED = ("boundary", "provisional", "begun", "done")


def payload(kind: str, step: int) -> bytes:
    """What the victim writes: its size and all its bytes follow from the step."""
    block = struct.pack("<q", step) * 512 + kind.encode()
    return block * (1 + step * 7 % (SLOT // len(block)))


def write_for_ever(directory: Path, number: int, says: Callable[[str, int], None]) -> None:
    """A training loop that does nothing but record."""
    options = RecorderOptions(directory=directory, slot_bytes=SLOT)
    recorder = Recorder.create(options, job="killed", incarnation=f"i{number}", rank=0, keys=KEYS)
    clocks = [UpdateClock(key, cells=recorder.cells(key)) for key in KEYS]
    gate = Gate(lease_s=30.0)
    step = 0
    while True:
        step += 1
        recorder.set_phase(f"step {step}")
        recorder.write_provisional(step, payload("provisional", step))
        says("provisional", step)
        gate.enter(clocks)
        for clock in clocks:
            says("begun", step)
            with clock.window():
                pass
        says("done", step)
        recorder.write_boundary(step, payload("boundary", step))
        says("boundary", step)


def kill_one(directory: Path, number: int) -> dict[str, int]:
    """Fork a victim, kill it within 6 ms of its third boundary, and return what it had acknowledged."""
    shared = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    ready, ready_end = os.pipe()

    def says(what: str, step: int) -> None:
        shared[ACKNOWLEDGED.index(what)] = step
        if what == "boundary" and step == 3:
            os.write(ready_end, b"!")

    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(directory, number, says)
        finally:
            os._exit(1)
    os.read(ready, 1)
    # The moment of the kill: a poll without descriptors is a timer in fractions of a millisecond.
    select.select([], [], [], random.Random(number).random() * 0.006)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(ready)
    os.close(ready_end)
    return {
        "pid": pid,
        "ended": os.waitstatus_to_exitcode(status),
        **dict(zip(ACKNOWLEDGED, shared.tolist(), strict=False)),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        place, count = line.split()
        print(json.dumps(kill_one(Path(place), int(count))), flush=True)
