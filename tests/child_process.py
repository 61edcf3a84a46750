"""Forked children for tests: a function, and how it ended."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(function: Callable[[], object]) -> int:
    """Run `function` in a forked child; return its exit code (1 after an exception) or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
