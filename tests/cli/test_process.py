"""The program as a process: what only shows from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

BLOCKED = """
import sys
sys.modules["mindspore"] = sys.modules["torch"] = None
from swansong.cli.main import run
run()
"""


def test_works_where_no_framework_can_be_imported(shelf):
    shelf.save("net-1_1.ckpt")
    for command in (["list", "--verify"], ["verify"]):
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, *command, str(shelf.path), "--json"],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert json.loads(done.stdout)


def test_entry_point_gives_the_exit_code(process, shelf):
    shelf.save("net-1_1.ckpt")
    shelf.flip("net-1_1.ckpt")
    done = process("verify", shelf.path)
    assert done.returncode == 1
    assert done.stdout.startswith(b"damaged ")
    assert done.stderr == b""


def test_name_that_is_not_utf8_goes_in_and_out(process, shelf):
    path = shelf.foreign("plain.ckpt").rename(shelf.path / "byte-\udc80.ckpt")
    done = process("inspect", path, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["path"] == str(path)
    done = process("inspect", shelf.path / "missing-\udc80")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.count(b"\n") == 1
    assert rb"missing-\udc80" in done.stderr


def test_output_of_any_encoding_takes_any_name(process, shelf, environment):
    shelf.foreign("plain.ckpt").rename(shelf.path / "é.ckpt")
    done = process("list", shelf.path, env=environment | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\xe9.ckpt" in done.stdout


@pytest.mark.parametrize("command", ["list", "verify"])
def test_reader_that_has_gone_is_no_error(process, shelf, command):
    shelf.save("net-1_1.ckpt")
    reader, writer = os.pipe()
    os.close(reader)
    done = process(command, shelf.path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_output_that_cannot_be_written_is_one_line(process, shelf):
    shelf.save("net-1_1.ckpt")
    with open("/dev/full", "wb") as full:
        done = process("list", shelf.path, stdout=full)
    assert (done.returncode, done.stderr) == (1, b"swansong: No space left on device\n")


def test_interrupt_is_quiet(tmp_path):
    pipe = tmp_path / "key"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "swansong.cli", "verify", str(tmp_path), "--key-file", str(pipe)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program,
        pipe.open("wb"),  # returns when the program has opened its end, where it then waits
    ):
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=60)
    assert (program.returncode, output, errors) == (130, b"", b"")


def test_terminal_gets_colours_and_whole_names(process, shelf, terminal):
    writer, shown = terminal
    name = "net-" + "x" * 100 + ".ckpt"
    shelf.save(name)
    done = process("list", shelf.path, stdout=writer)
    page = shown()
    assert done.returncode == 0
    assert "\x1b[32mcommitted" in page
    assert page.count("x") >= 100
    assert "…" not in page


def test_terminal_gets_some_tensors_unless_all_are_wanted(process, shelf, terminal):
    writer, shown = terminal
    saved = shelf.save(
        "net-1_1", container="directory", arrays={f"w{i:02}": np.zeros(1, np.int8) for i in range(50)}
    )
    process("inspect", saved.path, stdout=writer)
    process("inspect", saved.path, "--all", stdout=writer)
    page = shown()
    assert page.count("w39") == 2
    assert page.count("w40") == 1
    assert page.count("... and 10 more (--all)") == 1


def test_progress_goes_to_stderr_only_if_that_is_a_terminal(process, shelf, terminal):
    writer, shown = terminal
    shelf.save("net-1_1.ckpt")
    done = process("verify", shelf.path, "--json", stderr=writer)
    assert "696/696" in shown()
    assert json.loads(done.stdout)["ok"]
