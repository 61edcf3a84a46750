"""Who is still writing into a series: writer processes outlive the job that gave them their last order.

The lock is taken, shared, by the process that gives an order, and travels with the order to the one that
writes. It belongs to the open file, so it is held without a gap until the save is over or its writer is dead,
whoever else has ended meanwhile.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Final

from swansong.errors import SwansongWarning
from swansong.store import naming
from swansong.store.files import FileLock, Files
from swansong.store.workspace import Workspace

PATIENCE_S: Final = 120.0
"""How long a writer of an earlier start is waited for."""
_POLL_S: Final = 0.05


def announced(space: Workspace, series: str) -> FileLock:
    """The series' lock for writers, shared by all of them. Raises OSError."""
    return space.files.share_lock(space.control / naming.series_writers(series))


def await_writers(directory: Path, series: str, files: Files, *, patience_s: float = PATIENCE_S) -> bool:
    """Wait until no writer process is at work on a series, as whoever begins or resumes one does.

    Warns (SwansongWarning) and returns False if one still is after `patience_s`.
    """
    path = directory / naming.CONTROL / naming.series_writers(series)
    deadline = time.monotonic() + patience_s
    while not _free(path, files):
        if time.monotonic() >= deadline:
            warnings.warn(
                f"{directory}: a process of an earlier start still writes to series {series!r} after "
                f"{patience_s:g} s; what it may yet save is not resumed from",
                SwansongWarning,
                stacklevel=3,
            )
            return False
        time.sleep(_POLL_S)
    return True


def _free(path: Path, files: Files) -> bool:
    if not path.exists():
        return True
    try:
        files.lock(path, wait=False).release()
    except BlockingIOError:
        return False
    except OSError:
        pass  # not ours to open: whoever may write here is not waited for
    return True
