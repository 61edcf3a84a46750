"""The protocol's page shows the tables as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent


def test_the_diagrams_are_those_of_the_tables() -> None:
    command = [sys.executable, "tools/protocol_diagrams.py", "--check"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)

    assert run.returncode == 0, run.stderr
