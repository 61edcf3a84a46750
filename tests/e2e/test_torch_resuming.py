"""What PyTorch jobs resume from, and when they do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from array_job import QUICK
from swansong.store.catalog import Found
from torch_job import TorchJob, Zygote, fault, torch_job
from torch_logs import differing, starts


@pytest.fixture
def two_checkpoints(tmp_path: Path, zygote: Zygote) -> list[Found]:
    """Of steps 6 and 4, newest first."""
    with torch_job(tmp_path, fault("throw", "begin", 7, 1), zygote=zygote, save_steps=4) as run:
        run.codes()
        run.incident()
    assert run.steps() == [(6, "fault"), (4, "periodic")]
    return run.checkpoints()


def damage(found: Found, how: str) -> None:
    """In its largest file."""
    path = max(found.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.chmod(0o600)
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        os.truncate(path, path.stat().st_size - 1)
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


def resumed(tmp_path: Path, zygote: Zygote, start: int) -> TorchJob:
    with torch_job(tmp_path, zygote=zygote, start=start) as run:
        run.codes()
    return run


def test_a_damaged_newest_checkpoint_is_used_by_no_rank_and_named(
    tmp_path: Path, zygote: Zygote, undisturbed: Any, two_checkpoints: list[Found]
) -> None:
    newest, older = two_checkpoints
    damage(newest, "one bit")
    run = resumed(tmp_path, zygote, 1)

    assert run.codes() == [0] * 3
    assert [start.step for start in starts(run.logs())] == [4]
    assert differing(undisturbed(), run.logs()) == []
    assert str(newest.path) in run.errors(0)

    damage(older, "missing")
    for found in run.checkpoints():
        if found.path not in (newest.path, older.path):
            damage(found, "cut off")
    refused = resumed(tmp_path, zygote, 2)
    assert refused.codes() == [1] * 3
    assert "DamagedError: there are checkpoints, but none can be used" in refused.errors(0)
    assert starts(refused.logs()) == [], "never a silent start at step 0"


def test_the_same_exception_at_one_step_again_and_again_stops_every_rank(
    tmp_path: Path, zygote: Zygote
) -> None:
    options = QUICK | {"crash_loop_limit": 2}
    for number in range(2):
        planned = fault("throw", "begin", 4, 1, start=number)
        with torch_job(tmp_path, planned, zygote=zygote, size=2, options=options, start=number) as run:
            assert run.codes()[1] == 1
            run.reports(number + 1)
    with torch_job(tmp_path, zygote=zygote, size=2, options=options, start=2) as refused:
        assert refused.codes() == [1, 1]

    for rank in range(2):
        assert "2 times in a row after step 3" in refused.errors(rank)
        assert "ValueError: this batch is no good" in refused.errors(rank)
