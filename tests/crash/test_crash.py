"""After a power cut at any moment, the newest save that returned (or a later one) loads whole.

Read crash_model for what a power cut may do, crash_judge for what is required afterwards, crash_scenarios for
the runs that are tried, crash_mutants for the wrong programs that must be found out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from crash.crash_judge import Judge, materialise
from crash.crash_model import Crash, crashes
from crash.crash_mutants import (
    Mutant,
    commit_too_early,
    neighbours_exchanged,
    pruned_too_early,
    without_a_sync,
)
from crash.crash_places import directory_in_memory
from crash.crash_recorder import Operation, Recorder, Snapshot
from crash.crash_scenarios import DIRECTORY, SCENARIOS, SERIES, Scenario, identities, record
from swansong.store.latest import choose
from swansong.store.series import Series

SEED = 20240607

MAKERS = (without_a_sync, neighbours_exchanged, commit_too_early, pruned_too_early)
HARMLESS = {
    "without: sync_directory D/.swansong (after: make_directory D/.swansong/tmp)": (
        "the temporary directory may be lost, the next save makes it anew"
    ),
    "without: sync_directory D (after: make_directory D/.swansong)": (
        "a native directory keeps nothing in the control directory; with single files this is found out"
    ),
    "without: sync D/.swansong/tmp/*/part-*": "a part is promised to its committer, not beyond a power cut",
    "without: sync_directory D/.swansong/tmp/* (after: sync D/.swansong/tmp/*/part-*": "the same",
    "exchanged: rename D/.swansong/tmp/*/c*.safetensors* -> D/net-1_1/c* before: *": (
        "data files enter an existing directory in any order, before the manifest that lists them"
    ),
    "exchanged: unlink * before: unlink *": "leftovers and pruned checkpoints go in any order",
    "without: sync_directory D* (after: returned *)": (
        "what a sweep or prune removes next may have been made useless by a process that died; here none "
        "did, see test_a_sweep_after_a_killed_process_must_sync"
    ),
    "without: sync_directory D/net-1_2 (after: unlink D/.swansong/tmp/*.lock)": "the same",
    "exchanged: unlink D/.swansong/net-1_1.ckpt.*.json before: sync_directory D": "the same",
}
"""A change that no crash finds out (a pattern) -> why the changed program is as right as the real one."""


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """Two empty directories: one to record in, one for the states of the disk."""
    with directory_in_memory() as root, directory_in_memory() as scratch:
        yield root, scratch


def rows() -> Iterator[object]:
    """Every scenario; where several manifests claim one file, with either one looked at first."""
    for name, scenario in SCENARIOS.items():
        yield pytest.param(scenario, False, id=name)
        if len(set(scenario.names)) < len(scenario.names) and scenario.container != "directory":
            yield pytest.param(scenario, True, id=f"{name}, ids fall")


@pytest.mark.parametrize(("scenario", "falling"), [*rows()])
def test_every_crash_leaves_the_newest_returned_save_or_a_later_one(
    scenario: Scenario, falling: bool, places: tuple[Path, Path]
) -> None:
    trace, initial = record(scenario, places[0], falling=falling)
    count = assert_survives(Judge(scenario, places[1]), trace, crashes(trace, initial, seed=SEED))
    assert count > 5 * len(trace)


def test_programs_with_a_sync_left_out_or_steps_out_of_order_are_found_out(places: tuple[Path, Path]) -> None:
    explained: set[str] = set()
    unexplained: list[str] = []
    for name, scenario in SCENARIOS.items():
        if scenario.same_content:
            continue  # what is lost is replaced by its equal: there is less to find out
        for path in places:
            (path / name).mkdir()
        trace, initial = record(scenario, places[0] / name)
        judge = Judge(scenario, places[1] / name)
        for mutant in (mutant for make in MAKERS for mutant in make(trace)):
            if not is_found_out(mutant, initial, judge):
                what = re.sub(rf"\b{DIRECTORY}\b", "D", mutant.what)
                reasons = {pattern for pattern in HARMLESS if fnmatchcase(what, pattern + "*")}
                explained |= reasons
                unexplained += [] if reasons else [f"{name}: {what}"]
    assert not unexplained, f"seed {SEED}"
    assert explained == set(HARMLESS)


@pytest.mark.parametrize(
    "name",
    [
        "ckpt with rest, overwritten, direct",
        "ckpt, keep last 1",
        "directory, overwritten",
        "directory, keep last 1",
    ],
)
def test_a_process_is_killed_and_later_the_power_goes(name: str, places: tuple[Path, Path]) -> None:
    """What a killed process has done is seen by the next one, and may yet be lost."""
    scenario = SCENARIOS[name]
    judge = Judge(scenario, places[1])
    for trace, initial, death in killed_then_swept(scenario, places[0]):
        assert_survives(judge, trace, crashes(trace, initial, seed=SEED, start=death))


@pytest.mark.parametrize(
    ("name", "sync"),
    [
        ("ckpt with rest, overwritten, direct", "checkpoints"),
        ("directory, overwritten", "checkpoints/net-1_1"),
        ("directory, keep last 1", "checkpoints/.swansong/tmp"),
    ],
)
def test_a_sweep_after_a_killed_process_must_sync(name: str, sync: str, places: tuple[Path, Path]) -> None:
    judge = Judge(SCENARIOS[name], places[1])
    found_out = {
        mutant.what
        for trace, initial, death in killed_then_swept(SCENARIOS[name], places[0])
        for mutant in without_a_sync(trace)
        if mutant.start >= death and is_found_out(mutant, initial, judge)
    }
    assert any(what.startswith(f"without: sync_directory {sync} ") for what in found_out)


@pytest.mark.parametrize(
    "name", ["ckpt with rest, overwritten, direct", "directory, overwritten", "directory, keep last 1"]
)
def test_a_second_crash_during_the_recovery_from_the_first(name: str, places: tuple[Path, Path]) -> None:
    scenario = SCENARIOS[name]
    again = replace(scenario, names=(*scenario.names, scenario.names[-1]))
    trace, initial = record(scenario, places[0])
    states = list(crashes(trace, initial, seed=SEED))
    judge = Judge(again, places[1])
    for number, first in enumerate(random.Random(SEED).sample(states, 3)):
        root = materialise(first.tree, places[1] / f"first-{number}")
        files = Recorder(root)
        with identities(start=0x80000000):
            series = resume(scenario, root / DIRECTORY, files)
            saved = scenario.save(series, len(again.names), again.names[-1])
            files.returned(len(again.names))
            series.prune(scenario.keep, saved.id)
        second = crashes(files.trace, files.initial, seed=SEED, returned=first.returned)
        assert_survives(judge, files.trace, second, f"first crash: {first.lost}")


# -- what the tests are made of


def assert_survives(judge: Judge, trace: list[Operation], states: Iterable[Crash], context: str = "") -> int:
    """Fail at the first state that breaks a promise, and show how it came to be; return how many hold."""
    count = 0
    for count, crash in enumerate(states, 1):  # noqa: B007
        if violations := judge.violations(crash):
            done = "\n  ".join(
                str(operation) for operation in trace[max(0, crash.prefix - 12) : crash.prefix]
            )
            pytest.fail(
                f"{'; '.join(violations)}\nseed {SEED} {context}\nafter {crash.prefix} operations, the last "
                f"ones:\n  {done}\n{crash.lost}\nleft: {sorted(crash.tree)}"
            )
    return count


def is_found_out(mutant: Mutant, initial: Snapshot, judge: Judge) -> bool:
    """True if some crash of a changed trace breaks a promise."""
    states = crashes(mutant.trace, initial, seed=SEED, start=mutant.start)
    return any(judge.violations(state, go_on=False) for state in states)


def resume(scenario: Scenario, directory: Path, files: Recorder) -> Series:
    """Begin a new run as users do, and sweep."""
    newest = choose([directory], SERIES, key=scenario.key).newest if directory.is_dir() else None
    series = Series.resumed(newest, files) if newest is not None else Series.fresh(directory, SERIES, files)
    series.sweep()
    return series


class KilledError(BaseException):
    """Ends a run at once: nothing that it would do afterwards, cleaning up included, is done."""


class Mortal(Recorder):
    """A recorder whose process can be killed before a given call."""

    calls = 0
    dies_at = -1
    dead = False

    def before(self, call: str, path: str) -> None:
        self.calls += 1
        self.dead |= self.calls == self.dies_at
        if self.dead:
            raise KilledError


def killed_then_swept(scenario: Scenario, places: Path) -> Iterator[tuple[list[Operation], Snapshot, int]]:
    """Traces of a run killed at each call of its second save, and of the sweep of the next run."""
    last = -1
    for call in range(1, 1000):
        root = places / f"killed-{call}"
        root.mkdir()
        files = Mortal(root)
        with identities():
            series = Series.fresh(root / DIRECTORY, SERIES, files)
            scenario.save(series, 1, scenario.names[0])
            files.returned(1)
            files.dies_at = files.calls + call
            try:
                saved = scenario.save(series, 2, scenario.names[1])
                files.returned(2)
                series.prune(scenario.keep, saved.id)
            except KilledError:
                pass
            if not files.dead:
                assert last > 15
                return
            last = call
            files.dies_at, files.dead = -1, False
            death = len(files.trace)
            resume(scenario, root / DIRECTORY, files)
        yield files.trace, files.initial, death
