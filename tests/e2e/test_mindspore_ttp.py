"""Jobs of real MindSpore processes: what fails, what is saved, and how the next start goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from array_job import until
from mindspore_ttp_job import PATIENCE_S, Job, job
from swansong.engine.address import resolve
from swansong.engine.inquiry import ask
from swansong.engine.token import FILE_NAME, read_token
from swansong.protocol.messages import Outcome
from swansong.protocol.operator import PersistEnded, PersistRequest
from swansong.store import catalog
from swansong.store.verify import verify

pytestmark = [pytest.mark.mindspore, pytest.mark.timeout(300)]
STUCK = 75


def incident(directory: Path) -> dict[str, Any]:
    """The report of the only incident."""
    (path,) = (directory / "ttp/.swansong/incidents").glob("*.json")
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def goes_on(directory: Path, size: int, mode: str, want: list[dict[str, str]], step: int) -> None:
    """The next start resumes at `step` and ends with the bits of the undisturbed run.

    Batch-norm statistics are rank 0's, here as everywhere; only its run can be equal in these.
    """
    with job(directory, size, mode=mode) as again:
        assert again.codes() == [0] * size, [rank.errors()[-2000:] for rank in again.ranks]
        assert any(rank.last("backup")[1] for rank in again.ranks)
        for rank, undisturbed in enumerate(want):
            ended, began = again.ranks[rank].last("ended"), again.ranks[rank].last("began")
            assert ended is not None
            assert began is not None
            assert began[0] == step
            assert again.ranks[rank].last("backup")[:1] == [step]
            different = {name for name in undisturbed if ended[0][name] != undisturbed[name]}
            assert rank > 0 or not different
            assert not {name for name in different if "moving" not in name}


def references(failed: Job) -> list[dict[str, str]]:
    found = [rank.last("reference") for rank in failed.ranks]
    return [one[0] for one in found if one is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "fault", "step", "codes", "savers"),
    [
        pytest.param(
            *("graph", {"kind": "raise", "ranks": [1], "step": 4}, 4, [{1, STUCK}, {1}], {0, 1}),
            id="one throws, graph",
        ),
        pytest.param(
            *("pynative", {"kind": "raise", "ranks": [0, 1], "step": 4}, 4, [{1}, {1}], {0, 1}),
            id="all throw, pynative",
        ),
        pytest.param(
            *("pynative", {"kind": "kill", "ranks": [1], "step": 4, "at": "begin"}, 3, [None, {-9}], {0}),
            id="one is killed, pynative",
        ),
        pytest.param(
            *("graph", {"kind": "term", "ranks": [1], "step": 4}, 4, [None, {-15}], {0, 1}),
            id="SIGTERM to one, graph",
        ),
        pytest.param(
            *("pynative", {"kind": "term", "ranks": [0, 1], "step": 4}, 4, [{-15}, {-15}], {0, 1}),
            id="SIGTERM to all, pynative",
        ),
    ],
)
def test_two_data_parallel_ranks_save_what_one_leaves_and_go_on_bit_equal(
    tmp_path: Path,
    mode: str,
    fault: dict[str, Any],
    step: int,
    codes: list[set[int] | None],
    savers: set[int],
) -> None:
    with job(tmp_path / "job", 2, mode=mode, fault=fault, reference=True) as failed:
        for code, may in zip(failed.codes(), codes, strict=True):
            # A survivor may be ended by MindSpore itself, once it has noticed that its peer is gone.
            assert code in may if may is not None else code != 0
        want = references(failed)
        errors = [rank.errors() for rank in failed.ranks]
    (found,) = catalog.scan(tmp_path / "job/ttp")
    assert found.manifest is not None
    if fault["kind"] == "term":  # until every rank has heard of it, training goes on
        step = max(step, found.manifest.step)
    path = tmp_path / f"job/ttp/ttp_saved_checkpoints-{(step - 1) // 3 + 1}_{(step - 1) % 3 + 1}"
    assert [found.path, verify(path).ok] == [path, True]
    (rank,) = {int(entry.name.removeprefix("rank_")) for entry in path.glob("rank_*")}
    assert rank in savers
    report = incident(tmp_path / "job")
    assert [report["outcome"], report["step"], report["inexact"]] == ["saved", step, []]
    for thrower in fault["ranks"] if fault["kind"] == "raise" else ():
        own, ours = errors[thrower].index("RuntimeError: boom"), errors[thrower].index("swansong: the state")
        assert own < ours
    goes_on(tmp_path / "job", 2, mode, want, step)


def test_sigterm_saves_and_the_process_ends_as_by_that(tmp_path: Path) -> None:
    fault = {"kind": "term", "ranks": [0], "step": 4, "at": "begin"}
    with job(tmp_path / "job", 1, fault=fault, reference=True) as failed:
        assert failed.codes() == [-15]
        want = references(failed)
    (found,) = catalog.scan(tmp_path / "job/ttp")
    assert found.manifest is not None
    assert found.manifest.kind == "preemption"
    goes_on(tmp_path / "job", 1, "pynative", want, found.manifest.step)


def test_an_operator_asks_and_the_job_ends_with_code_0(tmp_path: Path) -> None:
    fault = {"kind": "wait", "ranks": [0], "step": 4}
    with job(tmp_path / "job", 1, fault=fault, mode="graph", reference=True) as asked:
        until(lambda: asked.ranks[0].last("waits") is not None)
        token = read_token(tmp_path / "job/ttp" / FILE_NAME)
        request = PersistRequest(who="a test")
        answer = ask(resolve("127.0.0.1", asked.port), token, request, timeout_s=PATIENCE_S)
        assert isinstance(answer, PersistEnded)
        assert answer.ending.outcome is Outcome.SAVED
        assert asked.codes() == [0]
        want = references(asked)
    (found,) = catalog.scan(tmp_path / "job/ttp")
    assert found.manifest is not None
    assert [found.manifest.kind, found.manifest.step] == ["requested", 4]
    goes_on(tmp_path / "job", 1, "graph", want, 4)
