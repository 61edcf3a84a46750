"""Fixtures shared by the tests of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from store_support import Watched
from swansong.store.series import Series


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where checkpoints go; not there yet."""
    return tmp_path / "checkpoints"


@pytest.fixture
def files() -> Watched:
    """Real files that can be watched, stopped and made to fail."""
    return Watched()


@pytest.fixture
def series(directory: Path, files: Watched) -> Series:
    """A run called "run" that begins in an empty directory."""
    return Series.fresh(directory, "run", files)
