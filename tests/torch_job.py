"""PyTorch jobs of real processes for tests: under torchrun, or forked without; and what they left."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from array_job import QUICK, free_port, running, until
from swansong.engine.address import resolve
from swansong.engine.inquiry import Answer, ask
from swansong.engine.token import FILE_NAME, read_token
from swansong.protocol.operator import OperatorRequest
from swansong.store import catalog
from swansong.store.catalog import Found
from torch_elastic import Elastic
from torch_logs import Log, starts

SCRIPTS = tuple(Path(__file__).with_name(name) for name in ("torch_rank.py", "torch_zygote.py"))
PATIENCE_S = 100.0
SIZE = 3


def environment(**more: str) -> dict[str, str]:
    """For the processes of a job; nothing that a launcher around this one has said is in it."""
    said = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    kept = {name: value for name, value in os.environ.items() if name not in said}
    # The second, or a restarted job finds the store's keys of the start before (PyTorch issue 135712).
    return kept | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | more


def fault(kind: str, at: str, step: int, *ranks: int, start: int = 0) -> dict[str, Any]:
    """`kind`: throw, mark, wait, persist, or the name of a signal; `at`: a place in torch_rank.py.

    With `awaits`, a rank, the fault comes when that rank has come to the end of the step.
    """
    return {"kind": kind, "at": at, "step": step, "ranks": ranks, "start": start}


class Zygote:
    """A process with PyTorch imported, which forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTS[1])],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.ended: dict[int, int] = {}
        """Process id -> exit code, or minus the signal."""
        self._pids: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, ranks: list[tuple[dict[str, str], list[str], str]]) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ranks) + "\n")
        return self._pids.get(timeout=PATIENCE_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match json.loads(line):
                case ["pids", pids]:
                    for pid in pids:  # it may have been another's
                        self.ended.pop(pid, None)
                    self._pids.put(pids)
                case ["ended", pid, code]:
                    self.ended[pid] = code

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)


class TorchJob:
    """One start of a job; or several, as torchrun restarts it."""

    def __init__(
        self, directory: Path, *faults: dict[str, Any], size: int, zygote: Zygote | None, **given: Any
    ) -> None:
        """Under torchrun, or forked by `zygote`; started again `restarts` times."""
        self.directory, self.size = directory / "checkpoints", size
        self.out = directory / f"out-{given.get('start', 0)}"
        self.out.mkdir(parents=True)
        self.port = given.pop("port", None) or free_port()
        self._restarts = given.pop("restarts", 0)
        self._plan: dict[str, Any] = {
            "directory": str(self.directory),
            "out": str(self.out),
            "ttp": f"127.0.0.1:{self.port}",
            "faults": faults,
            "start": 0,
            "epochs": 3,
            "samples": 4 * 4 * size,
            "save_steps": 0,
            "options": QUICK,
            "slow_s": 0.0,
            "compiled": None,
            "init_method": "env://",
        } | given
        self._zygote: Zygote | None = zygote
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._elastic: Elastic | None = None
        self._pids: list[int] = []
        if zygote is None:
            self._torchrun = self._under_torchrun(json.dumps(self._plan))
        elif self._restarts:
            self._elastic = Elastic(self._forked, zygote.ended, restarts=self._restarts)
        else:
            self._forked(0)

    def _forked(self, number: int) -> list[int]:
        """Process ids of start `number` of this job."""
        assert self._zygote is not None
        start = self._plan["start"] + number
        plan = self._plan | {"start": start, "init_method": f"file://{self.out}/store-{start}"}
        more = {"WORLD_SIZE": str(self.size)}
        if self._restarts:
            more["TORCHELASTIC_RUN_ID"] = "forked"  # so that they know of a launcher with limited patience
        self._pids = self._zygote.fork(
            [
                (more | {"RANK": str(rank)}, [json.dumps(plan)], str(self.out / f"stderr-{rank}"))
                for rank in range(self.size)
            ]
        )
        return self._pids

    def _under_torchrun(self, plan: str) -> subprocess.Popen[bytes]:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.size}"]
        launcher += [f"--max-restarts={self._restarts}", "--monitor-interval=0.05"]
        with (self.out / "stderr").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", *launcher, str(SCRIPTS[0]), plan],
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    # -- what it says ---------------------------------------------------------------------------------

    def log(self, rank: int, *what: str) -> Log:
        """Entries of a rank, those of a kind or all."""
        path = self.out / f"rank-{rank}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if not what or entry[0] in what]

    def logs(self) -> list[Log]:
        """By rank."""
        return [self.log(rank) for rank in range(self.size)]

    def pid(self, rank: int) -> int:
        until(lambda: self.log(rank, "start"), PATIENCE_S)
        pid: int = self.log(rank, "start")[-1][2]
        return pid

    def send(self, number: signal.Signals, *ranks: int) -> None:
        for pid in [self.pid(rank) for rank in ranks]:
            os.kill(pid, number)

    def waits(self, *ranks: int) -> None:
        """Wait for ranks to come to their place."""
        until(lambda: all((self.out / f"waits-{rank}").exists() for rank in ranks), PATIENCE_S)

    def go(self) -> None:
        """All that wait go on."""
        (self.out / "go").touch()

    def codes(self) -> list[int]:
        """How the processes ended: a launcher's alone, or each rank's."""
        if self._torchrun is not None:
            return [self._torchrun.wait(PATIENCE_S)]
        if self._elastic is not None:
            code = self._elastic.wait(PATIENCE_S)
            assert code is not None, "the job has not ended"
            return [code]
        assert self._zygote is not None
        ended = self._zygote.ended
        until(lambda: all(pid in ended for pid in self._pids), PATIENCE_S)
        return [ended[pid] for pid in self._pids]

    def ended(self) -> dict[int, int]:
        """How forked ranks have ended that have, by rank."""
        assert self._zygote is not None
        known = self._zygote.ended
        return {rank: known[pid] for rank, pid in enumerate(self._pids) if pid in known}

    def errors(self, rank: int | None = None) -> str:
        """What was said on standard error: by a rank, or under torchrun by all."""
        return (self.out / ("stderr" if rank is None else f"stderr-{rank}")).read_text()

    # -- what is left ---------------------------------------------------------------------------------

    def ask(self, request: OperatorRequest) -> Answer:
        token = read_token(self.directory / FILE_NAME)
        return ask(resolve("127.0.0.1", self.port), token, request, timeout_s=PATIENCE_S)

    def reports(self, count: int) -> list[dict[str, Any]]:
        """Of all incidents, once there are so many, in their order."""
        place = self.directory / ".swansong" / "incidents"
        until(lambda: len(list(place.glob("*.json"))) >= count, PATIENCE_S)
        paths = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        assert len(paths) == count
        return [json.loads(path.read_text()) for path in paths]

    def incident(self) -> dict[str, Any]:
        """The report of the only one."""
        (report,) = self.reports(1)
        return report

    def checkpoints(self) -> list[Found]:
        """Newest first."""
        return catalog.scan(self.directory)

    def steps(self) -> list[tuple[int | None, str]]:
        """Step and kind of the checkpoints, newest first; all of them are sound."""
        found = self.checkpoints()
        assert {one.state for one in found} <= {"committed"}
        return [(one.manifest.step, one.manifest.kind) for one in found if one.manifest is not None]

    def controllers(self) -> list[int]:
        log = self.directory / ".swansong" / "controller.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [int(line.split()[1].rstrip(":")) for line in lines if line.endswith(f":{self.port}")]

    def close(self) -> None:
        self.go()
        if self._elastic is not None:
            self._elastic.close()
        if self._torchrun is not None and self._torchrun.poll() is None:
            self._torchrun.terminate()  # it ends its ranks
            with suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(PATIENCE_S)
        for pid in {*self._pids, *(start.pids[rank] for start in starts(self.logs()) for rank in start.pids)}:
            if is_rank(pid):
                os.kill(pid, signal.SIGKILL)
        for pid in self.controllers():
            try:
                until(lambda pid=pid: not running(pid))  # type: ignore[misc]
            except AssertionError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise


def is_rank(pid: int) -> bool:
    """True if a process is there and what it was: process ids are used again."""
    if not running(pid):
        return False
    with suppress(OSError):
        said = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(str(script).encode() in said for script in SCRIPTS)
    return False


@contextmanager
def torch_job(
    directory: Path, *faults: dict[str, Any], zygote: Zygote | None = None, size: int = SIZE, **given: Any
) -> Iterator[TorchJob]:
    """A job of which nothing is left at the end: under torchrun, or forked by `zygote`."""
    started = TorchJob(directory, *faults, size=size, zygote=zygote, **given)
    try:
        yield started
    finally:
        started.close()
