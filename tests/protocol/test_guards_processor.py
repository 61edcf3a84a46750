"""What each guard of the processor machine is there for: without it, one of these cases goes wrong."""

from __future__ import annotations

from protocol.protocol_support import OPTIONS, Rank, members, raised
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, Outcome
from swansong.protocol.states import Mode

WORLD = members((("model",), ("model",)))
RESUME = m.Release(incident="i", outcome=Outcome.FALSE_ALARM, action=Action.RESUME)
SAVE = m.Save(incident="i", attempt=1, step=1, keys=("model",))


def unprotected() -> Rank:
    """A rank that was refused."""
    rank = Rank.trained()
    rank.hear(m.Refused(reason="no", retry=False))
    assert rank.machine.mode is Mode.UNPROTECTED
    return rank


def registered_again(rank: Rank) -> m.Register:
    """What it says on its next connection."""
    (tell,) = rank.reconnected()
    assert isinstance(tell, m.Tell)
    assert isinstance(tell.message, m.Register)
    return tell.message


# -- what is heard ----------------------------------------------------------------------------------------


def test_order_of_another_incident_is_not_called_off() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    assert rank.hear(m.Void(incident="of the past", attempt=1)) == []
    rank.take(m.Saved("i", 1))
    assert rank.said() == [m.PartDone(incident="i", attempt=1)]


def test_save_that_has_ended_is_not_stopped() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    rank.take(m.Saved("i", 1))
    assert rank.hear(m.Void(incident="i", attempt=1)) == []


def test_save_that_has_ended_is_not_stopped_by_the_release_either() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    rank.take(m.Saved("i", 1))
    assert rank.hear(RESUME) == [m.OpenGate(), m.Wake(RESUME)]


def test_world_map_out_of_place_is_not_believed() -> None:
    rank = Rank.frozen()
    rank.hear(m.World(members=()))
    assert registered_again(rank).world == WORLD


def test_save_is_declined_on_a_connection_without_a_freeze() -> None:
    rank = Rank.frozen()
    rank.reconnected()
    rank.hear(SAVE)
    (failed,) = rank.said()
    assert isinstance(failed, m.PartFailed)
    assert failed.moved


def test_fault_that_was_registered_is_not_told_twice() -> None:
    rank = Rank()
    rank.take(m.Tick())
    rank.take(m.LocalFault(raised(0)))
    rank.take(m.Connected())
    assert rank.hear(m.Welcome(generation=1)) == []


def test_exception_stands_though_training_was_to_go_on() -> None:
    rank = Rank.frozen()
    rank.take(m.LocalFault(raised(0)))
    rank.hear(RESUME)
    assert registered_again(rank).fault == raised(0)


def test_rank_that_is_unprotected_says_so_once() -> None:
    rank = unprotected()
    assert rank.hear(m.Refused(reason="no", retry=False)) == [m.Disconnect()]


def test_rank_that_was_released_to_end_says_nothing_more() -> None:
    rank = Rank.frozen()
    rank.hear(m.Release(incident="i", outcome=Outcome.SAVED, action=Action.STOP, step=1))
    assert rank.take(m.LocalFault(raised(0))) == []


# -- deadlines --------------------------------------------------------------------------------------------


def test_rank_that_is_unprotected_waits_for_nobody() -> None:
    rank = unprotected()
    rank.take(m.LocalFault(raised(0)))
    assert rank.machine.deadline is None


def test_finished_rank_that_never_had_a_controller_looks_for_one_as_long_as_any() -> None:
    rank = Rank()
    rank.take(m.Tick())
    rank.take(m.Finished())
    assert rank.machine.deadline == OPTIONS.register_timeout_s
    assert m.Depart() in rank.later(OPTIONS.register_timeout_s)


def test_connection_that_does_not_come_to_be_is_not_waited_for() -> None:
    rank = Rank()
    assert rank.take(m.Tick()) == [m.Connect()]
    rank.later(OPTIONS.register_timeout_s)
    assert rank.machine.mode is Mode.UNPROTECTED
