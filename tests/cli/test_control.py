"""`swansong status`, `persist` and `incident`, against a real controller and its real reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from array_job import job
from engine_support import TOKEN, Rank, serve, world
from swansong.engine.token import FILE_NAME, VARIABLE
from swansong.persist.incidents import KEYS

HEX = bytes(range(32)).hex()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / FILE_NAME
    path.write_text(f"{HEX}\n")
    path.chmod(0o600)
    return path


def test_status_says_whether_the_job_is_protected(swansong, token_file):
    with serve(2, token=TOKEN) as served, world(served, 2):
        result = swansong("status", str(served.address), "--token-file", token_file, "--json")
        told = json.loads(result.stdout)
        shown = swansong("status", str(served.address), "--token-file", token_file)

    assert (result.exit_code, told["protected"], told["world_size"]) == (0, True, 2)
    assert told["counts"] == {"connected": 2}
    assert "2: 2 connected" in shown.stdout


def test_status_of_a_job_that_is_not_protected_is_a_problem(swansong, monkeypatch):
    monkeypatch.setenv(VARIABLE, HEX)
    with serve(2, token=TOKEN) as served, Rank(served, 0) as rank:
        rank.register(2)
        result = swansong("status", str(served.address))

    assert result.exit_code == 1
    assert "no: " in result.stdout
    assert "did not register yet" in result.stdout


def test_nobody_listens(swansong, token_file):
    with serve(1) as served:
        address = str(served.address)
    for command in ("status", "persist"):
        result = swansong(command, address, "--token-file", token_file, "--timeout", "1")
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "wanted HOST:PORT"),
        (["127.0.0.1:70000"], "port"),
        (["127.0.0.1:2000"], "--token-file"),
        (["127.0.0.1:2000", "--token-file", "missing"], "not there"),
    ],
    ids=["no port", "port too high", "no token", "missing token"],
)
def test_wrong_use_is_told_in_one_line(swansong, monkeypatch, arguments, said):
    monkeypatch.delenv(VARIABLE, raising=False)
    for command in ("status", "persist"):
        result = swansong(command, *arguments)
        assert result.exit_code == 2
        assert said in result.stderr


def test_persist_saves_a_job_of_real_processes_and_incident_tells_of_it(swansong, tmp_path):
    directory = tmp_path / "c"
    with job(directory, 2) as run:
        run.begin()
        run.steps(2)
        address = f"127.0.0.1:{run.port}"
        result = swansong("persist", address, "--token-file", directory / FILE_NAME, "--json")
        assert run.codes() == [0, 0], "no launcher is to start it again, though the ranks were stuck"
        run.incident()

    saved = json.loads(result.stdout)
    assert (result.exit_code, saved["outcome"], saved["step"]) == (0, "saved", 2)
    assert saved["path"] == str(directory / "model-2")
    told = json.loads(swansong("incident", directory, "--json").stdout)
    assert told.keys() >= KEYS
    assert (told["id"], told["path"], told["kind"]) == (saved["incident"], saved["path"], "requested")
    shown = swansong("incident", directory, saved["incident"])
    assert shown.exit_code == 0
    assert saved["path"] in shown.stdout
    assert "array_rank.py" in shown.stdout, "the command that resumes"


def test_no_incident_is_a_problem(swansong, tmp_path):
    result = swansong("incident", tmp_path)
    assert result.exit_code == 1
    assert "no report of any incident" in result.stderr


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"[" * 100_000, b"\xff"], ids=range(5))
def test_what_is_no_report_is_refused(swansong, tmp_path, content):
    place = tmp_path / ".swansong" / "incidents"
    place.mkdir(parents=True)
    (place / "x.json").write_bytes(content)
    result = swansong("incident", tmp_path)
    assert result.exit_code == 1
    assert "not the report of an incident" in result.stderr
