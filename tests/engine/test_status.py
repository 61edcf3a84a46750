"""What people are told: bounded, whatever ranks and strangers say."""

from __future__ import annotations

import msgspec
import pytest

from swansong.engine.desk import Desk
from swansong.engine.notes import MOST, WINDOW_S, Notes
from swansong.engine.status import describe
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.controller import Controller
from swansong.protocol.frames import MAX_PAYLOAD
from swansong.protocol.operator import MAX_LISTED, OperatorAnswer, Status
from swansong.protocol.options import ProtocolOptions


def machine(ranks: int, *, registered: int, text: str = "x") -> Controller:
    """Ranks 0 to `registered` - 1 on connections 1 and up; each holds a component of its own."""
    controller = Controller(ranks, 1, "i", ProtocolOptions(), 0.0)
    for rank in range(registered):
        entry = m.ComponentEntry(key=f"key {rank}", label=f"{text} {rank}", nbytes=1)
        member = m.Member(rank=rank, host=text, pid=100 + rank, start_time=1, components=(entry,))
        controller.handle(m.Received(rank + 1, m.Register(member=member, world_size=ranks)), 1.0)
    return controller


def status(controller: Controller) -> Status:
    """As an operator gets it, decoded under the limits of the answer."""
    answer = describe(controller, generation=1, up_s=9.0, now=10.0, last=None)
    encoded = msgspec.msgpack.encode(answer)
    assert len(encoded) <= MAX_PAYLOAD
    decoded = msgspec.msgpack.decode(encoded, type=OperatorAnswer)
    assert decoded == answer
    return answer


def test_answer_of_a_large_world_with_long_words_fits_a_frame_and_begins_with_trouble() -> None:
    controller = machine(2000, registered=2000, text="\N{SNOWMAN}" * 5000)
    controller.handle(m.Disconnected(1500), 9.0)
    answer = status(controller)
    assert len(answer.ranks) == MAX_LISTED
    assert [rank.rank for rank in answer.ranks[:3]] == [1499, 0, 1]
    assert answer.counts == {"connected": 1999, "absent": 1}


@pytest.mark.parametrize(
    ("registered", "reason"),
    [(2, "rank 2 of 3 did not register yet"), (3, "")],
    ids=["incomplete", "complete"],
)
def test_job_is_protected_once_the_world_is_complete(registered: int, reason: str) -> None:
    answer = status(machine(3, registered=registered))
    assert (answer.protected, answer.reason) == (not reason, reason)


def test_job_whose_component_left_with_its_only_holder_is_not_protected() -> None:
    controller = machine(2, registered=2)
    for at, event in enumerate((m.Disconnected(1), m.Died(0), m.Tick())):
        controller.handle(event, 10.0 + at)
    assert not status(controller).protected
    controller = machine(2, registered=2)
    controller.members.peers[0].lost, controller.members.peers[0].connection = True, None
    assert status(controller).reason == "component x 0, of rank 0, is on no connected rank"


def test_incident_under_way_is_told_with_its_step_and_savers() -> None:
    controller = machine(1, registered=1)
    controller.handle(m.Received(1, m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0))), 4.0)
    assert controller.incident is not None
    report = m.StateReport(
        incident=controller.incident.id, held={"key 0": Held(7, "v")}, settled=True, boundary=7, main="waits"
    )
    controller.handle(m.Received(1, report), 5.0)
    now = status(controller)
    assert now.incident is not None
    assert (now.incident.step, now.incident.savers, now.incident.seconds) == (7, (0,), 6.0)
    assert [(rank.state, rank.step) for rank in now.ranks] == [("connected", 7)]


def test_operator_that_has_left_is_told_nothing() -> None:
    told: list[int] = []
    desk, controller = Desk(lambda connection, _: told.append(connection)), machine(1, registered=1)
    for connection in (7, 8):
        desk.persist(connection, controller, lambda: controller.handle(m.Persist("somebody"), 4.0))
    desk.left(7)
    assert not desk.waits(7)
    desk.closing("enough")
    assert told == [7, 8, 8]


def test_notes_of_a_flood_are_counted_instead_of_written() -> None:
    written: list[str] = []
    notes = Notes(written.append)
    for number in range(1000):
        notes.note(f"stranger {number}", now=5.0)
    assert len(written) == MOST
    notes.note("later", now=5.0 + WINDOW_S)
    assert written[-1] == f"later ({1000 - MOST} notes before it left out)"
    notes.note("and then", now=5.0 + WINDOW_S)
    assert written[-1] == "and then"


def test_note_cannot_forge_another_line() -> None:
    written: list[str] = []
    Notes(written.append).note("bad\nall is well\x1b[2J é", now=1.0)
    assert written == ["bad\\nall is well\\x1b[2J é"]
