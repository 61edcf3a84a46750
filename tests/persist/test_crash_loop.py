"""When a job that fails in the same way again and again is not resumed, by the reports of its incidents."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from swansong.persist import crash_loop, incidents, job, places
from swansong.persist.crash_loop import Ending, Failure, find, look_for
from swansong.persist.incidents import document
from swansong.persist.job import JobFacts, SeriesFacts
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.messages import Fault, FaultKind, Outcome
from swansong.store.files import Files
from swansong.store.series import Series

BAD = Failure("ValueError: bad batch", 7)
LOST = Failure("lost", 7)
OTHER = Failure("OSError: no such file", 7)


def row(*latest_first: tuple[Failure, ...]) -> list[Ending]:
    return [Ending(f"report {number}", failures) for number, failures in enumerate(latest_first)]


# -- the decision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latest_first", "found"),
    [
        ([(BAD,), (BAD,), (BAD,)], BAD),
        ([(BAD,), (BAD,), (BAD,), (OTHER,)], BAD),
        ([(LOST, OTHER), (LOST, BAD), (BAD, LOST)], LOST),
        ([(BAD,), (BAD,)], None),
        ([(BAD,), (BAD,), (OTHER,), (BAD,)], None),
        ([(BAD,), (BAD,), (BAD._replace(step=6),)], None),
        ([(BAD,), (), (BAD,), (BAD,)], None),
        ([(), (BAD,), (BAD,), (BAD,)], None),
        ([(BAD,), (BAD, OTHER), (OTHER,)], None),
        ([], None),
    ],
    ids=[
        "three times",
        "what was before does not matter",
        "one failure in common",
        "twice",
        "another failure between",
        "another step",
        "a good end between",
        "a good end last",
        "in common with the next only",
        "no ends",
    ],
)
def test_the_same_failure_at_the_same_step_in_a_row(
    latest_first: list[tuple[Failure, ...]], found: Failure | None
) -> None:
    loop = find(row(*latest_first), step=7, limit=3)
    assert (loop and (loop.what, loop.step)) == found
    if loop is not None:
        assert loop.reports == ("report 0", "report 1", "report 2")


@pytest.mark.parametrize(("step", "is_loop"), [(0, True), (7, True), (8, False)])
def test_a_step_that_was_left_behind_is_no_crash_loop(step: int, is_loop: bool) -> None:
    assert (find(row((BAD,), (BAD,)), step=step, limit=2) is not None) is is_loop


def test_no_more_reports_are_taken_than_needed() -> None:
    ends = iter(row((BAD,), (BAD,), (BAD,)))
    assert find(ends, step=0, limit=2) is not None
    assert len(list(ends)) == 1


# -- the reports ------------------------------------------------------------------------------------------


class Reports:
    """Reports of incidents as a controller writes them, each later than the one before."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._numbers = directory, count(1)
        places.incident_file(directory, "x").parent.mkdir(parents=True)

    def add(self, *faults: Fault, run: str = "", stem: str = "model", **ranks: Any) -> Path:
        """One incident, of a start of its own unless `run` says of which; `r0=(boundary, step)` and so on."""
        number = next(self._numbers)
        reports = {
            int(rank[1:]): m.StateReport(
                incident="i", held={"key": Held(step)}, settled=True, boundary=boundary, main=""
            )
            for rank, (boundary, step) in ranks.items()
        }
        report = m.Report(
            incident=f"i-{number}",
            faults=faults,
            outcome=Outcome.NOTHING,
            step=None,
            path="",
            reason="",
            reports=reports,
            savers={},
            notes=(),
            seconds={},
        )
        run = run or f"run {number}"
        data = document(report, {}, inexact=(), resume_command="", stem=stem, run=run)
        return self.write(f"i-{number}", data, number)

    def write(self, name: str, data: bytes, number: int | None = None) -> Path:
        path = places.incident_file(self.directory, name)
        path.write_bytes(data)
        self.date(path, number)
        return path

    def date(self, path: Path, number: int | None = None) -> None:
        number = next(self._numbers) if number is None else number
        os.utime(path, ns=(number, number))

    def loop(self, *, step: int = 0, limit: int = 2) -> crash_loop.CrashLoop | None:
        return look_for(self.directory, "model", step=step, limit=limit)


@pytest.fixture
def reports(tmp_path: Path) -> Reports:
    return Reports(tmp_path)


def raised(what: str = "ValueError: bad", step: int | None = 7, rank: int = 0) -> Fault:
    return Fault(kind=FaultKind.RAISED, rank=rank, what=what, step=step)


def lost(rank: int = 1) -> Fault:
    return Fault(kind=FaultKind.LOST, rank=rank, what=f"its process ended, rank {rank}")


def other(kind: FaultKind) -> Fault:
    return Fault(kind=kind, rank=0, what="", step=7)


def test_the_same_exception_on_whatever_rank_is_named_with_its_reports_latest_first(reports: Reports) -> None:
    paths = [str(reports.add(raised(rank=rank))) for rank in (0, 2, 1)]
    loop = reports.loop(limit=3)
    assert loop is not None
    assert (loop.what, loop.step, loop.reports) == ("ValueError: bad", 7, tuple(reversed(paths)))


@pytest.mark.parametrize(
    ("second", "is_loop"),
    [
        ({"r0": (None, 7)}, True),
        ({"r0": (7, 7), "r3": (6, 7)}, True),
        ({"r0": (8, 8), "r2": (7, 7)}, True),
        ({"r0": (8, 8)}, False),
        ({"r0": (None, None)}, False),
        ({}, False),
    ],
    ids=[
        "resumed at it",
        "newest of several",
        "by its own record",
        "one further",
        "in the middle of an update",
        "nobody is left",
    ],
)
def test_a_loss_is_at_the_step_of_what_was_lost_or_of_those_that_remain(
    reports: Reports, second: dict[str, Any], is_loop: bool
) -> None:
    reports.add(lost(1), r0=(7, 7))
    reports.add(lost(2), **second)
    assert (reports.loop() is not None) is is_loop


@pytest.mark.parametrize("kind", [FaultKind.SIGNALLED, FaultKind.REQUESTED, FaultKind.STALLED])
def test_other_ends_interrupt_the_row(reports: Reports, kind: FaultKind) -> None:
    reports.add(raised())
    reports.add(other(kind))
    reports.add(raised())
    assert reports.loop() is None


def test_what_follows_somebody_s_wish_is_no_failure_but_what_follows_a_stall_is(reports: Reports) -> None:
    for kind in (FaultKind.SIGNALLED, FaultKind.STALLED, FaultKind.STALLED):
        assert reports.loop() is None
        reports.add(other(kind), raised())
    assert reports.loop() is not None


def test_only_the_last_incident_of_each_start_counts(reports: Reports) -> None:
    for run in ("a", "b"):
        reports.add(other(FaultKind.STALLED), run=run)
        reports.add(raised(), run=run)
    assert reports.loop() is not None
    reports.add(raised(step=9), run="b")
    assert reports.loop() is None


def test_another_series_does_not_count(reports: Reports) -> None:
    reports.add(raised())
    reports.add(raised(), stem="other")
    assert reports.loop() is None
    reports.add(raised())
    assert reports.loop() is not None


def test_without_a_limit_or_a_directory_there_is_no_loop(tmp_path: Path, reports: Reports) -> None:
    for _ in range(3):
        reports.add(raised())
    assert reports.loop(limit=0) is None
    assert look_for(tmp_path / "none", "model", step=0, limit=1) is None


def test_the_kernel_s_race_after_a_kill_does_not_hide_a_crash_loop(reports: Reports) -> None:
    def gloo(port: int, rank: int) -> Fault:
        return raised(
            f"RuntimeError: pair.cc:553] Connection closed by peer [10.0.0.{port % 9}]:{port}", rank=rank
        )

    steps = {"r0": (7, 7), "r2": (7, 7)}
    for faults in (
        (lost(1), gloo(5000, 0)),
        (gloo(41234, 2), lost(1), gloo(5003, 0)),
        (gloo(777, 0), gloo(778, 2), lost(1)),
    ):
        assert reports.loop(limit=3) is None
        reports.add(*faults, **steps)
    loop = reports.loop(limit=3)
    assert loop is not None
    assert (loop.what, loop.step) == ("a rank's process was lost", 7), "what began it is said"
    reports.add(gloo(5004, 0), **steps)
    loop = reports.loop(limit=4)
    assert loop is not None, "that a rank was lost may become known too late"
    assert loop.what == "RuntimeError: pair.cc:553] Connection closed by peer <address>"


@pytest.mark.parametrize(
    ("second", "is_loop"),
    [
        ((raised("ValueError: bad"), raised("OSError: broken pipe", rank=2)), True),
        ((raised("ValueError: worse"), raised("OSError: broken pipe", rank=2)), False),
        ((raised("OSError: broken pipe", rank=2), raised("ValueError: worse")), True),
        ((raised("OSError: broken pipe", rank=2),), True),
    ],
    ids=["the same", "another exception", "another exception, later", "no other exception"],
)
def test_what_an_exception_did_to_the_others_makes_no_two_ends_alike(
    reports: Reports, second: tuple[Fault, ...], is_loop: bool
) -> None:
    reports.add(raised("OSError: broken pipe", rank=2), raised("ValueError: bad"))
    reports.add(*second)
    assert (reports.loop() is not None) is is_loop


def test_a_rank_without_a_record_was_lost_at_the_step_that_it_had_reported(reports: Reports) -> None:
    for newest in (7, 8):
        reports.add(Fault(kind=FaultKind.LOST, rank=3, step=7), r0=(newest, newest))
    loop = reports.loop()
    assert loop is not None
    assert loop.step == 7


def test_a_report_names_what_began_it_and_lists_all_in_the_order_of_arrival(reports: Reports) -> None:
    broken = raised("RuntimeError: Connection closed by peer [127.0.0.1]:38251", rank=0)
    written = json.loads(reports.add(broken, lost(1)).read_bytes())
    assert (written["kind"], written["first_fault"]["rank"]) == ("lost", 1)
    assert [fault["rank"] for fault in written["faults"]] == [0, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 1_000_000,
        b"\xff" * 100,
        b"[]",
        b'{"stem": "model", "run": "x", "faults": 1, "ranks": []}',
        b'{"stem": "model", "run": "x", "faults": [{"kind": "raised", "rank": 0, "step": "7"}], "ranks": []}',
    ],
    ids=["empty", "cut off", "deep", "no text", "no object", "no list of faults", "no number"],
)
def test_what_is_no_report_is_passed_over(reports: Reports, data: bytes) -> None:
    reports.add(raised())
    reports.write("odd", data)
    reports.add(raised())
    loop = reports.loop()
    assert loop is not None
    assert len(loop.reports) == 2


def test_what_is_no_file_of_a_sensible_size_is_not_read(reports: Reports, tmp_path: Path) -> None:
    first = reports.add(raised())
    pipe, link, huge = (places.incident_file(tmp_path, name) for name in ("pipe", "link", "huge"))
    os.mkfifo(pipe)
    link.symlink_to(first)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    reports.date(huge)
    reports.add(raised())
    loop = reports.loop()
    assert loop is not None
    assert len(loop.reports) == 2


def test_a_flood_of_reports_is_not_read_to_its_end(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    reports.add(raised())
    reports.add(raised())
    for number in range(crash_loop.LOOKED_AT):
        reports.write(f"odd-{number}", b"{")
    assert reports.loop() is None
    for number in range(crash_loop.LOOKED_AT):
        places.incident_file(reports.directory, f"odd-{number}").unlink()
    assert reports.loop() is not None
    monkeypatch.setattr(crash_loop, "BYTES_READ", 100)
    assert reports.loop() is None


# -- what is told -----------------------------------------------------------------------------------------


def test_all_ranks_are_told_the_same(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path / "c", "model", Files())
    loop = crash_loop.CrashLoop(what="ValueError: bad", step=7, reports=tuple(f"r{n}" for n in range(12)))
    facts = JobFacts(world_size=2, series=SeriesFacts.of(series), checkpoint=None, step=7, crash_loop=loop)
    job.announce(series.directory, bytes(16), facts, Files())
    learned = job.learn(series.directory, bytes(16), timeout_s=1.0).crash_loop
    assert learned == loop

    error = learned.error()
    assert (error.step, error.reports) == (7, loop.reports)
    for said in ("12 times in a row after step 7", "ValueError: bad", "crash_loop_limit", "r9", "and 2 more"):
        assert said in str(error)


def test_a_report_has_what_is_looked_for(reports: Reports) -> None:
    written = json.loads(reports.add(raised(), run="r").read_bytes())
    assert (written["stem"], written["run"]) == ("model", "r")
    assert written.keys() >= incidents.KEYS
