"""`async_save="process"`: the same checkpoints, whoever dies, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from array_job import PATIENCE_S, until
from child_process import forked
from store_support import KEY, same, tensors, tree, visible
from swansong.errors import DiskFullError, SaveError, SwansongWarning, UnrepresentableError
from swansong.persist import series_choice
from swansong.persist.saver import Request, Saver
from swansong.policy.keep import Committed, KeepLast, KeepPolicy
from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.remote import Remote
from swansong.store.series import Series
from swansong.store.writing import await_writers

MIB = 1 << 20
JOB = Path(__file__).parents[1] / "writer_job.py"
SUFFIX = {"directory": "", "ckpt": ".ckpt", "safetensors": ".safetensors"}


@dataclass
class Job:
    """Saves into one series."""

    saver: Saver
    series: Series
    suffix: str = ""

    @property
    def remote(self) -> Remote:
        assert self.saver._remote is not None
        return self.saver._remote

    @property
    def worker(self) -> int:
        """Id of its process."""
        assert self.remote._worker is not None
        return self.remote._worker._process.pid

    def begin(self, step: int, content: Content) -> None:
        self.saver.save(
            lambda: Request(
                series=self.series,
                name=f"m-{step}{self.suffix}",
                content=content,
                point=Point(step=step),
                kind="periodic",
            )
        )

    def save(self, step: int, content: Content | None = None) -> None:
        self.begin(step, content or Content(tensors=tensors(step)))
        self.saver.wait()


@contextmanager
def job(
    directory: Path,
    mode: Any = "process",
    options: SaveOptions | None = None,
    keep: KeepPolicy | None = None,
) -> Iterator[Job]:
    options = options or SaveOptions()
    saver = Saver(Files(), keep or KeepLast(3), options, background=mode, on_error="raise")
    try:
        yield Job(saver, Series.fresh(directory, "m", Files()), SUFFIX[options.container])
    finally:
        with suppress(SaveError):
            saver.wait()
        saver.close()


def descriptors() -> set[str]:
    """Number and kind of each."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found.add(f"{entry.name}: {entry.readlink()}")
    return {entry for entry in found if not entry.endswith("/fd")}


def ended(pid: int) -> bool:
    """Whether a child has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def opened_by(pid: int) -> list[str]:
    return sorted(entry.name for entry in Path(f"/proc/{pid}/fd").iterdir())


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No descriptor, mapping, thread or child."""
    gc.collect()
    before = descriptors()
    yield
    gc.collect()
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("swansong")]
    assert "swansong" not in Path("/proc/self/maps").read_text().replace(str(Path(__file__).parents[2]), "")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def rich() -> Content:
    base = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    return Content(
        tensors={
            "transposed": HostTensor.of(base.T),
            "half": HostTensor.of(np.arange(7, dtype=np.uint16), dtype="bfloat16"),
            "0-dim": HostTensor.of(np.array(7, np.int64)),
            "empty": HostTensor.of(np.zeros((0, 3), np.float16)),
            "large": HostTensor.of(np.random.default_rng(1).integers(0, 255, 17 * MIB, np.uint8)),
            "ä/ö": HostTensor.of(np.array([True, False])),
        },
        append_info={"n": 3, "lr": float("inf"), "big": 2**64 - 1, "yes": True},
        objects={"text": "x", "bytes": b"\0\xff", "nested": [1, 2.0, None, {(1, "k"): float("nan")}]},
        aliases={"tied": "half"},
        inexact=({"what": "dropout", "reason": "none"},),
    )


@pytest.mark.parametrize(
    "options",
    [
        SaveOptions(),
        SaveOptions(container="ckpt", crc=True),
        SaveOptions(container="safetensors"),
        SaveOptions(key=KEY),
        SaveOptions(container="ckpt", key=KEY),
        SaveOptions(container="ckpt", key=KEY, mode="AES-CBC"),
    ],
    ids=["directory", "ckpt", "safetensors", "sealed", "ckpt GCM", "ckpt CBC"],
)
def test_the_same_is_on_disk_as_when_training_waits(tmp_path: Path, options: SaveOptions) -> None:
    content = rich()
    if options.container == "ckpt":
        content = Content(
            tensors=content.tensors,
            rest=tensors(5),
            objects=content.objects,
            append_info={"t": tensors()["bias"]},
        )
    for mode in ("process", None):
        (tmp_path / str(mode)).mkdir()
        with job(tmp_path / str(mode), mode, options) as saving:
            saving.save(1, content)
    opened = []
    for mode in ("process", None):
        path = tmp_path / str(mode) / f"m-1{SUFFIX[options.container]}"
        with open_checkpoint(path, key=options.key) as checkpoint:
            checkpoint.verify()
            loaded = {name: checkpoint.read(name) for name in checkpoint.entries}
            known = checkpoint.manifest
            assert known is not None
            opened.append(
                (loaded, known.objects, known.append_info, known.aliases, known.inexact, known.step)
            )
    assert same(opened[0][0], opened[1][0])
    assert opened[0][1:] == opened[1][1:]
    if options.key is None:  # no salt: the very bytes
        files = [
            sorted(data for name, data in tree(tmp_path / str(mode)).items() if data and "json" not in name)
            for mode in ("process", None)
        ]
        assert files[0] == files[1]


@pytest.mark.parametrize("mine", [False, True], ids=["KeepLast", "a policy of the user's"])
def test_older_checkpoints_are_pruned(tmp_path: Path, mine: bool) -> None:
    class Users(KeepLast):
        def doomed(self, committed: Any, newest: str) -> list[str]:
            asked.append([entry.seq for entry in committed if isinstance(entry, Committed)])
            return super().doomed(committed, newest)

    asked: list[list[int]] = []
    with job(tmp_path, keep=Users(2) if mine else KeepLast(2)) as saving:
        for step in (1, 2, 3):
            saving.save(step)
        assert saving.saver.latest == tmp_path / "m-3"
    assert visible(tmp_path) == {"m-2", "m-3"}
    assert bool(asked) is mine


def test_what_cannot_be_stored_is_the_same_error(tmp_path: Path) -> None:
    with job(tmp_path) as saving:
        with pytest.raises(UnrepresentableError, match=r"x: builtins\.object has no exact form"):
            saving.save(1, Content(tensors={}, objects={"x": object()}))
        with pytest.raises(UnrepresentableError, match="only a single file leaves anything out"):
            saving.save(1, Content(tensors=tensors(), rest=tensors(more=(3,))))
        saving.save(2)


def test_later_changes_do_not_reach_what_was_captured(tmp_path: Path) -> None:
    array = np.ones(MIB, np.float32)
    with job(tmp_path) as saving:
        saving.save(1)
        os.kill(saving.worker, signal.SIGSTOP)
        saving.begin(2, Content(tensors={"w": HostTensor.of(array)}))
        array[:] = 2
        os.kill(saving.worker, signal.SIGCONT)
    with open_checkpoint(tmp_path / "m-2") as checkpoint:
        assert (checkpoint.read("w").array == 1).all()


# -- the worker dies ----------------------------------------------------------------------------------


def test_a_worker_that_is_killed_fails_the_save_and_the_next_has_a_new_one(tmp_path: Path) -> None:
    with job(tmp_path) as saving:
        saving.save(1)
        first = saving.worker
        os.kill(first, signal.SIGSTOP)
        saving.begin(2, Content(tensors=tensors(2)))
        until(lambda: not await_quietly(tmp_path))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SaveError, match=rf"m-2: not saved: .*pid {first}\) was killed by SIGKILL"):
            saving.saver.wait()
        saving.save(3)
        assert saving.worker != first
    assert visible(tmp_path) == {"m-1", "m-3"}


def test_a_workers_death_is_noticed_though_a_forked_child_holds_its_end(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None)
    with job(tmp_path) as saving:
        saving.save(1)
        child = libc.fork()  # behind Python's back, so that nothing is closed there
        if child == 0:
            libc.pause()
        try:
            os.kill(saving.worker, signal.SIGSTOP)
            saving.begin(2, Content(tensors=tensors(2)))
            until(lambda: not await_quietly(tmp_path))
            os.kill(saving.worker, signal.SIGKILL)
            with pytest.raises(SaveError, match="was killed by SIGKILL"):
                saving.saver.wait()
            worker = saving.save(3) or saving.worker
            saving.saver.close()
            assert not Path(f"/proc/{worker}").exists()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_worker_killed_between_two_saves_fails_none(tmp_path: Path) -> None:
    with job(tmp_path) as saving:
        saving.save(1)
        os.kill(saving.worker, signal.SIGKILL)
        until(lambda: saving.remote._worker is not None and saving.remote._worker.ended(0.0))
        saving.save(2)


def test_workers_killed_at_any_moment_leave_nothing_half_made(tmp_path: Path) -> None:
    chance, failed = random.Random(7), 0
    content = Content(tensors={"w": HostTensor.of(np.ones(20 * MIB, np.uint8))})
    with job(tmp_path) as saving:
        saving.save(0)
        for step in range(1, 8):
            worker = saving.worker
            timer = threading.Timer(chance.uniform(0, 0.08), os.kill, (worker, signal.SIGKILL))
            timer.start()
            try:
                saving.save(step, content)
            except SaveError as error:
                failed += 1
                assert "was killed by SIGKILL" in str(error)  # noqa: PT017 - either outcome is right
            timer.join()
            until(lambda pid=worker: ended(pid))  # which may be after the save
            assert saving.series.space.unfinished() == []
            saving.save(100 + step)  # in a new process
            for found in saving.series.found():
                with open_checkpoint(found.path) as checkpoint:
                    checkpoint.verify()
    assert failed


def test_a_worker_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(tmp_path) as saving:
        with monkeypatch.context() as patch:
            patch.setattr("swansong.store.remote.isolated_python", lambda _: [sys.executable, "-c", "1 / 0"])
            with pytest.raises(SaveError, match="ended with status 1: ZeroDivisionError"):
                saving.save(1)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            with pytest.raises(SaveError, match="No such file"):
                saving.save(1)
        saving.save(1)


# -- the job dies -------------------------------------------------------------------------------------


@contextmanager
def job_process(directory: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The job in a process group of its own, its worker's id, and a descriptor of that."""
    process = subprocess.Popen(
        [sys.executable, JOB, directory, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin:
        try:
            worker = int(process.stdout.readline())
            descriptor = os.pidfd_open(worker)
            try:
                yield process, worker, descriptor
            finally:
                os.close(descriptor)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def go_on(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def ends(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], PATIENCE_S)[0])


@pytest.mark.parametrize("forks", [(), ("fork",)], ids=["", "while its child lives"])
@pytest.mark.parametrize(
    ("fate", "saved"),
    [
        ("before the order", {"m-1"}),
        ("within the order", {"m-1"}),
        ("after the order", {"m-1", "m-2"}),
        ("after the answer", {"m-1", "m-2"}),
    ],
)
def test_a_job_that_is_killed_loses_no_capture_that_was_complete(
    tmp_path: Path, fate: str, saved: set[str], forks: tuple[str, ...]
) -> None:
    with job_process(tmp_path, fate, *forks) as (process, _, worker):
        go_on(process)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert ends(worker)
        assert await_writers(tmp_path, "m", Files(), patience_s=PATIENCE_S)
    series = Series.fresh(tmp_path, "m", Files())
    assert (visible(tmp_path), series.space.unfinished()) == (saved, [])
    for name in saved:
        with open_checkpoint(tmp_path / name) as checkpoint:
            checkpoint.verify()


def begun_at(directory: Path) -> int:
    return Series.fresh(directory, "m", Files()).floor


def resumed_at(directory: Path) -> int:
    how = {"key": None, "allow_fresh": False, "crash_loop_limit": 0}
    return series_choice.resumed(directory, "m", b"0123456789abcdef", 1, Files(), **how).step


@pytest.mark.parametrize("start", [begun_at, resumed_at])
def test_whoever_begins_or_resumes_waits_for_what_is_still_written(
    tmp_path: Path, start: Callable[[Path], int]
) -> None:
    with job_process(tmp_path, "after the order") as (process, pid, worker):
        os.kill(pid, signal.SIGSTOP)
        go_on(process)
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        with pytest.warns(SwansongWarning, match="still writes to series 'm'"):
            assert not await_writers(tmp_path, "m", Files(), patience_s=0.0)
        assert await_writers(tmp_path, "other", Files(), patience_s=0.0)
        begun: list[int] = []
        waiting = threading.Thread(target=lambda: begun.append(start(tmp_path)))
        waiting.start()
        waiting.join(0.1)
        assert not begun
        os.kill(pid, signal.SIGCONT)
        waiting.join()
        assert begun == [2]
        assert ends(worker)


def test_an_interrupt_from_the_terminal_does_not_reach_what_is_written(tmp_path: Path) -> None:
    with job_process(tmp_path, "lives") as (process, pid, worker):
        os.kill(pid, signal.SIGSTOP)
        go_on(process)
        until(lambda: not await_quietly(tmp_path))
        os.killpg(process.pid, signal.SIGINT)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGCONT)
        assert process.wait(PATIENCE_S) == 0
        assert ends(worker)
    assert visible(tmp_path) == {"m-1", "m-2"}


def await_quietly(directory: Path) -> bool:
    try:
        return await_writers(directory, "m", Files(), patience_s=0.0)
    except SwansongWarning:
        return False


def test_an_unguarded_script_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, swansong, swansong.arrays, pathlib\n"
        f"where = pathlib.Path({str(tmp_path)!r})\n"
        "with (where / 'ran').open('a') as file: file.write('x')\n"
        "config = swansong.CheckpointConfig(1, async_save='process', enc_key=b'k' * 32)\n"
        "with swansong.arrays.protect({'w': np.ones(9)}, directory=where / 'c', prefix='m', config=config)"
        " as run:\n"
        "    for _ in range(3): run.step_end()\n"
    )
    subprocess.run([sys.executable, script], check=True, timeout=PATIENCE_S)
    assert (tmp_path / "ran").read_text() == "x"
    assert visible(tmp_path / "c") == {"m-1", "m-2", "m-3"}


# -- what is there, and what is left ------------------------------------------------------------------


def test_the_key_is_in_no_command_line_and_no_environment(tmp_path: Path) -> None:
    with job(tmp_path, options=SaveOptions(key=KEY)) as saving:
        saving.save(1)
        seen = [Path(f"/proc/{saving.worker}/{name}").read_bytes() for name in ("cmdline", "environ")]
        assert all(KEY.material not in text and KEY.material.hex().encode() not in text for text in seen)
        assert b"-I" in seen[0]
        loaded = Path(f"/proc/{saving.worker}/maps").read_text()
        assert "torch" not in loaded
        assert "mindspore" not in loaded


def test_a_hundred_saves_leak_nothing(tmp_path: Path) -> None:
    with job(tmp_path) as saving:
        for step in range(100):
            saving.save(step, Content(tensors={"w": HostTensor.of(np.ones(1000 * (1 + step % 7), np.uint8))}))
            if step == 10:
                first, here = saving.worker, descriptors()
                there = opened_by(first)
        assert saving.worker == first
        assert len(descriptors()) == len(here)
        assert opened_by(first) == there
        assert "swansong-staging" not in Path(f"/proc/{first}/maps").read_text()
        assert len(saving.remote._memory._blocks) <= 2
    assert not Path(f"/proc/{first}").exists()


def test_memory_that_has_become_too_small_is_replaced_and_given_back(tmp_path: Path) -> None:
    with job(tmp_path) as saving:
        for step, size in enumerate((100, 3 * MIB, 5 * MIB, 10)):
            saving.save(step, Content(tensors={"w": HostTensor.of(np.full(size, step, np.uint8))}))
        assert [block.size for block in saving.remote._memory._blocks] == [5 * MIB]
        saving.saver.close()
        assert not list(saving.remote._memory._blocks)
        saving.save(9)


def test_a_forked_child_holds_nothing_and_has_a_worker_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "child").mkdir()

    def child() -> None:
        assert not [entry for entry in descriptors() if "memfd" in entry or "socket" in entry]
        assert "swansong-staging" not in Path("/proc/self/maps").read_text()
        saving.series = Series.fresh(tmp_path / "child", "m", Files())
        saving.save(2)
        assert saving.worker != first
        saving.saver.close()

    with job(tmp_path) as saving:
        saving.save(1)
        first = saving.worker
        assert forked(child) == 0
        saving.save(2)
        assert saving.worker == first
    assert visible(tmp_path / "child") == {"m-2"}


def test_a_full_disk_is_the_saves_error(tmp_path: Path) -> None:
    large = Content(tensors={"w": HostTensor.of(np.ones(2 * MIB, np.uint8))})
    with job(tmp_path) as saving:
        saving.save(1)
        before = resource.prlimit(saving.worker, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        with pytest.raises(DiskFullError, match=r"m-2: not saved: File too large") as caught:
            saving.save(2, large)
        assert caught.value.needed > 2 * MIB
        assert saving.series.space.unfinished() == []
        resource.prlimit(saving.worker, resource.RLIMIT_FSIZE, before)
        saving.save(3, large)
    assert visible(tmp_path) == {"m-1", "m-3"}


def test_no_memory_for_a_copy_is_the_saves_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with job(tmp_path) as saving:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(SaveError, match=r"no memory for .* bytes to copy the state to"):
                saving.save(1)
        saving.save(1)


def test_closed_while_a_save_runs_the_worker_ends_after_it(tmp_path: Path) -> None:
    with job(tmp_path) as saving:
        saving.save(1)
        worker = saving.worker
        os.kill(worker, signal.SIGSTOP)
        saving.begin(2, Content(tensors=tensors(2)))
        until(lambda: saving.remote._guard.locked())
        saving.saver.close()
        os.kill(worker, signal.SIGCONT)
        saving.saver.wait()
        until(lambda: not Path(f"/proc/{worker}").exists())
    assert visible(tmp_path) == {"m-1", "m-2"}
