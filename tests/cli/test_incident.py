"""What `swansong incident` shows of a report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swansong.persist import places
from swansong.persist.incidents import document
from swansong.protocol import messages as m
from swansong.protocol.messages import Fault, FaultKind, Outcome

BROKEN = "RuntimeError: Connection closed\nby peer [127.0.0.1]:38251"


def raised(rank: int) -> Fault:
    return Fault(kind=FaultKind.RAISED, rank=rank, what=BROKEN, step=7)


@pytest.fixture
def shown(swansong, tmp_path):
    """What is shown of an incident with faults, each line by the words that it has."""

    def show(*faults: Fault, **changed: Any) -> list[str]:
        report = m.Report(
            incident="i-1",
            faults=faults,
            outcome=Outcome.NOTHING,
            step=None,
            path="",
            reason="nobody is left",
            reports={},
            savers={},
            notes=(),
            seconds={},
        )
        data = document(report, {}, inexact=(), resume_command="train", stem="model", run="r")
        path = places.incident_file(tmp_path, "i-1")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(json.loads(data) | changed))
        result = swansong("incident", tmp_path)
        assert result.exit_code == 0
        return [" ".join(line.split()) for line in result.stdout.splitlines()]

    return show


def test_what_began_it_comes_first_then_the_others_as_they_became_known(shown) -> None:
    lost = Fault(kind=FaultKind.LOST, rank=1, what="its process ended")
    lines = shown(raised(2), lost, raised(0))
    began = lines.index("first fault lost, rank 1: its process ended")
    assert lines[began + 1 : began + 3] == [
        "then raised, rank 2: RuntimeError: Connection closed by peer [127.0.0.1]:38251",
        "raised, rank 0: RuntimeError: Connection closed by peer [127.0.0.1]:38251",
    ]


def test_one_fault_is_shown_once(shown) -> None:
    lines = shown(raised(2))
    assert sum("raised, rank" in line for line in lines) == 1
    assert not any(line.startswith("then") for line in lines)


def test_of_many_faults_the_first_are_shown(shown) -> None:
    lines = shown(*(raised(rank) for rank in range(20)))
    assert sum("raised, rank" in line for line in lines) == 9
    assert "and 11 more" in lines


@pytest.mark.parametrize("faults", [None, 3, ["x", {}]], ids=["none", "no list", "no faults"])
def test_an_odd_list_of_faults_is_no_hindrance(shown, faults) -> None:
    assert any(line.startswith("first fault raised, rank 2") for line in shown(raised(2), faults=faults))
