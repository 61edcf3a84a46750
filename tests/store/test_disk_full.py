"""A full disk, and any other call that the operating system refuses: the save fails, nothing else does."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.crash_judge import Judge
from crash.crash_model import crashes
from crash.crash_places import directory_in_memory
from crash.crash_recorder import Recorder, Sync
from crash.crash_scenarios import DIRECTORY, SERIES, Scenario
from swansong.errors import DiskFullError, SaveError
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.series import Series

MIB = 1 << 20
SCENARIOS = {
    "ckpt with rest, overwritten": Scenario(names=("net-1_1.ckpt", "net-1_1.ckpt"), rest=True),
    "ckpt, new name": Scenario(names=("net-1_1.ckpt", "net-1_2.ckpt"), direct=True),
    "directory, overwritten": Scenario(names=("net-1_1", "net-1_1"), container="directory"),
    "directory, new name": Scenario(names=("net-1_1", "net-1_2"), container="directory", direct=True),
    "two writers": Scenario(names=("net-1_1", "net-1_2"), container="directory", writers=2),
}
"""Two saves each; the second is the one that fails."""
EACH = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory for very many saves."""
    with directory_in_memory() as path:
        yield path


# -- a disk that is really full


@dataclass(frozen=True, slots=True)
class Disk:
    """A place that can be filled."""

    root: Path
    fill: Callable[[], None]
    free: Callable[[], None]


@contextmanager
def small_file_system(root: Path) -> Iterator[Disk]:
    """Four MiB of memory as a file system of its own, filled to the last block."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "swansong-test", root], check=True)
    filler = root / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    try:
        yield Disk(root, fill, filler.unlink)
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)


@contextmanager
def file_size_limit(root: Path) -> Iterator[Disk]:
    """No file may be larger than 64 KiB (RLIMIT_FSIZE), which needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> Callable[[], None]:
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    try:
        yield Disk(root, limit(64 * 1024), limit(soft))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def may_mount() -> bool:
    """True with CAP_SYS_ADMIN."""
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 21 & 1)


DISKS = {"file size limit": file_size_limit} | (
    {"small file system": small_file_system} if may_mount() else {}
)


@pytest.mark.parametrize("make_disk", DISKS.values(), ids=DISKS)
@EACH
def test_a_full_disk_fails_the_save_and_nothing_else(
    scenario: Scenario, make_disk: Callable[[Path], object], tmp_path: Path
) -> None:
    large = Scenario(
        names=scenario.names,
        container=scenario.container,
        rest=scenario.rest,
        rows=4096,
        writers=scenario.writers,
    )
    root = tmp_path / "disk"
    root.mkdir()
    with make_disk(root) as disk:
        series = Series.fresh(disk.root / DIRECTORY, SERIES, Files())
        large.save(series, 1, large.names[0])
        disk.fill()
        with pytest.raises(DiskFullError) as failure:
            large.save(series, 2, large.names[1])
        disk.free()
        needed = failure.value.needed
        assert MIB // large.writers < needed < 1.1 * MIB
        assert f"{needed:,} bytes were needed, {failure.value.free:,} are free" in str(failure.value)
        assert failure.value.free == 0 or make_disk is file_size_limit
        assert failure.value.path.startswith(str(disk.root))
        assert_clean(series, large, 1)
        large.save(series, 3, large.names[1])
        assert newest_number(disk.root, large) == 3


# -- calls that fail


class Failing(Recorder):
    """A recorder whose call number `at` (from 1) fails."""

    calls = 0
    at = -1
    failed = ""
    done = False
    """Fail after the thing was done, as a server does whose answer is lost."""
    lasting = False
    """From then on every call that takes space fails."""
    error: BaseException = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def before(self, call: str, path: str) -> None:
        self.calls += 1
        if not self.done:
            self._fail(call, path)

    def after(self, call: str, path: str) -> None:
        if self.done:
            self._fail(call, path)

    def _fail(self, call: str, path: str) -> None:
        takes_space = call in (
            "make_directory",
            "create",
            "lock",
            "preallocate",
            "write",
            "write_hint",
            "rename",
        )
        if self.calls == self.at or (self.lasting and takes_space and 0 < self.at < self.calls):
            self.failed = self.failed or f"{call} {path}"
            raise self.error


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@EACH
def test_no_space_at_any_call_fails_the_save_and_nothing_else(
    scenario: Scenario, lasting: bool, place: Path
) -> None:
    for files, series, error in failing_saves(scenario, place, done=False, lasting=lasting):
        assert_failed_cleanly_or_saved_durably(files, series, error, scenario, DiskFullError)


@EACH
def test_a_call_that_fails_after_the_thing_was_done_harms_nothing(scenario: Scenario, place: Path) -> None:
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    for files, series, raised in failing_saves(scenario, place, done=True, error=error):
        assert_failed_cleanly_or_saved_durably(files, series, raised, scenario, SaveError)


@EACH
def test_an_interrupt_at_any_call_passes_and_harms_nothing(scenario: Scenario, place: Path) -> None:
    for done in (False, True):
        for files, series, raised in failing_saves(scenario, place, done=done, error=KeyboardInterrupt()):
            assert_failed_cleanly_or_saved_durably(files, series, raised, scenario, KeyboardInterrupt)


@EACH
def test_a_failed_fsync_is_not_tried_again_on_the_same_file(scenario: Scenario, place: Path) -> None:
    """The kernel forgets the error and may drop the data: a second fsync would succeed, and lie."""
    tried = 0
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    for files, _, raised in failing_saves(scenario, place, done=True, error=error):
        call, _, path = files.failed.partition(" ")
        if call in ("sync", "sync_directory"):
            tried += 1
            synced = [o for o in files.trace if isinstance(o, Sync) and (o.call, o.path) == (call, path)]
            assert isinstance(raised, SaveError)
            assert synced[-1].inode not in [o.inode for o in synced[:-1]] or call == "sync_directory"
    assert tried >= 4


# -- what the tests are made of


def failing_saves(
    scenario: Scenario, place: Path, *, done: bool, error: BaseException | None = None, lasting: bool = False
) -> Iterator[tuple[Failing, Series, BaseException | None]]:
    """The second save of a scenario, failing at its first call, at its second... until it does not fail."""
    base = place / f"base-{done}"
    scenario.save(Series.fresh(base / DIRECTORY, SERIES, Files()), 1, scenario.names[0])
    for at in range(1, 1000):
        root = place / f"{done}-{at}"
        shutil.copytree(base, root)
        files = Failing(root)
        files.done, files.lasting = done, lasting
        files.error = error or files.error
        newest = choose([root / DIRECTORY], SERIES).newest
        assert newest is not None
        series = Series.resumed(newest, files)
        files.calls, files.at = 0, at
        raised = None
        try:
            scenario.save(series, 2, scenario.names[1])
        except BaseException as caught:
            raised = caught
        if not files.failed:
            assert raised is None
            assert at > 15
            return
        yield files, series, raised
        shutil.rmtree(root)


def assert_failed_cleanly_or_saved_durably(
    files: Failing,
    series: Series,
    raised: BaseException | None,
    scenario: Scenario,
    wanted: type[BaseException],
) -> None:
    files.at, files.lasting = -1, False
    where = f"failing call {files.calls}: {files.failed}"
    number = newest_number(files.root, scenario)
    if raised is None:
        # The failure did not matter: something was left for the next sweep.
        assert number == 2, where
    else:
        # Drawing a number is no part of the save, and raises what the operating system says.
        drawing = isinstance(raised, OSError) and files.failed.endswith("net.lock")
        assert drawing or isinstance(raised, wanted), f"{where}: {raised!r}"
        # After the commit an error says that the save may not be durable; what is visible is whole even so.
        assert number in (1, 2), where
    # No crash may now undo a save that has returned.
    judge = Judge(scenario, files.root.with_name("judged"))
    judge.scratch.mkdir(exist_ok=True)
    returned = 1 if raised is not None else 2
    for crash in crashes(files.trace, files.initial, seed=0, start=len(files.trace), returned=returned):
        assert not judge.violations(crash, go_on=False), f"{where}; {crash.lost}"
    if files.failed.startswith(("unlink", "remove_directory")):
        series.sweep()  # cleaning up was what failed
    assert_clean(series, scenario, number, where)
    scenario.save(series, 3, scenario.names[1])
    assert newest_number(files.root, scenario) == 3, where


def newest_number(root: Path, scenario: Scenario) -> int:
    """The number of the newest save that loads whole. Everything that is visible must."""
    outcome = Judge(scenario, root).look(root / DIRECTORY)
    assert not outcome.faults
    return outcome.newest


def assert_clean(series: Series, scenario: Scenario, number: int, where: str = "") -> None:
    assert newest_number(series.directory.parent, scenario) == number, where
    assert series.space.unfinished() == [], where
