"""How a run ends: exit codes, and one line on standard error."""

from __future__ import annotations

import pytest

import swansong as package
from swansong.store import catalog


def test_version(swansong):
    result = swansong("--version")
    assert (result.exit_code, result.stdout) == (0, f"swansong {package.__version__}\n")


@pytest.mark.parametrize(
    "command", [(), ("list",), ("inspect",), ("verify",)], ids=lambda c: " ".join(c) or "alone"
)
def test_help_of_every_command(swansong, command):
    result = swansong(*command, "--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "--debug" in result.stdout
    if command:
        assert f"    swansong {command[0]} checkpoints" in result.stdout
        assert "--json" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "swansong: missing command; see 'swansong --help'\n"),
        (("lst",), "No such command 'lst'"),
        (("--foo",), "No such option: --foo"),
        (("list", "--foo", "."), "No such option: --foo; see 'swansong list --help'\n"),
        (("list",), "Missing argument 'DIR'; see 'swansong list --help'\n"),
        (("list", ".", "--key-file"), "--key-file"),
        (("verify", "a", "b"), "unexpected extra argument"),
        (("list", "--\x1b[31m\n", "."), "No such option"),
    ],
    ids=[
        "nothing",
        "command",
        "option",
        "its option",
        "no argument",
        "no value",
        "too many",
        "escape sequence",
    ],
)
def test_wrong_use_is_two_and_one_line(swansong, arguments, says):
    result = swansong(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("swansong: ")
    assert says in result.stderr
    assert result.stderr.endswith("\n")
    assert result.stderr[:-1].isprintable()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "/a\n\x1b"),
            r"/a\n\x1b: No such file or directory",
        ),
        (OSError(5, "Input/output error"), "Input/output error"),
        (OSError("odd"), "internal error: OSError: odd (--debug shows where; please report it)"),
        (MemoryError(), "out of memory"),
        (
            RuntimeError("oops\n"),
            r"internal error: RuntimeError: oops\n (--debug shows where; please report it)",
        ),
        (package.SwansongError("first\nsecond"), r"first\nsecond"),
    ],
    ids=["named file", "no file", "bare", "memory", "bug", "ours"],
)
def test_any_error_is_one_and_one_line(swansong, monkeypatch, error, line):
    def fails(path):
        raise error

    monkeypatch.setattr(catalog, "find", fails)
    result = swansong("inspect", "it")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"swansong: {line}\n"


@pytest.mark.parametrize(
    "arguments", [("--debug", "inspect", "it"), ("inspect", "it", "--debug")], ids=["before", "after"]
)
def test_debug_adds_the_traceback(swansong, monkeypatch, arguments):
    def fails(path):
        raise RuntimeError("oops")

    monkeypatch.setattr(catalog, "find", fails)
    result = swansong(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("swansong: internal error: RuntimeError: oops")
    assert "Traceback (most recent call last)" in result.stderr
    assert "in fails" in result.stderr


@pytest.mark.parametrize(
    ("interrupt", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(32, "Broken pipe"), 141)], ids=repr
)
def test_who_is_told_to_stop_says_nothing(swansong, monkeypatch, interrupt, code):
    def stopped(path):
        raise interrupt

    monkeypatch.setattr(catalog, "find", stopped)
    result = swansong("inspect", "it", "--debug")
    assert (result.exit_code, result.output) == (code, "")
