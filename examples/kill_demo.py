"""Several processes train LeNet5; one is killed at a random moment, and no step is lost.

    python examples/kill_demo.py --framework torch --kill rank --signal KILL --seed 1

The job is run twice: undisturbed, and with a process killed (terminated, stopped, made to throw). The others
save what is in their memory, the launcher starts the job again, and it resumes. At the end both runs must
have the same bits in everything: parameters, optimizer, statistics, generators. How many steps were lost is
counted by what the ranks wrote of each step they made, those included that a dead one had made:

    start STEP PID      it begins after that step
    step STEP           the optimizer has updated
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from digits import write_digits
from kill_job import FRAMEWORKS, OUT, Job, controller_of, running

from swansong.errors import SwansongError
from swansong.protocol.operator import Status
from swansong.store.latest import choose
from swansong.store.opening import open_checkpoint

PATIENCE_S = 300.0
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP, "raise": signal.SIGUSR1}
"""The last makes a rank throw: see `no_good` in lenet5_torch.py."""
WHOM = {"rank": "a rank", "controller": "the controller", "saver": "a rank that saves"}
BALLAST_MIB = 96
"""Of state, where a saver is to be met while it saves: else it is done in milliseconds."""
STALL_S = 3.0


class Display:
    """Progress: a bar on a terminal, elsewhere a line now and then."""

    WIDTH = 40

    def __init__(self, steps: int) -> None:
        """Of so many steps."""
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._shown = -1

    def progress(self, step: int) -> None:
        """So many steps are made by all ranks."""
        if step == self._shown:
            return
        tenth = step * 10 // self._steps
        if self._live:
            full = self.WIDTH * step // self._steps
            bar = f"{'█' * full}{'·' * (self.WIDTH - full)}"
            print(f"\r  {bar} step {step:3} of {self._steps}", end="", flush=True)
        elif tenth != self._shown * 10 // self._steps:
            print(f"  step {step} of {self._steps}", flush=True)
        self._shown = step

    def done(self) -> None:
        """What was shown last stays."""
        if self._live:
            print(flush=True)

    def incident(self, report: dict[str, Any]) -> None:
        """What the survivors did, and how long it took."""
        first = report["first_fault"]
        who = "told by rank" if first["kind"] == "stalled" else "rank"
        savers = ", ".join(f"rank {rank}" for rank in sorted(set(report["savers"].values())))
        stands = sorted({str(rank["step"]) for rank in report["ranks"] if rank["step"] is not None})
        said = {
            "detect": f"{first['kind']}, {who} {first['rank']}: {first['what']}",
            "freeze": f"all updates held; whole at step {', '.join(stands)}",
            "choose": f"{savers} to save step {report['step']}" if savers else report["reason"],
            "save": "written, and durable",
            "commit": f"{report['path']}",
        }
        longest = max([0.001, *(seconds or 0.0 for seconds in report["seconds"].values())])
        for part, what in said.items():
            seconds = report["seconds"][part]
            if seconds is None:
                print(f"    {part:7} {'-':>8}")
                continue
            bar = "█" * max(1, round(12 * seconds / longest))
            print(f"    {part:7} {1000 * seconds:5.0f} ms {bar:12} {what}")
        sys.stdout.flush()


@dataclass(frozen=True)
class Moment:
    """When to kill, and whom."""

    rank: int
    step: int
    fraction: float
    """Of the time that this rank's next step takes."""

    def wait(self, job: Job, shows: Display) -> None:
        """Until it has come."""
        seen, took, at = 0, 0.0, time.monotonic()
        while (step := job.step(self.rank)) < self.step:
            if job.ended():
                raise SystemExit(f"the job ended before step {self.step}; see {job.output}")
            if step != seen:
                seen, took, at = step, time.monotonic() - at, time.monotonic()
                shows.progress(step)
            time.sleep(0.001)
        time.sleep(self.fraction * took)


class Killer:
    """Does it, as the command line says."""

    def __init__(self, arguments: argparse.Namespace, moment: Moment, later_s: float) -> None:
        self._kill, self._signal, self._name = arguments.kill, SIGNALS[arguments.signal], arguments.signal
        self._moment, self._later_s = moment, later_s

    def strike(self, job: Job) -> None:
        """Kill. Whom the command line names gets the signal; a rank must fail for the others to have work."""
        if self._kill == "controller":
            pid = job.controllers()[-1]
            ignored = ", which ignores it" if self._signal is signal.SIGTERM else ""
            self._send(f"the controller, process {pid}{ignored}", pid, self._signal)
            time.sleep(self._later_s)
            self._strike_rank(job, signal.SIGKILL)
        elif self._kill == "saver":
            with controller_of(job) as statuses:
                self._strike_rank(job, signal.SIGKILL)
                self._strike_saver(job, statuses)
        else:
            self._strike_rank(job, self._signal)

    def _strike_rank(self, job: Job, number: signal.Signals) -> None:
        rank = self._moment.rank
        self._send(f"rank {rank}, which has made step {job.step(rank)}", job.pid(rank), number)

    def _strike_saver(self, job: Job, statuses: Iterator[Status]) -> None:
        with suppress(SwansongError, OSError):
            for status in statuses:
                if status.incident is not None and status.incident.savers:
                    saver = status.incident.savers[0]
                    self._send(f"rank {saver}, which is saving", job.pid(saver), self._signal)
                    return
                if status.last is not None:
                    break
        print("  no saver was met: it was too quick")

    def _send(self, what: str, pid: int, number: signal.Signals) -> None:
        print(f"  {'raise' if number is signal.SIGUSR1 else number.name}: {what}", flush=True)
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def differences(first: str, second: str) -> list[str]:
    """What the last checkpoints of two runs do not have in common, bit for bit."""
    contents: list[dict[str, Any]] = []
    for name in (first, second):
        newest = choose([OUT / name], "lenet5").newest
        if newest is None or newest.manifest is None:
            raise SystemExit(f"{OUT / name}: no checkpoint that verifies")
        with open_checkpoint(newest.path) as checkpoint:
            read = checkpoint.read_all().items()
            tensors = {name: (one.dtype.name, one.shape, one.array.tobytes()) for name, one in read}
        manifest = newest.manifest
        rest = {"step": manifest.step, "objects": manifest.objects, "ranks": manifest.rank_objects}
        contents.append(tensors | rest)
    one, other = contents
    found = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    print(f"  compared: {len(one) - 3} tensors, and whatever else is in the checkpoints")
    return sorted(found)


def demonstrate(arguments: argparse.Namespace) -> int:
    """Run both jobs; the exit code."""
    draw = random.Random(arguments.seed)
    ranks, steps = arguments.ranks, FRAMEWORKS[arguments.framework].steps(arguments.ranks)
    moment = Moment(draw.randrange(ranks), draw.randrange(steps // 4, 3 * steps // 4), draw.random())
    options = ["--ballast-mib", str(BALLAST_MIB)] if arguments.kill == "saver" else []
    if arguments.signal == "STOP":
        options += ["--stall-timeout-s", str(STALL_S)]
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    write_digits(OUT / "MNIST_Data")

    print(f"An undisturbed run: {ranks} ranks, {steps} steps.")
    with running(arguments.framework, "undisturbed", ranks, *options) as job:
        if watch(job, Display(steps)):
            raise SystemExit(f"it failed; see {job.output}")
    print(f"\nThe same, disturbed: {arguments.signal} to {WHOM[arguments.kill]}, seed {arguments.seed}.")
    with running(arguments.framework, "disturbed", ranks, *options) as job:
        shows = Display(steps)
        moment.wait(job, shows)
        shows.done()
        Killer(arguments, moment, draw.random()).strike(job)
        if job.framework.patience and arguments.signal != "STOP":
            print(f"  {job.framework.patience}", flush=True)
        if not tell(job, shows):
            raise SystemExit(f"nobody noticed; see {job.output}")
        if arguments.signal == "STOP":
            print("  SIGCONT: whoever was stopped goes on")
            for rank in job.ranks:
                with suppress(ProcessLookupError):
                    os.kill(job.pid(rank), signal.SIGCONT)
        code = watch(job, shows)
        lost, starts, further = job.steps_lost(), [start for start, _ in job.starts()], job.incidents()[1:]
    for report in further:
        print("  A further incident:")
        shows.incident(report)
    again = [f"again after step {start}" for start in starts[1:]] or ["and never again"]
    print(f"  the job was started, {', '.join(again)}; its exit code is {code}")
    different = differences("undisturbed", "disturbed")
    same = "equal, bit for bit" if not different else f"DIFFERENT: {', '.join(different)}"
    print(f"\nVerdict: {lost} steps lost; the final state is {same}.")
    return 0 if code == 0 and lost == 0 and not different else 1


def tell(job: Job, shows: Display) -> bool:
    """Wait for the incident to end, and show it."""
    ends = time.monotonic() + PATIENCE_S
    while not (reports := job.incidents()):
        if time.monotonic() > ends or job.ended():
            return False
        time.sleep(0.01)
    if len(controllers := job.controllers()) > 1:
        print(f"  the ranks have started another controller, process {controllers[-1]}")
    shows.incident(reports[0])
    return True


def watch(job: Job, shows: Display) -> int:
    """Show a job's progress to the end; the launcher's exit code."""
    while not job.ended():
        shows.progress(min(job.step(rank) for rank in job.ranks))
        time.sleep(0.05)
    shows.progress(min(job.step(rank) for rank in job.ranks))
    shows.done()
    return job.process.returncode


def main() -> int:
    """Parse the command line, and demonstrate."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="torch")
    parser.add_argument("--kill", choices=list(WHOM), default="rank")
    parser.add_argument("--signal", choices=list(SIGNALS), default="KILL")
    parser.add_argument("--ranks", type=int, default=4, help="how many processes train (4)")
    parser.add_argument("--seed", type=int, default=1, help="of the moment, and of who it is")
    arguments = parser.parse_args()
    if arguments.ranks < (least := 3 if arguments.kill == "saver" else 2):
        parser.error(f"--ranks {arguments.ranks}: wanted {least} at least, so that one is left to save")
    if arguments.framework == "mindspore" and arguments.kill == "saver":
        parser.error("--framework mindspore --kill saver: a saver is done before it can be met; use torch")
    if arguments.kill == "controller" and arguments.signal in ("STOP", "raise"):
        parser.error(
            f"--kill controller --signal {arguments.signal}: wanted KILL, or TERM (which it ignores); one "
            "that is stopped holds its port, and is outside of what is promised (docs/guarantee.md)"
        )
    return demonstrate(arguments)


if __name__ == "__main__":
    sys.exit(main())
