"""A job that is told at its start that its state could not be saved in time."""

from __future__ import annotations

from pathlib import Path

from array_job import QUICK, job


def test_a_state_too_large_for_the_budget_is_warned_of_by_one_rank(tmp_path: Path) -> None:
    hopeless = QUICK | {"budget_s": 0.001}
    with job(tmp_path / "c", 2, options=hopeless) as run:
        run.begin()
        run.steps(2)
        run.tell("end")

        assert [rank.hear("left") for rank in run.ranks] == [[1], [1]], "no thread is left"
        assert run.codes() == [0, 0]
        for said in (
            "SwansongWarning: the state would not be saved in time",
            "4,000 bytes",
            "budget of 0.001 s",
        ):
            assert said in run.ranks[0].errors()
        assert "in time" not in run.ranks[1].errors()
        assert list((tmp_path / "c" / ".swansong" / "tmp").iterdir()) == []
