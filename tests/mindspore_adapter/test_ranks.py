"""Two data-parallel ranks, as real processes, without msrun: one job for all tests here."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mindspore


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_ranks.py")
    shared = {
        **os.environ,
        "MS_WORKER_NUM": "2",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(port),
        "PYTHONPATH": str(script.parent.parent),
    }
    roles = [{"MS_ROLE": "MS_SCHED"}] + [
        {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(node)} for node in range(2)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(out)],
            cwd=out,
            env=shared | role,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in roles
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in reversed(list(zip(processes, outputs, strict=True))):
        assert process.returncode == 0, output[-4000:]
    return [json.loads((out / f"report{rank}.json").read_text()) for rank in range(2)]


def test_ranks_that_share_a_directory_are_one_series_written_once(reports):
    for report in reports:
        assert report["shared"]["runs"] == 1
        assert report["shared"]["steps"] == [1, 2, 3, 4, 5]
        assert report["shared"]["worlds"] == [2]
        assert report["shared"]["files"] == sorted(f"net-{e}_{s}.ckpt" for e in (1, 2, 3) for s in (1, 2, 3))


def test_both_ranks_resume_in_the_middle_of_an_epoch_to_the_same_bits(reports):
    assert [(r["shared"]["resumed"], r["shared"]["equal"]) for r in reports] == [(5, True), (5, True)]


def test_a_checkpoint_damaged_on_one_rank_is_used_by_none(reports):
    assert [(r["apart"]["resumed"], r["apart"]["equal"]) for r in reports] == [(4, True), (4, True)]
    assert [r["apart"]["named"] for r in reports] == [False, True]
    assert all(r["apart"]["not every rank"] for r in reports)


def test_what_fails_on_one_rank_raises_on_both(reports):
    assert "failed on rank 1" in reports[0]["one fails"]
    assert "fc.weight: the network has float32 [10, 8]" in reports[1]["one fails"]


def test_redundancy_is_removed_by_sharing_a_directory_only(reports):
    for report in reports:
        files, error = report["redundancy"]
        assert files == ["net-3_3.ckpt"]
        assert "ranks that share a directory" in error
