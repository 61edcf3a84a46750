"""`swansong controller`: a controller by hand, and the jobs that find it."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path

import pytest

from array_job import QUICK, free_port, job, trained, until, values
from by_hand import by_hand
from swansong.engine.token import FILE_NAME
from swansong.persist import places
from swansong.persist.job import VARIABLE

OPTIONS = [text for name, value in QUICK.items() for text in ("--option", f"{name}={value}")]


def test_a_job_uses_the_controller_that_is_there_and_is_saved_by_it(tmp_path: Path) -> None:
    directory, start = tmp_path / "c", secrets.token_hex(16)
    with by_hand(directory, 2, *OPTIONS, incarnation=start) as controller:
        port = controller.told["port"]
        with job(directory, 2, port=port, incarnation=start) as run:
            run.begin()
            run.steps(2)
            run.ranks[1].send(signal.SIGKILL)
            report = run.incident()
            assert controller.code() == 0
            assert run.controllers() == [], "rank 0 has started none"
        assert controller.told == {"host": "127.0.0.1", "port": port, "incarnation": start}
        assert f"listens on 127.0.0.1:{port}\n" in controller.errors()
    assert (report["outcome"], report["step"]) == ("saved", 2)
    assert values(Path(report["path"])) == {trained(2)}
    assert "array_rank.py" in report["resume_command"], "as rank 0 has told"
    assert not places.job_file(directory, bytes.fromhex(start)).exists()


def test_a_job_of_one_process_is_served_too(tmp_path: Path) -> None:
    directory, start = tmp_path / "c", secrets.token_hex(16)
    with by_hand(directory, 1, *OPTIONS, incarnation=start) as controller:
        with job(directory, 1, port=controller.told["port"], incarnation=start) as run:
            run.begin()
            run.steps(3)
            run.tell("persist")
            assert run.codes() == [0]
            assert run.incident()["step"] == 3
        assert controller.code() == 0


def test_after_ctrl_c_rank_0_starts_another_and_one_by_hand_could_follow(tmp_path: Path) -> None:
    directory, start = tmp_path / "c", secrets.token_hex(16)
    with by_hand(directory, 2, *OPTIONS, incarnation=start) as controller:
        with job(directory, 2, port=controller.told["port"], incarnation=start) as run:
            run.begin()
            run.steps(1)
            assert controller.interrupt() == 0
            assert places.job_file(directory, bytes.fromhex(start)).exists()
            until(run.controllers)
            run.steps(1)
            run.ranks[1].send(signal.SIGKILL)
            assert (run.incident()["outcome"], run.incident()["step"]) == ("saved", 2)
        errors = controller.errors()
    assert errors.endswith("ends: SIGINT came\n")
    assert "Traceback" not in errors


def test_ctrl_c_before_anybody_came_ends_it_and_leaves_the_token(tmp_path: Path) -> None:
    with by_hand(tmp_path, 2, incarnation="00" * 16) as controller:
        assert controller.interrupt() == 0
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_a_port_that_is_taken_is_a_problem_told_in_one_line(tmp_path: Path) -> None:
    with by_hand(tmp_path, 2, incarnation="00" * 16) as first:
        port = first.told["port"]
        with by_hand(tmp_path, 2, incarnation="00" * 16, port=port) as second:
            assert (second.told, second.code()) == ({}, 1)
            assert second.errors() == (
                f"swansong: controller address 127.0.0.1:{port}: another process listens there; "
                "choose another port\n"
            )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--incarnation", "00" * 16, "--option", "patience=1"], "'patience': wanted NAME=VALUE"),
        (["--incarnation", "00" * 16, "--option", "attempts=many"], "Expected `int`"),
        (["--incarnation", "00" * 16, "--option", "budget_s=-1"], "wanted a positive finite number"),
        (["--incarnation", "xyz"], "wanted 32 hexadecimal digits, got 'xyz'"),
        ([], VARIABLE),
        (["--incarnation", "00" * 16, "--tls-ca", "missing.pem"], "a controller needs a certificate"),
    ],
    ids=["unknown option", "no number", "negative", "no incarnation", "none", "TLS without certificate"],
)
def test_wrong_use_is_told_in_one_line(swansong, monkeypatch, tmp_path, given, said) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    where = f"127.0.0.1:{free_port()}"
    result = swansong("controller", where, tmp_path, "--world-size", "2", *given)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_directory_that_is_not_there_is_told(swansong, tmp_path) -> None:
    missing = tmp_path / "missing"
    result = swansong("controller", "127.0.0.1:2000", missing, "--world-size", "2", "--incarnation", "0" * 32)
    assert result.exit_code == 2
    assert f"{missing}: no such directory" in result.stderr
