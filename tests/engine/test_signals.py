"""Signals, in real processes: noticed wherever the main thread is, and nobody else disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swansong.engine.signals import SignalWatch
from swansong.errors import SwansongWarning

TESTS = Path(__file__).parent.parent


@contextmanager
def child(name: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "engine.signals_child", name],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_up_to(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if lines[-1] == last:
            return lines
    pytest.fail(f"wanted {last!r}, the process said {lines} and ended with {process.wait()}")


def result(name: str) -> tuple[list[str], int]:
    """What a process said that is sent nothing from outside, and how it ended."""
    with child(name) as process:
        said, _ = process.communicate()
        return said.splitlines(), process.returncode


def test_sigterm_is_served_while_the_main_thread_is_inside_a_c_call() -> None:
    with child("in_a_c_call") as process:
        lines_up_to(process, "stuck")
        process.terminate()
        assert process.communicate()[0] == "terminated\n"
        assert process.returncode == -signal.SIGTERM


def test_sigterm_is_served_after_asyncio_came_and_went_and_asyncio_has_its_own_signals() -> None:
    with child("under_asyncio") as process:
        said = lines_up_to(process, "stuck")
        assert said == ["asyncio's own signal came through", "asyncio left -1", "stuck"]
        process.terminate()
        assert process.communicate()[0] == "terminated\n"
        assert process.returncode == -signal.SIGTERM


def test_sigterm_is_served_while_another_has_the_descriptor() -> None:
    assert result("while_asyncio_has_the_descriptor") == (["terminated True"], 0)


def test_who_had_handler_and_descriptor_before_still_has_them_during_and_after() -> None:
    assert result("chained") == (
        [
            "['SIGUSR1'], terminated False",
            "['SIGUSR1', 'SIGTERM'], terminated True",
            "handlers called for ['SIGUSR1', 'SIGTERM']",
            "restored True",
        ],
        0,
    )


def test_a_handler_installed_later_is_chained_at_the_next_boundary_even_if_it_leads_back() -> None:
    assert result("handler_replaced") == (["called ['later'], restored True"], 0)


def test_a_descriptor_that_came_to_mean_something_else_is_not_written_to() -> None:
    assert result("descriptor_reused") == (["no stranger got anything", "descriptor -1"], 0)


def test_a_pool_that_terminates_its_workers_does_not_terminate_us() -> None:
    assert result("pool") == (["['SIGUSR1'], terminated False"], 0)


@pytest.mark.parametrize("name", ["fork", "fork_from_a_thread"])
def test_a_forked_child_dies_of_its_own_sigterm_and_the_parent_hears_nothing(name: str) -> None:
    said = [
        "child: handler <Handlers.SIG_DFL: 0>, descriptor -1",
        "child: blocks []",
        "child ended with -15",
        "['SIGUSR1'], terminated False",
        "blocks []",
    ]
    assert result(name) == (said, 0)


def test_a_child_that_is_terminated_before_it_has_run_at_all_is_not_taken_for_us() -> None:
    said, code = result("fork_and_kill_at_once")
    assert code == 0
    assert [line for line in said if not line.startswith("child: ")] == [
        *["child ended with -15"] * 200,
        "['SIGUSR1'], terminated False",
        "blocks []",
    ]


def test_a_second_interrupt_ends_a_process_that_is_stuck_at_once() -> None:
    with child("interrupted_twice") as process:
        lines_up_to(process, "stuck")
        process.send_signal(signal.SIGINT)
        lines_up_to(process, "forwarded SIGINT")
        process.send_signal(signal.SIGINT)
        process.wait()
        assert process.returncode == -signal.SIGINT


def test_interrupts_are_ordinary_as_long_as_training_goes_on_after_each() -> None:
    assert result("interrupted_once") == (["KeyboardInterrupt"] * 3, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("dies_with_output", ["flushed"], id="from-the-main-thread"),
        pytest.param("dies_though_blocked", [], id="though-it-is-blocked"),
    ],
)
def test_a_process_that_raises_sigterm_again_dies_of_it(name: str, said: list[str]) -> None:
    assert result(name) == (said, -signal.SIGTERM)


def test_a_process_with_a_stuck_main_thread_can_raise_sigterm_again() -> None:
    said, code = result("dies_from_a_thread")
    assert code == -signal.SIGTERM
    assert set(said) <= {"stuck"}


def test_a_callable_that_fails_is_heard_of_at_the_next_boundary() -> None:
    assert result("raising") == (["SIGTERM could not be served: no processor"], 0)


def test_it_is_called_once_however_often_sigterm_comes() -> None:
    assert result("twice") == (["called 1 times"], 0)


def test_closed_off_the_main_thread_sigterm_kills_as_it_did_before() -> None:
    assert result("closed_elsewhere") == ([], -signal.SIGTERM)


def test_closed_off_the_main_thread_sigterm_kills_a_stuck_process_too() -> None:
    with child("closed_elsewhere_and_stuck") as process:
        lines_up_to(process, "stuck")
        process.terminate()
        assert process.communicate()[0] == ""
        assert process.returncode == -signal.SIGTERM


def test_sigterm_that_comes_in_the_middle_of_closing_kills_as_it_did_before() -> None:
    assert result("terminated_while_closing") == ([], -signal.SIGTERM)


def test_what_another_has_put_in_place_meanwhile_is_left_there() -> None:
    said = ["descriptor kept True", "later handler"]
    assert result("closed_with_a_handler_that_takes_over") == (said, 0)


def test_off_the_main_thread_nothing_is_installed_and_it_is_said() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[tuple[bool, str]] = []

    def enter() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with SignalWatch(lambda: None) as watch:
                watch.reassert()
                found.extend((watch.installed, str(warning.message)) for warning in caught)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [
        (
            False,
            "SIGTERM will not save the training state: handlers can be installed on the main thread only",
        )
    ]
    assert signal.getsignal(signal.SIGTERM) == before


def test_where_sigterm_is_ignored_it_stays_so_and_it_is_said() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        watch = SignalWatch(lambda: None)
        with pytest.warns(SwansongWarning, match="will not save the training state: it is ignored"), watch:
            assert not watch.installed
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
