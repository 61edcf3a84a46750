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
from swansong.protocol.operator import MAX_LISTED, Closed, Ending, OperatorAnswer, Status
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


def since(controller: Controller, now: float) -> list[tuple[str, float]]:
    """State of each rank and how long it has been in it, by rank; the controller is there since 0."""
    answer = describe(controller, generation=1, up_s=now, now=now, last=None)
    return [(rank.state, rank.state_s) for rank in sorted(answer.ranks, key=lambda rank: rank.rank)]


def test_time_in_a_state_counts_from_the_last_change() -> None:
    controller = machine(4, registered=3)
    assert since(controller, 3.0) == [("connected", 2.0)] * 3 + [("missing", 3.0)]
    entry = m.ComponentEntry(key="key 3", label="x", nbytes=1)
    last = m.Member(rank=3, host="x", pid=103, start_time=1, components=(entry,))
    controller.handle(m.Received(4, m.Register(member=last, world_size=4)), 4.0)
    controller.handle(m.Disconnected(2), 10.0)
    assert since(controller, 11.0)[1] == ("absent", 1.0)
    again = m.Register(member=controller.members.peers[1].member, world_size=4)
    controller.handle(m.Received(9, again), 11.5)
    assert since(controller, 12.0)[1] == ("connected", 0.5)
    controller.handle(m.Died(2), 13.0)
    assert since(controller, 15.0) == [
        ("connected", 14.0),
        ("connected", 3.5),
        ("lost", 2.0),
        ("connected", 11.0),
    ]


def test_rank_that_was_told_farewell_has_left_since_then() -> None:
    controller = machine(2, registered=2)
    controller.handle(m.Received(1, m.Goodbye()), 10.0)
    assert since(controller, 12.0) == [("connected", 11.0)] * 2
    assert controller.deadline is not None
    controller.handle(m.Tick(), controller.deadline)
    assert since(controller, controller.deadline or 73.0)[0][0] == "left"


def test_ranks_of_an_adopted_world_are_absent_since_then_and_those_that_left_have_left() -> None:
    members = tuple(peer.member for peer in machine(3, registered=3).members.peers.values() if peer.member)
    successor = Controller(3, 2, "i", ProtocolOptions(), 0.0)
    register = m.Register(member=members[0], world_size=3, world=members, left=(2,))
    successor.handle(m.Received(1, register), 5.0)
    assert since(successor, 7.0) == [("connected", 2.0), ("absent", 2.0), ("left", 2.0)]


def test_phase_lasts_since_it_began() -> None:
    controller = machine(1, registered=1)
    assert (status(controller).phase, status(controller).phase_s) == ("training", 9.0)
    controller.handle(m.Received(1, m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0))), 4.0)
    assert (status(controller).phase, status(controller).phase_s) == ("freezing", 6.0)


def test_step_of_a_report_stays_known_with_its_age() -> None:
    controller = machine(1, registered=1)
    assert [(rank.step, rank.step_age_s) for rank in status(controller).ranks] == [(None, None)]
    stall = m.Fault(kind=m.FaultKind.STALLED, rank=0, step=7)
    controller.handle(m.Received(1, m.FaultReport(fault=stall)), 4.0)
    assert controller.incident is not None
    incident = controller.incident.id
    report = m.StateReport(
        incident=incident, held={"key 0": Held(7, "v")}, settled=True, boundary=7, main="waits"
    )
    controller.handle(m.Received(1, report), 5.0)
    controller.handle(m.Received(1, m.PartDone(incident=incident, attempt=1)), 6.0)
    controller.handle(m.Committed(incident, "path"), 7.0)
    now = status(controller)
    assert (now.phase, now.incident) == ("training", None)
    assert [(rank.step, rank.step_age_s) for rank in now.ranks] == [(7, 5.0)]


def test_operator_who_looks_on_hears_of_the_end_unless_it_has_left() -> None:
    told: list[tuple[int, OperatorAnswer]] = []
    desk = Desk(lambda connection, answer: told.append((connection, answer)))
    for connection in (7, 8, 8):
        desk.visited(connection)
    desk.left(7)
    desk.last = Ending(incident="i", outcome=m.Outcome.SAVED, step=3, path="p")
    desk.closing("enough")
    assert told == [(8, Closed(reason="enough", last=desk.last))]


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
