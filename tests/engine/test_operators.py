"""What operators ask a controller, and what they are told."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_support import (
    PATIENT,
    TOKEN,
    finish_incident,
    serve,
    status,
    until,
    world,
)
from swansong.engine import inquiry
from swansong.engine.address import resolve
from swansong.engine.guests import Limits
from swansong.engine.inquiry import ask, watch
from swansong.engine.transport import connect
from swansong.errors import UnreachableError
from swansong.protocol import messages as m
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.operator import (
    Closed,
    Declined,
    PersistBegun,
    PersistEnded,
    PersistRequest,
    Status,
)
from swansong.protocol.options import ProtocolOptions


def test_operator_asks_for_a_save_and_hears_its_end() -> None:
    begun: list[PersistBegun] = []
    answers: list[object] = []
    with serve(2) as served, world(served, 2) as ranks:

        def ask_to_persist() -> None:
            request = PersistRequest(who="somebody")
            answers.append(ask(served.address, TOKEN, request, timeout_s=20, begun=begun.append))

        operator = threading.Thread(target=ask_to_persist)
        operator.start()
        release = finish_incident(ranks, step=6)
        operator.join()
        assert (release.cause, release.action) == (m.FaultKind.REQUESTED, m.Action.STOP)
        (ended,) = answers
        assert isinstance(ended, PersistEnded)
        assert (ended.ending.outcome, ended.ending.step) == (m.Outcome.SAVED, 6)
        assert [answer.incident for answer in begun] == [release.incident]
        assert status(served).last == ended.ending


def test_operator_who_waits_is_told_that_the_controller_ends() -> None:
    with serve(1, options=PATIENT) as served, world(served, 1) as (rank,):

        def stop(_: PersistBegun) -> None:
            rank.hear(m.Freeze)
            served.server.stop("enough")

        answer = ask(served.address, TOKEN, PersistRequest(who="somebody"), timeout_s=20, begun=stop)
        assert answer == Declined(reason="the controller ended: enough")


def test_operator_who_asks_twice_is_declined_and_still_hears_the_end() -> None:
    me = Identity(role=Role.OPERATOR)
    with (
        serve(1) as served,
        world(served, 1) as (rank,),
        connect(served.address, TOKEN, me, timeout_s=20) as operator,
    ):
        for _ in range(2):
            operator.send(PersistRequest(who="somebody"))
        assert [type(operator.receive(20)) for _ in range(2)] == [PersistBegun, Declined]
        finish_incident([rank], step=1)
        assert isinstance(operator.receive(20), PersistEnded)


def test_operator_may_wait_longer_than_it_may_be_idle() -> None:
    limits, options = Limits(operator_timeout_s=0.2, linger_s=0.2), ProtocolOptions(exit_grace_s=60.0)
    me = Identity(role=Role.OPERATOR)
    with serve(1, limits=limits, options=options) as served, world(served, 1) as (rank,):
        with connect(served.address, TOKEN, me, timeout_s=20) as operator:
            operator.send(PersistRequest(who="somebody"))
            assert isinstance(operator.receive(20), PersistBegun)
            with connect(served.address, TOKEN, me, timeout_s=20) as other, pytest.raises(UnreachableError):
                other.receive(20)  # came later, and is ended for asking nothing
            finish_incident([rank], step=1)
            assert isinstance(operator.receive(20), PersistEnded)
            with pytest.raises(UnreachableError):
                operator.receive(20)  # idle now
        assert rank.connection.receive(0) is None


def test_operator_is_declined_while_nothing_is_protected() -> None:
    with serve(2) as served:
        answer = ask(served.address, TOKEN, PersistRequest(who="somebody"), timeout_s=20)
        assert answer == Declined(reason="nothing is protected now: the controller is gathering")
        assert status(served).phase == "gathering"


def test_status_says_where_each_rank_stands_during_an_incident() -> None:
    with serve(3, options=PATIENT) as served, world(served, 3) as ranks:
        ranks[2].connection.close()
        ranks[0].report(ranks[0].hear(m.Freeze).incident, 8)
        now = until(lambda: (answer := status(served)).ranks[-2].step is not None and answer)
        assert [(rank.rank, rank.state, rank.step) for rank in now.ranks] == [
            (2, "absent", None),
            (0, "connected", 8),
            (1, "connected", None),
        ]
        assert (now.protected, now.reason) == (False, "an incident is under way")


def test_who_watches_is_told_again_and_again_and_then_of_the_end() -> None:
    with serve(1) as served, world(served, 1):
        answers = watch(served.address, TOKEN, every_s=0.01, timeout_s=20)
        shown = [next(answers) for _ in range(3)]
        assert [answer.phase for answer in shown if isinstance(answer, Status)] == ["training"] * 3
        served.server.stop("enough")
        *_, last = answers
        assert last == Closed(reason="enough")


def test_who_watches_seldom_is_told_of_the_end_at_once() -> None:
    with serve(1) as served:
        answers = watch(served.address, TOKEN, every_s=3600, timeout_s=20)
        assert isinstance(next(answers), Status)
        served.server.stop("enough")
        assert list(answers) == [Closed(reason="enough")]


@contextmanager
def killed_after_an_answer(
    every_s: float, timeout_s: float
) -> Iterator[tuple[Status, Iterator[object], int]]:
    """A controller's first answer, what comes after it was killed, and its port."""
    program = Path(__file__).parents[1] / "controller_process.py"
    with subprocess.Popen([sys.executable, str(program), "1"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = resolve("127.0.0.1", int(process.stdout.readline()))
            answers = watch(address, TOKEN, every_s=every_s, timeout_s=timeout_s)
            first = next(answers)
            assert isinstance(first, Status)
        finally:
            process.kill()
    yield first, answers, address.port


def test_who_watches_finds_the_controller_that_takes_the_place_of_one_that_was_killed() -> None:
    with (
        killed_after_an_answer(every_s=0.01, timeout_s=20) as (before, answers, port),
        serve(1, port=port) as successor,
    ):
        after = next(answers)
        assert isinstance(after, Status)
        assert before.generation < after.generation == successor.server.generation


def test_who_watches_gives_up_when_nobody_answers_any_more() -> None:
    with (
        killed_after_an_answer(every_s=0.01, timeout_s=0.5) as (_, answers, _port),
        pytest.raises(UnreachableError),
    ):
        next(answers)


class Line:
    """A connection whose controller answers at once, and a clock that goes on only while one waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[float] = []
        self._answers = 0

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def monotonic(self) -> float:
        return self.now

    def send(self, message: object) -> None:
        self.asked.append(self.now)
        self._answers += 1

    def receive(self, timeout_s: float) -> Status | None:
        if not self._answers:
            self.now += timeout_s
            return None
        self._answers -= 1
        return Status(
            phase="training", phase_s=self.now, world_size=1, generation=1, up_s=self.now, protected=True
        )


def test_who_watches_seldom_asks_more_often_so_as_not_to_be_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = Line()
    monkeypatch.setattr(inquiry, "connect", lambda *_, **__: line)
    monkeypatch.setattr(inquiry, "time", line)
    answers = watch(resolve("127.0.0.1", 1), TOKEN, every_s=90, timeout_s=20)
    assert [next(answers).up_s, next(answers).up_s] == [0, 90]
    assert line.asked == [0, 20, 40, 60, 80, 90]
