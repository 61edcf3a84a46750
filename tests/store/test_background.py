"""One job at a time, and no failure that goes unseen."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from swansong.errors import SaveError
from swansong.store.background import Background


class Gate:
    """A job that says when it runs and ends when it is let."""

    def __init__(self, result: str = "done", error: BaseException | None = None) -> None:
        self.running, self.let = threading.Event(), threading.Event()
        self.result, self.error = result, error

    def __call__(self) -> str:
        self.running.set()
        self.let.wait()
        if self.error is not None:
            raise self.error
        return self.result


def finished(gate: Gate, background: Background[str]) -> None:
    gate.let.set()
    assert background._thread is not None
    background._thread.join()


def test_a_result_is_given_once() -> None:
    background: Background[str] = Background("save")
    background.start(lambda: "first")
    assert background.wait() == "first"
    assert background.wait() is None
    assert background.poll() is None


def test_polling_a_running_job_does_not_wait() -> None:
    background, gate = Background[str]("save"), Gate()
    background.start(gate)
    gate.running.wait()
    assert background.busy
    assert background.poll() is None
    finished(gate, background)
    assert not background.busy
    assert background.poll() == "done"


@pytest.mark.parametrize("ask", ["poll", "wait"])
@pytest.mark.parametrize("error", [OSError("disk"), MemoryError("much"), KeyboardInterrupt()], ids=repr)
def test_a_failure_is_raised_once_to_whoever_asks_next(ask: str, error: BaseException) -> None:
    background, gate = Background[str]("save"), Gate(error=error)
    background.start(gate)
    finished(gate, background)
    with pytest.raises(type(error)) as caught:
        getattr(background, ask)()
    assert caught.value is error
    assert background.poll() is None
    background.start(lambda: "next")
    assert background.wait() == "next"


def test_starting_another_job_raises_the_failure_of_the_one_before_and_starts_nothing() -> None:
    background: Background[str] = Background("save")
    started = []
    background.start(gate := Gate(error=OSError("disk")))
    gate.let.set()
    with pytest.raises(OSError, match="disk"):
        background.start(lambda: started.append("second") or "second")
    assert (started, background.busy) == ([], False)
    background.start(lambda: "third")
    assert background.wait() == "third"


def test_a_second_job_begins_when_the_first_is_over() -> None:
    background, first, order = Background[str]("save"), Gate("first"), []
    background.start(first)
    first.running.wait()
    starter = threading.Thread(target=lambda: background.start(lambda: order.append("second") or "second"))
    starter.start()
    starter.join(0.05)
    assert (starter.is_alive(), order) == (True, [])
    first.let.set()
    starter.join()
    assert background.wait() == "second"


def test_the_thread_keeps_the_process_alive_and_has_its_name() -> None:
    background, gate = Background[str]("swansong-save"), Gate()
    background.start(gate)
    (thread,) = (t for t in threading.enumerate() if t.name == "swansong-save")
    assert not thread.daemon
    finished(gate, background)


def test_an_exception_in_a_wait_does_not_let_two_jobs_run_at_once() -> None:
    background: Background[int] = Background("test")
    go_on = threading.Event()
    background.start(lambda: int(go_on.wait(30)))
    assert background._done is not None
    with (
        mock.patch.object(background._done, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        background.wait()

    assert background.busy
    go_on.set()
    assert background.wait() == 1


def test_a_thread_that_cannot_start_is_the_saves_failure_and_the_next_one_works() -> None:
    background: Background[int] = Background("test")
    refused = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))
    with refused, pytest.raises(SaveError, match="can't start new thread"):
        background.start(lambda: 1)

    assert not background.busy
    background.start(lambda: 2)
    assert background.wait() == 2
