"""`swansong status --watch`, as a process whose output is a pipe or a terminal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_support import PATIENCE_S, TOKEN, Rank, Served, finish_incident, serve, world
from swansong.engine.token import FILE_NAME
from swansong.protocol import messages as m


@pytest.fixture
def watching(tmp_path: Path, environment: dict[str, str]) -> Callable[..., object]:
    """Watch a controller, ten times a second."""
    token = tmp_path / FILE_NAME
    token.write_text(f"{bytes(range(32)).hex()}\n")
    token.chmod(0o600)

    @contextmanager
    def watch(served: Served, *more: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "swansong.cli", "status", str(served.address)]
        command += ["--token-file", str(token), "--watch", "--every", "0.1", *more]
        with subprocess.Popen(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    return watch


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code, and what was said on standard error."""
    assert process.stderr is not None
    return process.wait(PATIENCE_S), process.stderr.read()


def test_json_is_a_document_a_line_until_the_controller_ends(watching) -> None:
    with serve(2, token=TOKEN) as served, world(served, 2), watching(served, "--json") as process:
        told = [json.loads(process.stdout.readline()) for _ in range(3)]
        served.server.stop("enough")
        code, errors = ended(process)
    assert [(one["phase"], one["protected"]) for one in told] == [("training", True)] * 3
    assert 0 <= told[0]["phase_s"] < told[2]["phase_s"]
    assert [rank["state"] for rank in told[0]["ranks"]] == ["connected"] * 2
    assert (code, errors) == (0, f"swansong: {served.address}: the controller ended: enough\n")


def test_a_pipe_gets_one_block_after_another(watching) -> None:
    with serve(1, token=TOKEN) as served, world(served, 1), watching(served) as process:
        lines = [process.stdout.readline() for _ in range(18)]
        served.server.stop("enough")
        assert ended(process)[0] == 0
    assert lines[:9][1:4] == [
        "protected     yes\n",
        "phase         training, for 0 s\n",
        "ranks         1: 1 connected\n",
    ]
    assert lines[8] == "\n"
    assert lines[10] == lines[1]
    assert not any("\x1b" in line for line in lines)


def test_a_terminal_is_painted_over_and_keeps_the_last_block(watching, terminal) -> None:
    writer, shown = terminal
    with serve(2, token=TOKEN) as served, watching(served, stdout=writer) as process:
        page = shown.until("did not register yet")
        with Rank(served, 0) as one, Rank(served, 1) as other:
            for rank in (one, other):
                rank.register(2)
            page += shown.until("2 connected")
            served.server.stop("enough")
            assert ended(process)[0] == 0
        page += shown()
    assert page.count("\x1b[1A") > 5, "the cursor goes back up"
    assert page.rstrip().endswith("\x1b[?25h"), "and is seen again"


def test_an_incident_that_was_not_saved_is_a_problem_at_the_end(watching) -> None:
    with serve(1, token=TOKEN) as served, watching(served, "--json") as process:
        process.stdout.readline()
        with Rank(served, 0) as rank:
            rank.register(1, fault=m.Fault(kind=m.FaultKind.RAISED, rank=0, what="no"))
            rank.hear(m.Freeze)
            rank.connection.close()
            served.wait_closed()
        code, errors = ended(process)
    assert code == 1
    assert "the last incident: nothing saved: " in errors


def test_an_incident_that_was_saved_is_told_at_the_end(watching) -> None:
    with serve(1, token=TOKEN) as served, world(served, 1) as ranks, watching(served, "--json") as process:
        process.stdout.readline()
        ranks[0].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0)))
        finish_incident(ranks, step=6)
        ranks[0].connection.close()
        served.wait_closed()
        code, errors = ended(process)
    assert code == 0
    assert "; the last incident: saved: step 6 in /checkpoints/step-6\n" in errors


def test_interrupt_ends_it_quietly(watching) -> None:
    with serve(1, token=TOKEN) as served, watching(served) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "")
