"""Another run reads and sweeps the same directory at any moment of a save: neither harms the other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.crash_judge import Judge
from crash.crash_places import directory_in_memory
from crash.crash_recorder import Recorder
from crash.crash_scenarios import DIRECTORY, SCENARIOS, SERIES, Scenario, identities
from swansong.errors import SaveError
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.series import Series

NAMES = [
    "ckpt, new name",
    "ckpt with rest, overwritten, direct",
    "ckpt, overwritten by the same content",
    "directory, new name",
    "directory, overwritten",
    "two writers, overwritten",
]


class Interrupted(Recorder):
    """A recorder that does something else before call number `at` (from 1)."""

    calls = 0
    at = -1
    meanwhile: Callable[[], None]

    def before(self, call: str, path: str) -> None:
        # While a number is drawn the series is locked, and the other run, in this same thread, would wait.
        if call != "write_hint" and not path.endswith(f"/{SERIES}.lock"):
            self.calls += 1
            if self.calls == self.at:
                self.meanwhile()


@pytest.mark.parametrize("fails", [False, True], ids=["and the save goes on", "and the save fails"])
@pytest.mark.parametrize("falling", [False, True], ids=["ids rise", "ids fall"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reader_and_a_sweep_at_any_moment_of_a_save(name: str, falling: bool, fails: bool) -> None:
    scenario = SCENARIOS[name]
    tried = 0
    for root, files, series in saved_once(scenario, falling):
        tried += 1
        judge = Judge(scenario, root)

        def meanwhile(root: Path = root, judge: Judge = judge) -> None:
            seen = judge.look(root / DIRECTORY)
            assert not seen.faults
            assert seen.newest >= 1
            newest = choose([root / DIRECTORY], SERIES, key=scenario.key).newest
            assert newest is not None
            Series.resumed(newest, Files()).sweep()
            assert judge.look(root / DIRECTORY) == seen
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        files.meanwhile = meanwhile
        saved = True
        try:
            scenario.save(series, 2, scenario.names[1])
        except SaveError:
            saved = False
        after = judge.look(root / DIRECTORY)
        assert not after.faults, f"at call {files.at}"
        assert saved or fails, f"at call {files.at}"
        assert after.newest == 2 or (after.newest == 1 and not saved), f"at call {files.at}"
        if files.calls < files.at:
            break
    assert tried > 15


def saved_once(scenario: Scenario, falling: bool) -> Iterator[tuple[Path, Interrupted, Series]]:
    """A run that has saved once, to be interrupted at the first call of its next save, at the second..."""
    for at in range(1, 1000):
        with directory_in_memory() as root, identities(falling=falling):
            files = Interrupted(root)
            series = Series.fresh(root / DIRECTORY, SERIES, files)
            scenario.save(series, 1, scenario.names[0])
            files.calls, files.at = 0, at
            yield root, files, series
