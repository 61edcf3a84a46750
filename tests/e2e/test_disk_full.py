"""Scenario 24 of real processes: the disk is full when their state is to be saved at a fault."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from array_job import Job, job, trained, until, values

STUCK = 75
ELEMENTS = 1 << 20
NBYTES = 4 * ELEMENTS
"""Of the state."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half. Takes root."""
    place = tmp_path / "small"
    place.mkdir()
    options = f"size={NBYTES * 3 // 2},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "swansong-test", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """Leave no byte free."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def assert_nothing_half_made(run: Job) -> None:
    """The last periodic checkpoint is all there is."""
    (found,) = run.checkpoints()
    assert (found.name, found.state, values(found.path)) == ("model-2", "committed", {trained(2)})
    until(lambda: not list((run.directory / ".swansong" / "tmp").iterdir()))


def assert_resumes_from_the_last_periodic_checkpoint(directory: Path) -> None:
    with job(directory, 4, elements=ELEMENTS) as again:
        assert again.begin() == [[2, trained(2), {"seen": 2}]] * 4
        again.tell("end")
        assert again.codes() == [0] * 4


def test_scenario_24_on_a_disk_that_is_too_small_nothing_half_made_is_left_and_the_lack_is_said(
    small_disk: Path,
) -> None:
    with job(small_disk, 4, elements=ELEMENTS, save_steps=2) as run:
        run.begin()
        run.steps(3)
        run.tell("throw", 1)

        report = run.incident()
        assert (report["outcome"], report["path"], report["savers"]) == ("nothing saved", None, {})
        assert run.ranks[1].code() == 1, "its own exception ends it"
        assert 'raise ValueError("this batch is no good")' in run.ranks[1].errors()
        assert [run.ranks[rank].code() for rank in (0, 2, 3)] == [STUCK] * 3
        for said in (report["reason"], *(rank.errors() for rank in run.ranks)):
            assert "ranks 0, 1, 2, 3 failed to save it" in said
            assert "No space left on device" in said
            assert "bytes were needed" in said
            assert "are free there" in said
        assert_nothing_half_made(run)
    assert_resumes_from_the_last_periodic_checkpoint(small_disk)


def test_scenario_24_on_a_disk_without_a_free_byte_every_rank_still_ends(small_disk: Path) -> None:
    directory = small_disk / "c"  # what the ranks and the controller have to say goes there, too
    with job(directory, 4, elements=ELEMENTS, save_steps=2) as run:
        run.begin()
        run.steps(3)
        filler = fill(small_disk)
        run.ranks[1].send(signal.SIGKILL)

        assert run.codes() == [STUCK, -signal.SIGKILL, STUCK, STUCK]
        assert_nothing_half_made(run)
    filler.unlink()
    assert_resumes_from_the_last_periodic_checkpoint(directory)


def test_scenario_24_a_saver_that_cannot_write_as_much_is_replaced(tmp_path: Path) -> None:
    # A limit of the process stands for a disk of its own, which ranks that share a directory have not.
    limited = {0: NBYTES // 2, 1: None, 2: NBYTES // 2, 3: None}
    with job(
        tmp_path / "c", 4, elements=ELEMENTS, per_rank=lambda rank: {"largest_file": limited[rank]}
    ) as run:
        run.begin()
        run.steps(2)
        run.ranks[1].send(signal.SIGKILL)

        report = run.incident()
        assert (report["outcome"], list(report["savers"].values())) == ("saved", [3])
        for rank, note in zip((0, 2), report["notes"], strict=True):
            assert note.startswith(f"rank {rank}, attempt ")
            assert "File too large; 4,198,400 bytes were needed" in note
        (found,) = run.checkpoints()
        assert (found.name, found.state, values(found.path)) == ("model-2", "committed", {trained(2)})
        until(lambda: not list((tmp_path / "c" / ".swansong" / "tmp").iterdir()))
