"""What the processes of one start of a job tell each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from swansong.errors import ConfigError, LoadError, MalformedError, UnreachableError
from swansong.persist import job, places
from swansong.persist.job import JobFacts, SeriesFacts
from swansong.store.files import Files
from swansong.store.series import Series
from swansong.store.workspace import Workspace

START = bytes(range(16))


def facts(series: Series) -> JobFacts:
    return JobFacts(world_size=4, series=SeriesFacts.of(series), checkpoint=None, step=0)


def test_who_waits_hears_what_rank_0_tells(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path, "model", Files())
    heard: list[JobFacts] = []
    waiting = threading.Thread(target=lambda: heard.append(job.learn(tmp_path, START, timeout_s=30.0)))
    waiting.start()
    job.announce(tmp_path, START, facts(series), Files())
    waiting.join()

    assert heard == [facts(series)]
    assert heard[0].series.series(tmp_path, series.space.files).run == series.run
    assert places.job_file(tmp_path, START).stat().st_mode & 0o777 == 0o600
    job.forget(tmp_path, START, Files())
    assert not places.job_file(tmp_path, START).exists()


def test_another_start_s_facts_are_not_ours(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path, "model", Files())
    job.announce(tmp_path, bytes(16), facts(series), Files())
    with pytest.raises(UnreachableError, match="rank 0 writes it"):
        job.learn(tmp_path, START, timeout_s=0.05)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"world_size": "four"}'], ids=["empty", "list", "type"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    Series.fresh(tmp_path, "model", Files())
    places.job_file(tmp_path, START).write_bytes(content)
    with pytest.raises(MalformedError, match="job-00010203"):
        job.learn(tmp_path, START, timeout_s=1.0)


def test_the_incarnation_is_as_given_or_from_the_environment_or_drawn() -> None:
    environment = {job.VARIABLE: START.hex()}
    assert job.incarnation_of(bytes(16), environment, 4) == bytes(16)
    assert job.incarnation_of(None, environment, 4) == START
    assert job.incarnation_of(None, {}, 1) != job.incarnation_of(None, {}, 1)


@pytest.mark.parametrize(
    ("given", "environment"),
    [
        (None, {}),
        (b"short", {}),
        ("text", {}),
        (None, {job.VARIABLE: "xyz"}),
        (None, {job.VARIABLE: "é" * 32}),
    ],
    ids=["none", "short", "text", "no digits", "no ASCII"],
)
def test_an_incarnation_that_is_none_is_refused(given: bytes | None, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="wanted"):
        job.incarnation_of(given, environment, 4)


def test_what_keeps_rank_0_from_beginning_is_told_to_the_others(tmp_path: Path) -> None:
    Workspace(tmp_path, Files()).prepare()
    job.announce(tmp_path, bytes(16), job.JobRefused(reason="DamagedError: none can be used"), Files())
    with pytest.raises(LoadError, match=r"rank 0 did not begin.*DamagedError: none can be used"):
        job.learn(tmp_path, bytes(16), timeout_s=1.0)
