"""One process with a controller: whatever ends the loop, no step is lost, and the resumed run is the same."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import swansong.torch
from array_job import PATIENCE_S, QUICK, free_port, running, until
from swansong import TTPOptions
from swansong.engine.token import FILE_NAME
from swansong.errors import SwansongWarning
from swansong.store import catalog
from torch_training import EPOCHS, LOOPS, STEPS, Training, without

FAULT_STEP = 6
"""In the middle of the second epoch."""


def options(**given):
    return TTPOptions(**(QUICK | given))


def protected(training, directory, **given):
    return training.protect(directory, **({"ttp": f"127.0.0.1:{free_port()}", "options": options()} | given))


def wait_protected(run, at=2):
    """A hook that has the loop wait, once, until it is protected."""

    def hook(moment, step):
        if (moment, step) == ("forward", at):
            until(lambda: run.protected)

    return hook


def controllers(directory):
    log = directory / ".swansong" / "controller.log"
    return [int(pid) for pid in re.findall(r"controller (\d+): listens", log.read_text())]


def nothing_left(directory, before):
    until(lambda: set(threading.enumerate()) <= before)  # one that has nothing left to wait for may be ending
    assert controllers(directory)
    until(lambda: not any(map(running, controllers(directory))))


def incident(directory):
    (path,) = (directory / ".swansong" / "incidents").glob("*.json")
    return json.loads(path.read_text())


def newest(directory):
    return catalog.scan(directory)[0]


def resumed(directory, loop, **given):
    """A new process would come with other seeds; this comes with those of a script."""
    training = Training(**given)
    with training.protect(directory) as run:
        begun = run.resume()
        inexact = run.inexact
        LOOPS[loop](training, run)
    return training, begun, inexact


class Boom(Exception):
    pass


def fails(directory, loop, moment, **given):
    """Train until an exception at a moment of FAULT_STEP; the exception."""
    training = Training(**given)

    def train():
        with protected(training, directory) as run:
            run.resume()
            ready = wait_protected(run)

            def hook(now, step):
                ready(now, step)
                if (now, step) == (moment, FAULT_STEP):
                    raise Boom("no good")

            LOOPS[loop](training, run, hook)

    with pytest.raises(Boom) as caught:
        train()
    return caught.value


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize(
    ("loop", "moment"),
    [("epochs", "forward"), ("epochs", "backward"), ("batches", "backward")],
)
def test_an_exception_outside_of_the_update_loses_no_step(tmp_path, loop, moment, several):
    before = set(threading.enumerate())
    error = fails(tmp_path, loop, moment, several=several)
    found = newest(tmp_path)
    assert (found.manifest.step, found.manifest.kind) == (FAULT_STEP - 1, "fault")
    assert not found.manifest.inexact
    (note,) = error.__notes__
    assert note.startswith(f"swansong: the state of step {FAULT_STEP - 1} is in {found.path}")
    nothing_left(tmp_path, before)
    wanted = without(loop, several=several).outcome()
    training, begun, inexact = resumed(tmp_path, loop, several=several)
    assert (begun, inexact) == (FAULT_STEP - 1, [])
    assert training.outcome() == wanted


def test_an_exception_between_update_and_boundary_saves_the_step_and_says_what_is_inexact(tmp_path):
    fails(tmp_path, "epochs", "updated")
    found = newest(tmp_path)
    assert (found.manifest.step, found.manifest.boundary_step) == (FAULT_STEP, FAULT_STEP - 1)
    training = Training()
    with training.protect(tmp_path) as run:
        with pytest.warns(SwansongWarning, match="shared objects"):
            assert run.resume() == FAULT_STEP
        assert [reason.split(":")[0] for reason in run.inexact] == ["shared objects"]
        LOOPS["epochs"](training, run)
        assert run.step == STEPS
    # Of the step only the averages are missing; model, optimizer, order of the data, dropout are exact.
    wanted = without("epochs")
    assert training.losses[-5:] == wanted.losses[-5:]


class Failing(torch.optim.SGD):
    after = 10**9

    def step(self, closure=None):
        self.after -= 1
        if not self.after:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1)  # half an update
            raise Boom("no good")
        return super().step(closure)


def test_an_exception_within_the_update_saves_nothing_torn(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = Failing(model.parameters(), lr=0.1)
    given = {"ttp": f"127.0.0.1:{free_port()}", "options": options(needed_timeout_s=1.0)}

    def train():
        with swansong.torch.protect(
            model=model, optimizer=optimizer, directory=tmp_path, prefix="m", **given
        ) as run:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                run.step_end()
            until(lambda: run.protected)
            optimizer.after = 1
            optimizer.step()

    with pytest.raises(Boom) as caught:
        train()
    assert "nothing was saved" in caught.value.__notes__[0]
    assert [found for found in catalog.scan(tmp_path) if found.committed] == []


def test_persist_and_stop_saves_the_step_that_it_ends_and_exits_with_0(tmp_path):
    training = Training()
    before = set(threading.enumerate())

    def train():
        with protected(training, tmp_path) as run:
            for epoch, batch in run.batches(epochs=EPOCHS):
                training.learn(batch, lambda moment: None)
                training.scheduler.step()
                if (epoch, run.step) == (2, 5):
                    until(lambda: run.protected)
                    run.persist_and_stop()

    with pytest.raises(SystemExit) as caught:
        train()
    assert not caught.value.code
    found = newest(tmp_path)
    assert (found.manifest.step, found.manifest.kind) == (6, "requested")
    nothing_left(tmp_path, before)
    wanted = without("batches").outcome()
    again, begun, inexact = resumed(tmp_path, "batches")
    assert (begun, inexact) == (6, [])
    assert again.outcome() == wanted


def test_a_stall_is_saved_and_training_goes_on_to_the_very_same_end(tmp_path):
    training = Training()

    def train():
        stall = options(stall_timeout_s=1.0, first_step_timeout_s=None)
        with protected(training, tmp_path, options=stall) as run:
            run.resume()
            ready = wait_protected(run)

            def hook(moment, step):
                ready(moment, step)
                if (moment, step) == ("backward", FAULT_STEP):
                    until(lambda: any(found.committed for found in catalog.scan(tmp_path)))

            LOOPS["epochs"](training, run, hook)

    with pytest.warns(SwansongWarning, match="stalled"):
        train()
    assert training.outcome() == without("epochs").outcome()
    assert newest(tmp_path).manifest.step == FAULT_STEP - 1
    assert incident(tmp_path)["kind"] == "stalled"


@pytest.mark.parametrize("loop", LOOPS)
def test_without_a_fault_nothing_changes_and_nothing_is_left(tmp_path, loop):
    before = set(threading.enumerate())
    wanted = without(loop)
    training, port = Training(), free_port()
    given = {"loader": None} if loop == "by hand" else {}
    with protected(training, tmp_path, ttp=f"127.0.0.1:{port}", **given) as run:
        LOOPS[loop](training, run, wait_protected(run))
        recorder = run._session._records._recorder.path
        assert recorder.exists()
    assert training.losses == wanted.losses
    assert training.outcome() == wanted.outcome()
    nothing_left(tmp_path, before)
    assert not recorder.exists()
    assert not recorder.parent.exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {FILE_NAME, "controller.log", "net.lock"}


SCRIPT = """
import sys, time
import torch_training
from array_job import QUICK
from pathlib import Path
from swansong import TTPOptions

directory, port, moment, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
training = torch_training.Training()

def hook(now, step):
    if (now, step) == ("forward", 2):
        while not run.protected:
            time.sleep(0.005)
    if (now, step) == (moment, at):
        print("there", flush=True)
        sys.stdin.readline()

with training.protect(directory, ttp=f"127.0.0.1:{port}", options=TTPOptions(**QUICK)) as run:
    run.resume()
    torch_training.by_epochs(training, run, hook)
"""


def test_sigterm_is_saved_and_the_process_ends_by_it(tmp_path):
    directory = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(directory), str(free_port()), "backward", str(FAULT_STEP)]
    tests = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": tests},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "there\n", process.stderr.read()
        process.send_signal(signal.SIGTERM)  # while it waits, in the middle of a step
        assert process.wait(PATIENCE_S) == -signal.SIGTERM, process.stderr.read()
    finally:
        process.kill()
        process.communicate()
    found = newest(directory)
    assert (found.manifest.step, found.manifest.kind) == (FAULT_STEP - 1, "preemption")
    training, begun, inexact = resumed(directory, "epochs")
    assert (begun, inexact) == (FAULT_STEP - 1, [])
    assert training.outcome() == without("epochs").outcome()
