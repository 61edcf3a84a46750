"""The examples that need no framework do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_kill_arrays_ends_with_the_bits_of_the_undisturbed_run(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "kill_arrays.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resumed after step 25" in result.stdout
    assert "bit for bit" in result.stdout
