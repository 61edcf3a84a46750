"""Random faults of a job of four ranks, each kind twice or more: none costs a step or, unsaid, a bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "tools" / "torch_campaign.py"
FAULTS, KINDS = 20, 9


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_faults_cost_no_step_and_no_bit_unsaid(tmp_path: Path) -> None:
    command = [sys.executable, str(CAMPAIGN), "--faults", str(FAULTS), "--seed", "17", "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    faults = json.loads(result.stdout)

    assert [fault["number"] for fault in faults] == list(range(FAULTS))
    counts = Counter(fault["kind"] for fault in faults)
    assert (len(counts), set(counts.values())) == (KINDS, {2, 3})
    # Where every rank threw within its update nothing was whole anywhere; of other kinds nothing may be lost.
    assert {fault["kind"] for fault in faults if fault["torn"]} <= {"all ranks throw"}
    assert {fault["lost"] for fault in faults if not fault["torn"]} == {0}
    assert [fault for fault in faults if fault["different"] and not fault["inexact"]] == []
