"""What operators ask a controller, and what they are told."""

from __future__ import annotations

import threading

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
from swansong.engine.guests import Limits
from swansong.engine.inquiry import ask
from swansong.engine.transport import connect
from swansong.errors import UnreachableError
from swansong.protocol import messages as m
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.operator import (
    Declined,
    PersistBegun,
    PersistEnded,
    PersistRequest,
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
