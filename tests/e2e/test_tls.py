"""Jobs of real processes whose connections are under TLS."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from array_job import QUICK, job, trained, values
from by_hand import by_hand
from certificates import Authority
from swansong.cli.main import app
from swansong.engine.token import FILE_NAME

START = "5a" * 16


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def swansong(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def options(files: dict[str, str]) -> list[str]:
    """Of the command line."""
    names = {"authority": "--tls-ca", "certificate": "--tls-cert", "key": "--tls-key"}
    return [text for field, path in files.items() for text in (names[field], path)]


def test_after_a_kill_a_job_under_tls_is_saved_and_who_has_no_certificate_is_kept_out(
    tmp_path: Path, authority: Authority
) -> None:
    directory, files = tmp_path / "c", authority.files("node", "127.0.0.1")
    other = Authority(tmp_path, "other")
    with job(directory, 2, tls=files) as run:
        run.begin()
        run.steps(2)
        where = (f"127.0.0.1:{run.port}", "--token-file", directory / FILE_NAME)
        assert "2: 2 connected" in swansong("status", *where, *options(files)).stdout
        for more, words in [
            ([], "does whoever listens there want TLS?"),
            (["--tls-ca", authority.file], "the controller wants a certificate of whoever connects"),
            (options(other.files("stranger")), "certificate verify failed: "),
        ]:
            refused = swansong("status", *where, *more)
            assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
            assert words in refused.stderr
        run.ranks[1].send(signal.SIGKILL)

        report = run.incident()
        assert (report["outcome"], report["step"]) == ("saved", 2)
        assert values(Path(report["path"])) == {trained(2)}
        assert len(run.controllers()) == 1
        log = (directory / ".swansong" / "controller.log").read_text()
        assert "TLS: " in log, "the controller has noted who was refused"


def test_a_job_under_tls_is_persisted_from_the_command_line(tmp_path: Path, authority: Authority) -> None:
    directory, files = tmp_path / "c", authority.files("node", "127.0.0.1")
    with job(directory, 2, tls=files) as run:
        run.begin()
        run.steps(1)
        where = (f"127.0.0.1:{run.port}", "--token-file", directory / FILE_NAME)
        done = swansong("persist", *where, *options(files))
        assert (done.exit_code, done.stdout) == (0, f"saved: step 1 in {directory / 'model-1'}\n")
        assert run.codes() == [0, 0]


def test_ranks_with_contexts_use_a_controller_that_was_started_by_hand(
    tmp_path: Path, authority: Authority
) -> None:
    directory, files = tmp_path / "c", authority.files("node", "127.0.0.1")
    times = [text for name, value in QUICK.items() for text in ("--option", f"{name}={value}")]
    with by_hand(directory, 2, *times, *options(files), incarnation=START) as controller:
        port = controller.told["port"]
        with job(directory, 2, port=port, incarnation=START, tls=files, tls_context=True) as run:
            run.begin()
            run.steps(2)
            run.ranks[0].send(signal.SIGKILL)
            assert (run.incident()["outcome"], run.incident()["step"]) == ("saved", 2)
            assert run.controllers() == []
        assert controller.code() == 0
