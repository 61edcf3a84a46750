"""PyTorch jobs that are told to stop, or do not get on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from array_job import QUICK, until
from swansong.protocol.operator import Status, StatusRequest
from torch_job import Zygote, fault, torch_job
from torch_logs import differing

STUCK = 75

PLACES = {
    "inside a collective": [fault("mark", "collective", 6, 0), fault("wait", "forward", 6, 1)],
    "waiting for data": [fault("wait", "data", 6, 0)],
    "evaluating": [fault("wait", "evaluation", 5, 0)],
}


@pytest.mark.parametrize("faults", PLACES.values(), ids=PLACES)
def test_sigterm_is_saved_and_ends_the_process_as_it_would_have(
    tmp_path: Path, zygote: Zygote, faults: list[dict[str, Any]]
) -> None:
    with torch_job(tmp_path, *faults, zygote=zygote) as run:
        run.waits(*(one["ranks"][0] for one in faults))
        run.send(signal.SIGTERM, 0)
        codes = run.codes()
        report = run.incident()

    assert codes[0] == -signal.SIGTERM
    assert set(codes[1:]) <= {1, STUCK}
    assert (report["kind"], report["inexact"]) == ("signalled", [])
    assert run.steps() == [(faults[0]["step"] - 1, "preemption")]


def test_sigterm_to_every_rank_is_saved_once(tmp_path: Path, zygote: Zygote) -> None:
    with torch_job(tmp_path, fault("wait", "forward", 6, 2), zygote=zygote) as run:
        run.waits(2)
        run.send(signal.SIGTERM, 0, 1, 2)
        assert run.codes() == [-signal.SIGTERM] * 3
        run.incident()

    assert run.steps() == [(5, "preemption")]


def test_a_stopped_rank_is_a_stall_that_is_saved_and_training_goes_on_to_the_same_bits(
    tmp_path: Path, zygote: Zygote, undisturbed: Any
) -> None:
    options = QUICK | {"stall_timeout_s": 1.0}
    with torch_job(tmp_path, fault("SIGSTOP", "forward", 6, 1), zygote=zygote, options=options) as run:
        report = run.incident()
        run.send(signal.SIGCONT, 1)
        assert run.codes() == [0] * 3

    assert (report["kind"], report["outcome"], report["step"]) == ("stalled", "saved", 5)
    assert run.steps() == [(5, "fault")]
    assert differing(undisturbed(), run.logs()) == []
    run.incident()


def test_who_waits_for_data_for_long_is_a_stall_that_is_saved_once(
    tmp_path: Path, zygote: Zygote, undisturbed: Any
) -> None:
    options = QUICK | {"stall_timeout_s": 0.5}
    with torch_job(tmp_path, fault("wait", "data", 7, 2), zygote=zygote, options=options) as run:
        report = run.incident()
        run.go()
        assert run.codes() == [0] * 3

    assert (report["kind"], report["outcome"], report["step"]) == ("stalled", "saved", 6)
    assert differing(undisturbed(), run.logs()) == []
    run.incident()


def test_a_phase_however_long_is_no_stall(tmp_path: Path, zygote: Zygote, undisturbed: Any) -> None:
    options = QUICK | {"stall_timeout_s": 1.0}
    with torch_job(tmp_path, fault("wait", "evaluation", 5, 0, 1, 2), zygote=zygote, options=options) as run:
        run.waits(0, 1, 2)

        def up_s() -> float:
            said = run.ask(StatusRequest())
            assert isinstance(said, Status)
            return said.up_s

        begun = up_s()
        until(lambda: up_s() > begun + 3.0)
        run.go()
        assert run.codes() == [0] * 3

    assert run.steps() == []
    assert differing(undisturbed(), run.logs()) == []


def test_a_stopped_rank_ends_the_job_once_the_others_have_saved_if_stalls_are_to(
    tmp_path: Path, zygote: Zygote
) -> None:
    options = QUICK | {"stall_timeout_s": 1.0, "stall_action": "stop"}
    with torch_job(tmp_path, fault("SIGSTOP", "forward", 6, 1), zygote=zygote, options=options) as run:
        report = run.incident()
        until(lambda: len(run.ended()) == 2)
        assert set(run.ended().values()) <= {1, STUCK}
        run.send(signal.SIGKILL, 1)
        run.codes()

    assert (report["kind"], report["outcome"], report["step"]) == ("stalled", "saved", 5)
    assert run.steps() == [(5, "fault")]
