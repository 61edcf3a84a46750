"""The controller's process: what its surroundings cannot do to it."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from swansong.persist import controller


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_that_cannot_be_written_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    controller._note("what nobody will read")
