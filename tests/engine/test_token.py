"""The job's token: from the environment or from a file that nobody else may read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swansong.engine.token import FILE_NAME, VARIABLE, job_token, read_token
from swansong.errors import ConfigError

DIGITS = "0f" * 32


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_environment_goes_before_the_file(tmp_path: Path) -> None:
    assert (
        job_token(tmp_path, {VARIABLE: DIGITS}, create=True).job
        == read_token(write(tmp_path / "same", DIGITS.encode())).job
    )
    assert not (tmp_path / FILE_NAME).exists()


def test_first_start_makes_the_file_and_later_ones_read_it(tmp_path: Path) -> None:
    made = job_token(tmp_path, {}, create=True)
    path = tmp_path / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]
    assert {job_token(tmp_path, {}, create=create).job for create in (True, False)} == {made.job}
    assert job_token(tmp_path / "..", {VARIABLE: path.read_text()}, create=False).job == made.job


def test_many_who_make_it_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        jobs = set(pool.map(lambda _: job_token(tmp_path, {}, create=True).job, range(64)))
    assert len(jobs) == 1


@pytest.mark.parametrize("given", ["", "0f", DIGITS + "00", "zz" * 32, "٣" * 64])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as caught:
        job_token(tmp_path, {VARIABLE: given}, create=True)
    assert not given or given not in str(caught.value)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_token(write(tmp_path / "file", given.encode()))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_file_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="wanted 0600"):
        read_token(write(tmp_path / "file", DIGITS.encode(), mode))


def test_missing_file_says_who_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 0 makes it"):
        job_token(tmp_path, {}, create=False)


def test_directory_that_cannot_hold_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        job_token(tmp_path / "nowhere", {}, create=True)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd"
    if kind == "link":
        path.symlink_to(write(tmp_path / "file", DIGITS.encode()))
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    with pytest.raises(ConfigError, match="token file"):
        read_token(path)
