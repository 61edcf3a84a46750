"""Boundary records, a rank's own and those of the host's other ranks, dead or alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swansong.engine.recorder import Recorder, RecorderOptions
from swansong.engine.recorders import HostRecorders
from swansong.errors import RecordTooLargeError, SwansongWarning
from swansong.persist.boundary import BoundaryState, Record, pack
from swansong.persist.records import RecordPlaces, Records, recorded_on

INCARNATION = bytes(range(16))


def of(value: object) -> bytes:
    return pack(BoundaryState(own=value))


def told(record: Record | None) -> tuple[int, bool, object] | None:
    state = record.state() if record is not None else None
    return None if record is None or state is None else (record.step, record.provisional, state.own)


def places(directory: Path, **options: object) -> RecordPlaces:
    given = RecorderOptions(directory=directory, slot_bytes=4096, **options)  # type: ignore[arg-type]
    return RecordPlaces.of(given, Path("/checkpoints"), "model", INCARNATION)


def recorder(at: RecordPlaces, rank: int) -> Recorder:
    made = at.create(rank, ["key"], pytest.fail)
    assert made is not None
    return made


@pytest.mark.parametrize("recorded", [True, False], ids=["with recorder", "without"])
def test_the_last_two_boundaries_and_what_came_since_are_kept(tmp_path: Path, recorded: bool) -> None:
    at = places(tmp_path)
    records = Records(2, recorder(at, 0) if recorded else None)
    assert (records.last_step, records.reached, records.best(2)) == (None, 2, None)
    for step in (3, 4, 5):
        records.add_provisional(step, of("to come"))
        records.add(step, of(f"step {step}"))
    records.add_provisional(6, of("to come"))
    expected = {
        3: None,
        4: (4, False, "step 4"),
        5: (5, False, "step 5"),
        6: (6, True, "to come"),
        7: (5, False, "step 5"),
    }
    assert {step: told(records.best(step)) for step in expected} == expected
    if recorded:
        assert {step: told(recorded_on(at.here, step).get(0)) for step in expected} == expected
    assert (records.last_step, records.reached) == (5, 5)


@pytest.mark.parametrize("recorded", [True, False], ids=["with recorder", "without"])
def test_what_was_recorded_before_a_boundary_may_be_all_there_is_to_say_of_it(
    tmp_path: Path, recorded: bool
) -> None:
    at = places(tmp_path)
    records = Records(0, recorder(at, 0) if recorded else None)
    for step in (1, 2, 3):
        records.add_provisional(step, of(f"step {step}"))
        assert told(records.best(step)) == (step, True, f"step {step}")
        records.confirm()
    expected = {1: None, 2: (2, False, "step 2"), 3: (3, False, "step 3")}
    assert {step: told(records.best(step)) for step in expected} == expected
    if recorded:
        assert {step: told(recorded_on(at.here, step).get(0)) for step in expected} == expected
    assert records.reached == 3


def test_nothing_is_confirmed_that_was_not_recorded(tmp_path: Path) -> None:
    records = Records(0, recorder(places(tmp_path), 0))
    with pytest.raises(RuntimeError, match="of which nothing was recorded"):
        records.confirm()


def test_too_large_a_record_is_refused_or_kept_in_ordinary_memory(tmp_path: Path) -> None:
    large = of("x" * 5000)
    with pytest.raises(RecordTooLargeError, match="slots of 4096 bytes"):
        Records(0, recorder(places(tmp_path), 0)).add(1, large)
    at = places(tmp_path, spill=True)
    records = Records(0, recorder(at, 1))
    with pytest.warns(SwansongWarning, match="lost with the process"):
        records.add(1, large)
    assert told(records.best(1)) == (1, False, "x" * 5000)
    assert 1 not in recorded_on(at.here, 1)


def test_rank_that_can_have_no_recorder_goes_on_without_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    assert places(tmp_path / "nowhere").create(3, ["key"], said.append) is None
    (words,) = said
    assert "rank 3 has no flight recorder; if it is killed, its boundary state is lost" in words


def test_job_is_told_by_directory_and_series_and_a_start_by_its_incarnation(tmp_path: Path) -> None:
    options = RecorderOptions(directory=tmp_path)
    ones = {
        RecordPlaces.of(options, Path(directory), series, incarnation).here
        for directory, series, incarnation in [
            ("/a", "model", bytes(16)),
            ("/a", "model", INCARNATION),
            ("/a", "other", bytes(16)),
            ("/b", "model", bytes(16)),
        ]
    }
    assert len(ones) == 4
    assert len({one.job for one in ones}) == 3


DIE = """
import os, sys
from pathlib import Path
from swansong.engine.recorder import RecorderOptions
from swansong.persist.boundary import BoundaryState, pack
from swansong.persist.records import RecordPlaces, Records
at = RecordPlaces.of(RecorderOptions(directory=Path(sys.argv[1]), slot_bytes=4096), Path("/checkpoints"),
                     "model", bytes.fromhex(sys.argv[2]))
records = Records(0, at.create(1, ["key"], print))
records.add(1, pack(BoundaryState(own="one")))
records.add_provisional(2, pack(BoundaryState(own="two")))
os.kill(os.getpid(), 9)
"""


def died(directory: Path, incarnation: bytes = INCARNATION) -> None:
    """Rank 1 of a start, killed in step 2."""
    subprocess.run([sys.executable, "-c", DIE, str(directory), incarnation.hex()], timeout=30, check=False)


def test_a_killed_ranks_records_are_read_by_others_and_swept_when_the_job_is_over(tmp_path: Path) -> None:
    died(tmp_path)
    at = places(tmp_path)
    mine = recorder(at, 0)
    Records(0, mine).add(1, of("mine"))
    found = recorded_on(at.here, 2)
    assert {rank: told(record) for rank, record in found.items()} == {
        0: (1, False, "mine"),
        1: (2, True, "two"),
    }
    assert not at.here.sweep(0.0), "rank 0 lives"
    assert at.here.ranks() == [0, 1]
    mine.remove()
    assert at.here.sweep(0.0)
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_removes_what_is_left_of_the_one_before_and_not_its_own(tmp_path: Path) -> None:
    died(tmp_path)
    died(tmp_path, bytes(16))
    places(tmp_path).here.sweep_former()
    assert places(tmp_path).here.ranks() == [1]
    assert [path.name.split("-")[-1] for path in tmp_path.iterdir()] == [INCARNATION.hex()]


@pytest.mark.parametrize("damage", ["cut", "another rank's", "directory of all"], ids=str)
def test_recorder_that_is_not_whole_or_not_ours_is_none(tmp_path: Path, damage: str) -> None:
    at = places(tmp_path)
    mine = recorder(at, 0)
    Records(0, mine).add(1, of("mine"))
    match damage:
        case "cut":
            os.truncate(mine.path, 5000)
        case "another rank's":
            mine.path.rename(mine.path.with_name("rank-7"))
        case _:
            mine.path.parent.chmod(0o755)
    assert recorded_on(at.here, 1) == {}


def test_no_recorders_are_none(tmp_path: Path) -> None:
    here = HostRecorders(directory=tmp_path, job="job", incarnation="0")
    assert (here.ranks(), here.read(0), recorded_on(here, 1), here.sweep(0.0)) == ([], None, {}, True)
