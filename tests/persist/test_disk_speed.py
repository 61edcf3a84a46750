"""Whether a state can be written within a launcher's budget: the decision, the measurement, the warning."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from swansong.errors import DiskFullError
from swansong.persist import disk_speed
from swansong.persist.disk_speed import SLOW, SpeedCheck, bytes_of_a_host, too_slow
from swansong.protocol.messages import ComponentEntry, Member
from swansong.protocol.options import ProtocolOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.workspace import Workspace

TORCHRUN = ProtocolOptions.within(25.0)
GB = 10**9


def member(rank: int, host: str, **components: int) -> Member:
    entries = tuple(ComponentEntry(key=key, label=key, nbytes=nbytes) for key, nbytes in components.items())
    return Member(rank=rank, host=host, pid=1, start_time=1, components=entries)


@pytest.mark.parametrize(
    ("world", "most"),
    [
        ([member(rank, "a", model=10) for rank in range(4)], 10),
        ([member(0, "a", x=10), member(1, "a", y=7), member(2, "a", x=10)], 17),
        ([member(0, "a", x=10), member(1, "b", y=7)], 10),
        ([member(0, "a", x=6, y=5), member(1, "b", x=6, y=5)], 6),
    ],
    ids=["replicas: written once", "two savers on a host", "two hosts", "spread over hosts"],
)
def test_of_what_is_to_be_written_the_part_of_the_busiest_host_counts(world: list[Member], most: int) -> None:
    assert bytes_of_a_host(world) == most


def test_of_the_budget_of_torchrun_19_seconds_are_left_for_writing() -> None:
    assert TORCHRUN.writing_s == pytest.approx(19.0)


def test_a_state_that_takes_too_long_is_warned_of_with_what_counts() -> None:
    warning = too_slow(40 * GB, 2.0 * GB, TORCHRUN)
    assert warning is not None
    for said in (
        "40,000,000,000 bytes",
        "20.0 s",
        "2,000 MB/s",
        "budget of 25 s",
        "only 19.0 s",
        "faster disk",
    ):
        assert said in warning


@pytest.mark.parametrize(
    ("nbytes", "options"),
    [(38 * GB, TORCHRUN), (0, TORCHRUN), (10**6 * GB, ProtocolOptions())],
    ids=["just in time", "nothing", "no budget"],
)
def test_a_state_that_can_be_written_is_not_warned_of(nbytes: int, options: ProtocolOptions) -> None:
    assert too_slow(nbytes, 2.0 * GB, options) is None


@pytest.mark.parametrize("key", [None, Key(bytes(32))], ids=["plain", "encrypted"])
def test_a_measurement_leaves_nothing_behind(tmp_path: Path, key: Key | None) -> None:
    space = Workspace(tmp_path / "c", Files())
    space.prepare()
    assert disk_speed.measure(space, key) > 0
    assert list(space.temporary.iterdir()) == []


def checked(
    nbytes: int, *, speed: float | Exception, options: ProtocolOptions = TORCHRUN
) -> tuple[int, list[str]]:
    """How often it was measured, and what was said, in a job that is complete at the second look."""
    measured: list[float] = []
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def measure() -> float:
        measured.append(1.0)
        if isinstance(speed, Exception):
            raise speed
        return speed

    check = SpeedCheck(options, measure, said.put)
    check.look(())
    assert measured == []
    for _ in range(3):
        check.look([member(0, "a", model=nbytes)])
    check.close()
    return len(measured), [said.get() for _ in range(said.qsize())]


def test_the_speed_is_measured_once_and_warned_of() -> None:
    times, (warning,) = checked(100 * GB, speed=1.0 * GB)
    assert (times, "100.0 s" in warning) == (1, True)


@pytest.mark.parametrize(
    ("nbytes", "options", "times"),
    [(19 * SLOW, TORCHRUN, 0), (20 * SLOW, TORCHRUN, 1), (100 * GB, ProtocolOptions(), 0)],
    ids=["so small that any disk does", "fast enough", "no budget"],
)
def test_nothing_is_said_where_there_is_time(nbytes: int, options: ProtocolOptions, times: int) -> None:
    assert checked(nbytes, speed=10.0 * GB, options=options) == (times, [])


def test_a_disk_that_cannot_be_measured_is_said(tmp_path: Path) -> None:
    _, (warning,) = checked(100 * GB, speed=DiskFullError("no space", needed=1, free=0))
    assert "100,000,000,000 bytes" in warning
    assert "no space" in warning
