"""Starting a process of this package's own, with nothing of the script that is running."""

from __future__ import annotations

import sys
from pathlib import Path


def isolated_python(module: str) -> list[str]:
    """The command that runs `main` of `module`; arguments may follow, from `sys.argv[1]` on.

    Isolated mode knows neither PYTHONPATH nor the working directory, so it is told where this package is.
    """
    program = f"import sys; sys.path.append(sys.argv.pop(1)); from {module} import main; main()"
    return [sys.executable, "-I", "-c", program, str(Path(__file__).parents[2])]
