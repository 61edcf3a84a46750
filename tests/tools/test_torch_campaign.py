"""Random faults of a PyTorch job of four ranks, one of each kind: none costs a step, or a bit unsaid."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "tools" / "torch_campaign.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_faults_cost_no_step_and_no_bit_unsaid(tmp_path: Path) -> None:
    command = [sys.executable, str(CAMPAIGN), "--faults", "9", "--seed", "17", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    faults = json.loads(result.stdout)

    assert [fault["number"] for fault in faults] == list(range(9))
    assert set(Counter(fault["kind"] for fault in faults).values()) == {1}
    # Where every rank threw within its update nothing was whole anywhere; of other kinds nothing may be lost.
    assert {fault["kind"] for fault in faults if fault["torn"]} <= {"all ranks throw"}
    assert {fault["lost"] for fault in faults if not fault["torn"]} == {0}
    assert [fault for fault in faults if fault["different"] and not fault["inexact"]] == []
