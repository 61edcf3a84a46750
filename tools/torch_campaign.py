"""Random faults at random moments of a PyTorch job of four ranks; every one is to cost no step.

python tools/torch_campaign.py --faults 200
python tools/torch_campaign.py --faults 40 --launcher torchrun --results campaign.jsonl
python tools/torch_campaign.py --report docs/steps-lost.md forked.jsonl torchrun.jsonl

A job meets fault after fault, each a few steps after it was started again for the one before. Steps lost are
counted by what each rank wrote of itself, dead ones included: the last step that any had made, less the one
that the job was started again after. At each later boundary, each rank's bits must be those of a job that
nobody disturbs. `forked` ranks are ended and started again as torchrun does it, without its imports.

With --results, faults that are in the file already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))  # the jobs live with the tests

from array_job import QUICK, running  # noqa: E402
from torch_campaign_report import page  # noqa: E402
from torch_job import TorchJob, Zygote, torch_job  # noqa: E402
from torch_logs import Log, differing, of_start, starts, steps_lost  # noqa: E402

RANKS = 4
STEPS_PER_EPOCH = 8
FAULTS_PER_JOB = 20
MOST_STEPS = 8
"""Between two faults."""
SLOW_S = 0.0015
"""At each of about a dozen places of a step, so that random moments are spread over all of it."""
MOST_DIFFERENCES = 8
"""That a result lists."""
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Result:
    """What became of a fault."""

    number: int
    kind: str
    launcher: str
    reached: int
    """The last step that any rank had made."""
    saved: int
    """The step that the job went on after."""
    lost: int
    different: tuple[str, ...]
    """Where bits were others than undisturbed, until the next fault."""
    inexact: tuple[str, ...]
    torn: bool
    """Every rank ended inside its update of the same step: no state was whole anywhere, and that was said."""
    outcome: str
    seconds: float | None
    """From the first fault to the commit."""


@dataclass
class Scene:
    """A job, as whoever makes faults sees it."""

    job: TorchJob
    draw: random.Random

    def some(self, count: int) -> list[int]:
        """Ranks, at random."""
        return self.draw.sample(range(RANKS), count)

    def kill(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.job.pid(rank), number)

    def pause(self, most_s: float) -> None:
        """Of random length."""
        time.sleep(self.draw.random() * most_s)


def killed(scene: Scene) -> None:
    scene.kill(signal.SIGKILL, *scene.some(1))


def two_killed(scene: Scene) -> None:
    scene.kill(signal.SIGKILL, *scene.some(2))


def one_after_the_other(scene: Scene) -> None:
    first, second = scene.some(2)
    scene.kill(signal.SIGKILL, first)
    scene.pause(0.06)
    scene.kill(signal.SIGKILL, second)


def throws(scene: Scene) -> None:
    scene.kill(signal.SIGUSR1, *scene.some(1))


def all_throw(scene: Scene) -> None:
    scene.kill(signal.SIGUSR1, *range(RANKS))


def terminated(scene: Scene) -> None:
    scene.kill(signal.SIGTERM, *scene.some(1))


def all_terminated(scene: Scene) -> None:
    scene.kill(signal.SIGTERM, *range(RANKS))


def stopped(scene: Scene) -> None:
    (rank,) = scene.some(1)
    known = len(incidents(scene.job))
    scene.kill(signal.SIGSTOP, rank)
    wait(lambda: len(incidents(scene.job)) > known)
    scene.kill(signal.SIGKILL, rank)


def controller_killed(scene: Scene) -> None:
    pid = scene.job.controllers()[-1]
    if running(pid):
        os.kill(pid, signal.SIGKILL)
    scene.pause(0.3)
    killed(scene)


KINDS: dict[str, Callable[[Scene], None]] = {
    "a rank is killed": killed,
    "a rank throws": throws,
    "a rank is told to stop (SIGTERM)": terminated,
    "the controller is killed, then a rank": controller_killed,
    "two ranks are killed at once": two_killed,
    "a rank is stopped (SIGSTOP), later killed": stopped,
    "a rank is killed, another up to 60 ms later": one_after_the_other,
    "all ranks throw": all_throw,
    "all ranks are told to stop (SIGTERM)": all_terminated,
}


class Campaign:
    """Faults, one after the other."""

    def __init__(self, arguments: argparse.Namespace, zygote: Zygote, told: Callable[[Result], None]) -> None:
        self._arguments, self._zygote, self._told = arguments, zygote, told
        self._reference: list[Log] = []

    def run(self, first: int, directory: Path) -> None:
        """All faults from `first` on. Raises SystemExit once a job does not go on as it should."""
        with self._job(directory / "undisturbed", ttp=None, under=self._zygote) as job:
            ended(job)
            self._reference = job.logs()
        while first < self._arguments.faults:
            count = min(FAULTS_PER_JOB, self._arguments.faults - first)
            first = self._one_job(range(first, first + count), directory / f"from-{first}")

    def _one_job(self, numbers: range, directory: Path) -> int:
        """Faults of a job; the number of the next. By its own word not exact any more, a job is ended."""
        forks = self._zygote if self._arguments.launcher == "forked" else None
        with self._job(directory, restarts=len(numbers), slow_s=SLOW_S, under=forks) as job:
            result = None
            for index, number in enumerate(numbers):
                draw = random.Random(f"{self._arguments.seed} {number}")
                kind = kind_of(self._arguments.seed, number)
                steps = draw.randint(2, MOST_STEPS)
                wait(lambda steps=steps: all(done(log) >= steps for log in job.logs()))  # type: ignore[misc]
                time.sleep(draw.random() * 0.05)
                KINDS[kind](Scene(job, draw))
                wait(lambda index=index: began(job, index + 1))  # type: ignore[misc]
                self._settle(job, result, index)
                result = self._result(job, number, kind, index)
                if result.inexact:
                    break
            else:
                ended(job)
            self._settle(job, result, index + 1)
        return number + 1

    def _settle(self, job: TorchJob, result: Result | None, start: int) -> None:
        """Tell of the fault before a start that is over: all its consequences are known by now."""
        if result is not None:
            logs = [of_start(log, start) for log in job.logs()]
            self._told(replace(result, different=tuple(differing(self._reference, logs)[:MOST_DIFFERENCES])))

    def _result(self, job: TorchJob, number: int, kind: str, index: int) -> Result:
        """Of the fault that ended start `index`."""
        every, reports = starts(job.logs()), incidents(job)
        report = reports[index] if index < len(reports) else None
        seconds = [s for s in report["seconds"].values() if s is not None] if report is not None else []
        return Result(
            number=number,
            kind=kind,
            launcher=self._arguments.launcher,
            reached=every[index].reached,
            saved=every[index + 1].step,
            lost=steps_lost(job.logs())[index],
            different=(),
            inexact=tuple(every[index + 1].inexact),
            torn=any(torn(report, every[index].reached) for report in reports),
            outcome=report["outcome"] if report is not None else "no report",
            seconds=sum(seconds) if seconds else None,
        )

    @contextmanager
    def _job(self, directory: Path, *, under: Zygote | None, **given: Any) -> Iterator[TorchJob]:
        with torch_job(
            directory,
            zygote=under,
            size=RANKS,
            epochs=(FAULTS_PER_JOB + 1) * (MOST_STEPS + 2) // STEPS_PER_EPOCH + 1,
            samples=4 * RANKS * STEPS_PER_EPOCH,
            options=QUICK | {"stall_timeout_s": 1.0},
            **given,
        ) as job:
            yield job


def kind_of(seed: int, number: int) -> str:
    """Of a fault: in random order, and none again before all have come."""
    turn, place = divmod(number, len(KINDS))
    kinds = list(KINDS)
    random.Random(f"{seed} order {turn}").shuffle(kinds)
    return kinds[place]


def done(log: Log) -> int:
    """Steps since the last start; -1 before the first."""
    begun = [index for index, entry in enumerate(log) if entry[0] == "start"]
    return sum(entry[0] == "step" for entry in log[begun[-1] :]) if begun else -1


def began(job: TorchJob, number: int) -> bool:
    """True once all ranks tell of a start, and have made a step."""
    every = starts(job.logs())
    return len(every) > number and len(every[number].pids) == RANKS and all(map(done, job.logs()))


def incidents(job: TorchJob) -> list[dict[str, Any]]:
    """The reports so far, in their order."""
    place = job.directory / ".swansong" / "incidents"
    paths = sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in paths]


def torn(report: dict[str, Any], reached: int) -> bool:
    """Whether nothing was saved after a step because every rank had ended inside its next update."""
    inside = bool(report["ranks"]) and all(rank["step"] is None for rank in report["ranks"])
    return inside and report["path"] is None and any(f["step"] == reached for f in report["faults"])


def ended(job: TorchJob) -> None:
    """Wait for it to end well."""
    if set(job.codes()) != {0}:
        raise SystemExit(f"the job has failed; see {job.out}")


def wait(what: Callable[[], bool]) -> None:
    """Until it is so."""
    ends = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > ends:
            raise SystemExit("nothing happens any more")
        time.sleep(0.005)


def main() -> int:
    """Return 1 if a fault has cost a step, or a bit without the checkpoint's saying so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launcher", choices=["forked", "torchrun"], default="forked")
    parser.add_argument("--results", type=Path, help="a file that results are added to")
    parser.add_argument("--json", action="store_true", help="print all results as one JSON list")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="write a page from results")
    arguments = parser.parse_args()
    if arguments.report:
        return write_page(*arguments.report)
    results = read(arguments.results) if arguments.results is not None else []

    def told(result: Result) -> None:
        results.append(asdict(result))
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        shown = (
            f"{result.number + 1}/{arguments.faults} {result.kind}: {result.lost} of {result.reached} lost"
        )
        print(shown, file=sys.stderr, flush=True)

    directory = Path(tempfile.mkdtemp(prefix="swansong-campaign-"))
    zygote = Zygote()
    try:
        Campaign(arguments, zygote, told).run(len(results), directory)
    finally:
        zygote.close()
    if arguments.json:
        print(json.dumps(results))
    lost = any(result["lost"] and not result["torn"] for result in results)
    if lost or any(result["different"] and not result["inexact"] for result in results):
        print(f"see {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Results in a file, if it is there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_page(target: Path, *results: Path) -> int:
    """Write the table of what was measured."""
    target.write_text(page([result for path in results for result in read(path)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
