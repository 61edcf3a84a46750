"""Where many small directories can be made and thrown away fast."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")


@contextmanager
def directory_in_memory() -> Iterator[Path]:
    """An empty directory, in memory if there is such a place: an fsync there costs nothing."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as path:
        yield Path(path)
