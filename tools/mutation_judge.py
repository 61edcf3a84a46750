"""Tries wrong versions of the protocol, each in a process of its own: the tests first, then the simulation.

The parent has imported what is the same for all, so a child begins at once; the changed module exists only
in its memory. A child that runs for too long ends by its limit of processor time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

import pytest

from mutants import Mutant

PROTOCOL: Final = "src/swansong/protocol"
NOT_OF_THE_MACHINES: Final = frozenset({"test_codec.py", "test_handshake.py", "test_diagrams.py"})
"""Tests of `tests/protocol` that say nothing about the machines' behaviour: wire, keys, and a drawing of the
tables, which would notice every row and prove nothing."""
SEEDS: Final = 4_000
LARGE_SEEDS: Final = 40
"""Runs of worlds of 1 to 8 ranks, and of 24 to 64."""
TESTS_S: Final = 15
SIMULATION_S: Final = 120
"""Seconds of processor time; several times what the right program takes."""
MEMORY: Final = 4 << 30
"""Bytes of address space."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant."""

    killed: bool
    by: str
    """The test, the seed and its violation, or what ended the process; empty for a survivor."""
    seconds: float


class Workshop:
    """A copy of the repository's sources and tests; what is imported in this process's children is of it."""

    def __init__(self, repository: Path, copy: Path) -> None:
        """Copy what is needed from `repository` into the empty directory `copy`."""
        self.root = copy
        for folder in ("src", "tests", "tools"):
            shutil.copytree(
                repository / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        shutil.copy(repository / "pyproject.toml", copy)
        sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
        for name in ("hypothesis", "msgspec", "numpy"):  # so that no child has to
            importlib.import_module(name)
        if any(name.startswith("swansong") for name in sys.modules):
            raise RuntimeError("swansong is imported already; no mutant could take its place")

    def machine_files(self, names: Iterable[str]) -> list[Path]:
        """The files of the protocol to be changed."""
        return [self.root / PROTOCOL / f"{name}.py" for name in names]

    def tests(self, mutated: str) -> list[str]:
        """The tests to be run, those of the changed file first."""
        found = [
            path
            for path in sorted((self.root / "tests/protocol").glob("test_*.py"))
            if path.name not in NOT_OF_THE_MACHINES
        ]
        mine = "processor" if mutated == "processor.py" else "controller"
        found.sort(key=lambda path: mine not in path.name)
        return [*map(str, found), str(self.root / "tests/simulation/test_scenarios.py")]


# -- in the child -----------------------------------------------------------------------------------------


class _Changed(MetaPathFinder):
    """Has one module imported as changed."""

    def __init__(self, path: Path, code: CodeType) -> None:
        self.name, self.path, self.code = f"swansong.protocol.{path.stem}", path, code

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return spec_from_file_location(fullname, self.path, loader=_Code(self.name, self.path, self.code))


class _Code(SourceFileLoader):
    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        super().__init__(name, str(path))
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class _FirstFailure:
    """A pytest plugin that remembers the first test that failed."""

    def __init__(self) -> None:
        self.what = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.what:
            self.what = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.what:
            self.what = f"collecting {report.nodeid}"


def _judge(workshop: Workshop, changed: _Changed | None, answer: Connection) -> None:
    """Send what noticed the change, or nothing."""
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    os.chdir(workshop.root)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _limit(TESTS_S)
    if changed is not None:
        sys.meta_path.insert(0, changed)
    killer = _failing_test(workshop.tests(changed.path.name if changed is not None else ""))
    if not killer:
        _limit(SIMULATION_S)
        killer = _failing_seed()
    answer.send(killer)


def _limit(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    ends = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (ends, resource.RLIM_INFINITY))


def _failing_test(tests: Sequence[str]) -> str:
    first = _FirstFailure()
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:timeout",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    status = pytest.main([*options, *tests], plugins=[first])
    return first.what or ("" if status == pytest.ExitCode.OK else f"pytest ended with {status}")


def _failing_seed() -> str:
    """The first violation of an invariant in the simulation."""
    plan = importlib.import_module("simulation.sim_plan")
    world = importlib.import_module("simulation.sim_world")
    for seeds, least, most in ((SEEDS, 1, 8), (LARGE_SEEDS, 24, 64)):
        for seed in range(seeds):
            violation = world.run(plan.random_plan(seed, least, most)).violation
            if violation:
                return f"seed {seed} of {least} to {most} ranks: {violation.splitlines()[0][:200]}"
    return ""


# -- in the parent ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Running:
    mutant: Mutant | None
    process: multiprocessing.process.BaseProcess
    answer: Connection
    since: float = field(default_factory=time.monotonic)


def judged(
    workshop: Workshop, mutants: Iterable[Mutant | None], jobs: int
) -> Iterator[tuple[Mutant | None, Verdict]]:
    """Try each mutant, so many at a time, and for None the right program; yield verdicts as they come."""
    context = multiprocessing.get_context("fork")
    waiting, running = iter(mutants), list[_Running]()
    try:
        while True:
            while len(running) < jobs and (mutant := next(waiting, _END)) is not _END:
                changed = None if mutant is None else _Changed(mutant.path, mutant.compiled())
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_judge, args=(workshop, changed, theirs), daemon=True)
                process.start()
                theirs.close()
                running.append(_Running(mutant, process, ours))
            if not running:
                return
            wait([one.process.sentinel for one in running], timeout=10.0)
            for one in [one for one in running if _is_over(one)]:
                running.remove(one)
                yield one.mutant, _verdict(one)
    finally:
        for one in running:
            one.process.kill()


def _is_over(one: _Running) -> bool:
    """True once a process has ended; one that does not is ended."""
    if time.monotonic() - one.since > 10 * (TESTS_S + SIMULATION_S):  # it sleeps: no processor time is used
        one.process.kill()
        one.process.join()
    return not one.process.is_alive()


def _verdict(one: _Running) -> Verdict:
    seconds = round(time.monotonic() - one.since, 2)
    try:
        killer: str = one.answer.recv()
    except EOFError:
        code = one.process.exitcode or 0
        ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        killer = "took too long" if -code in (signal.SIGXCPU, signal.SIGKILL) else ending
    one.answer.close()
    one.process.join()
    return Verdict(bool(killer), killer, seconds)


_END: Final = Mutant("", Path(), None, None)  # type: ignore[arg-type]
