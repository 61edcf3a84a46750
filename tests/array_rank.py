"""One rank of a job of plain arrays, for tests: `array_rank.py PLAN`, PLAN being JSON.

The test is the collective: it says on standard input what the rank does next, and hears on standard output,
one JSON list a line, what was done.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from typing import Any

import numpy as np

import swansong.arrays
from swansong import CheckpointConfig, TTPOptions
from swansong.arrays import Run
from swansong.engine.tls import TlsFiles
from swansong.persist.rank import Counted


def say(*what: object) -> None:
    print(json.dumps(what), flush=True)


def hold_saves() -> None:
    """Have parts of an incident begin, and never end."""

    def write(self: Counted, descriptor: int, data: object, offset: int) -> None:
        say("saving")
        threading.Event().wait()

    Counted.write = write  # type: ignore[method-assign]


def obey(run: Run, weights: np.ndarray[Any, Any], command: str) -> None:
    match command:
        case "step":
            with run.update():
                weights += run.step + 1
            run.step_end(seen=run.step + 1)
            say("step", run.step)
        case "half":
            with run.update():
                weights += 1
                say("inside")
                sys.stdin.readline()
        case "throw":
            raise ValueError("this batch is no good")
        case "persist":
            run.persist_and_stop()


def main() -> None:
    plan = json.loads(sys.argv[1])
    if plan.pop("hold_saves"):
        hold_saves()
    if largest := plan.pop("largest_file"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    steps, weights = plan.pop("save_steps"), np.zeros(plan.pop("elements"), np.float32)
    plan["config"] = CheckpointConfig(steps, keep_checkpoint_max=3) if steps else None
    files, context = plan.pop("tls", None), plan.pop("tls_context", False)
    tls = None if files is None else TlsFiles(**files)
    plan["options"] = TTPOptions(
        ssl_context=tls.client().context if tls is not None and context else tls, **plan["options"]
    )
    plan["incarnation"] = bytes.fromhex(plan["incarnation"])
    with swansong.arrays.protect({"weights": weights}, **plan) as run:
        say("began", run.resume(), float(weights[0]), run.objects)
        while plan["ttp"] and not run.protected:
            time.sleep(0.005)
        say("ready")
        for line in sys.stdin:
            if line.strip() == "end":
                break
            obey(run, weights, line.strip())
    say("left", threading.active_count())


if __name__ == "__main__":
    main()
