"""The processor machine by hand: rows of its table, deadlines, what it says to a new controller."""

from __future__ import annotations

from itertools import pairwise

import pytest

from protocol.protocol_support import OPTIONS, Rank, members, raised, stalled
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, FaultKind, Outcome
from swansong.protocol.states import Mode

WORLD = members((("model",), ("model",)))
STOP = m.Release(incident="i", outcome=Outcome.SAVED, action=Action.STOP, step=1)
RESUME = m.Release(incident="i", outcome=Outcome.SAVED, action=Action.RESUME, step=1)
READ = m.StateRead({"model": Held(1, "v")}, True, 1, "parked")
SAVE = m.Save(incident="i", attempt=1, step=1, keys=("model",))


# -- connecting -------------------------------------------------------------------------------------------


def test_it_connects_at_once_and_registers() -> None:
    rank = Rank()
    assert rank.take(m.Tick()) == [m.Connect()]
    assert rank.take(m.Tick()) == []
    (register,) = rank.take(m.Connected())
    assert isinstance(register, m.Tell)
    assert isinstance(register.message, m.Register)
    rank.hear(m.Welcome(generation=1))
    assert rank.machine.mode is Mode.JOINED
    rank.hear(m.World(members=WORLD))
    assert rank.machine.mode is Mode.TRAINING
    assert rank.machine.deadline is None


def test_it_tries_again_ever_more_slowly() -> None:
    rank = Rank()
    moments = []
    while rank.now < 10.0:
        if rank.take(m.Tick()) == [m.Connect()]:
            moments.append(rank.now)
            rank.take(m.ConnectionEnded())
        assert rank.machine.deadline is not None
        rank.now = rank.machine.deadline
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert gaps == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, *[1.0] * (len(gaps) - 5)])


@pytest.mark.parametrize(
    ("known", "fault", "seconds"),
    [
        (False, False, OPTIONS.register_timeout_s),
        (False, True, OPTIONS.lost_controller_s),
        (True, False, OPTIONS.lost_controller_s),
    ],
    ids=["never had one", "never had one, and threw", "lost it"],
)
def test_it_gives_up_and_says_that_protection_is_off(known: bool, fault: bool, seconds: float) -> None:
    rank = Rank.trained() if known else Rank()
    if known:
        rank.take(m.ConnectionEnded())
    if fault:
        rank.take(m.LocalFault(raised(0)))

    def refused_until(moment: float) -> list[m.ProcessorEffect]:
        effects: list[m.ProcessorEffect] = []
        while rank.machine.deadline is not None and rank.machine.deadline <= moment:
            rank.now = rank.machine.deadline
            effects += rank.take(m.Tick())
            if m.Connect() in rank.effects:
                effects += rank.take(m.ConnectionEnded())
        return effects

    assert not any(isinstance(effect, m.Unprotected) for effect in refused_until(seconds - 0.1))
    effects = refused_until(seconds)
    assert m.Unprotected("no controller could be reached") in effects
    assert any(isinstance(effect, m.Wake) for effect in effects) is fault
    assert rank.machine.mode is Mode.UNPROTECTED
    assert rank.machine.deadline is None


def test_connection_that_comes_after_it_gave_up_is_ended() -> None:
    rank = Rank()
    rank.take(m.Tick())
    rank.now = OPTIONS.register_timeout_s
    rank.take(m.Tick())
    assert rank.take(m.Connected()) == [m.Disconnect()]


def test_controller_of_the_past_is_left() -> None:
    rank = Rank.trained()
    rank.reconnected(generation=3)
    assert rank.machine.mode is Mode.TRAINING
    rank.reconnected(generation=2)
    assert rank.effects == [m.Disconnect()]
    assert rank.machine.mode is Mode.CONNECTING


def test_it_brings_along_what_a_new_controller_must_know() -> None:
    rank = Rank.frozen()
    rank.hear(m.Left(ranks=(1,)))
    rank.take(m.LocalFault(raised(0)))
    (tell,) = rank.reconnected()
    assert isinstance(tell, m.Tell)
    register = tell.message
    assert isinstance(register, m.Register)
    assert (register.world, register.left, register.frozen) == (WORLD, (1,), True)
    assert register.fault == raised(0)


def test_fault_between_registering_and_the_welcome_is_told() -> None:
    rank = Rank()
    rank.take(m.Tick())
    rank.take(m.Connected())
    assert rank.take(m.LocalFault(raised(0))) == []
    rank.hear(m.Welcome(generation=1))
    assert rank.said() == [m.FaultReport(fault=raised(0))]


def test_first_fault_stands_and_a_stall_gives_way() -> None:
    rank = Rank.trained()
    for fault in (stalled(0), raised(0), stalled(0)):
        rank.take(m.LocalFault(fault))
        assert rank.said() == [m.FaultReport(fault=fault)]
    (tell,) = rank.reconnected()
    assert isinstance(tell, m.Tell)
    assert isinstance(tell.message, m.Register)
    assert tell.message.fault == raised(0)


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("mode", [Mode.CONNECTING, Mode.JOINED, Mode.TRAINING, Mode.FROZEN])
def test_refusal_for_good_ends_protection(mode: Mode, retry: bool) -> None:
    rank = {Mode.TRAINING: Rank.trained, Mode.FROZEN: Rank.frozen}.get(mode, Rank)()
    if mode in (Mode.CONNECTING, Mode.JOINED):
        rank.take(m.Tick())
        rank.take(m.Connected())
    if mode is Mode.JOINED:
        rank.hear(m.Welcome(generation=1))
    assert rank.machine.mode is mode
    rank.hear(m.Refused(reason="no", retry=retry))
    assert rank.machine.mode is (mode if retry else Mode.UNPROTECTED)
    assert (m.Unprotected("no") in rank.effects) is not retry
    assert (m.OpenGate() in rank.effects) is (mode is Mode.FROZEN and not retry)


# -- frozen -----------------------------------------------------------------------------------------------


def test_freeze_closes_the_gate_and_reports_what_changes() -> None:
    rank = Rank.trained()
    assert rank.hear(m.Freeze(incident="i")) == [m.CloseGate(), m.Watch()]
    rank.take(READ)
    (report,) = rank.said()
    assert report == m.StateReport(incident="i", held=READ.held, settled=True, boundary=1, main="parked")
    assert rank.take(READ) == []
    assert rank.take(m.StateRead({}, False, 1, "parked")) != []


def test_freeze_again_means_a_fresh_report() -> None:
    rank = Rank.frozen()
    rank.take(READ)
    assert rank.hear(m.Freeze(incident="i")) == [m.Watch()]
    rank.take(READ)
    assert len(rank.said()) == 1


def test_saver_reports_progress_and_its_end_and_again_if_asked_again() -> None:
    rank = Rank.frozen()
    assert rank.hear(SAVE) == [m.StartSave("i", 1, 1, ("model",))]
    rank.take(m.Wrote("i", 1, 7))
    assert rank.said() == [m.Progress(incident="i", attempt=1, nbytes=7)]
    assert rank.hear(SAVE) == []
    rank.take(m.Saved("i", 1))
    assert rank.said() == [m.PartDone(incident="i", attempt=1)]
    rank.hear(SAVE)
    assert rank.said() == [m.PartDone(incident="i", attempt=1)]


def test_failed_attempt_is_told_again_not_tried_again() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    rank.take(m.SaveFailed("i", 1, "disk full"))
    failed = m.PartFailed(incident="i", attempt=1, reason="disk full")
    assert rank.said() == [failed]
    assert rank.hear(SAVE) == [m.Tell(failed)]


def test_save_goes_on_while_it_looks_for_its_controller() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    rank.reconnected()
    assert rank.hear(m.Freeze(incident="i")) == [m.Watch()]
    assert rank.hear(SAVE) == []


def test_voided_save_stops_and_is_not_spoken_of() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    assert rank.hear(m.Void(incident="i", attempt=1)) == [m.StopSave("i", 1)]
    assert rank.take(m.Saved("i", 1)) == []
    assert rank.hear(m.Void(incident="i", attempt=1)) == []


def test_other_incident_stops_the_saves_of_the_one_before() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    assert rank.hear(m.Freeze(incident="j")) == [m.StopSave("i", 1), m.Watch()]


def test_writer_of_a_past_incident_does_not_speak_for_the_present_one() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    rank.hear(m.Freeze(incident="j"))
    rank.hear(m.Save(incident="j", attempt=1, step=1, keys=("model",)))
    assert rank.take(m.Saved("i", 1)) == []
    rank.take(m.Saved("j", 1))
    assert rank.said() == [m.PartDone(incident="j", attempt=1)]


@pytest.mark.parametrize("incident", ["i", "j"], ids=["this one", "another"])
def test_order_that_it_cannot_carry_out_is_declined(incident: str) -> None:
    rank = Rank.trained() if incident == "i" else Rank.frozen()
    rank.hear(m.Save(incident=incident, attempt=4, step=1, keys=("model",)))
    (failed,) = rank.said()
    assert isinstance(failed, m.PartFailed)
    assert (failed.incident, failed.attempt, failed.moved) == (incident, 4, True)


# -- released ---------------------------------------------------------------------------------------------


def test_release_to_stop_wakes_the_main_thread_with_the_gate_closed() -> None:
    rank = Rank.frozen()
    assert rank.hear(STOP) == [m.Wake(STOP), m.Disconnect()]
    assert rank.machine.mode is Mode.ENDED
    assert rank.machine.deadline is None
    assert rank.take(m.ConnectionEnded()) == []
    assert rank.later(1000.0) == []


def test_release_to_resume_opens_the_gate_and_ends_a_stall() -> None:
    rank = Rank.trained()
    rank.take(m.LocalFault(stalled(0)))
    rank.hear(m.Freeze(incident="i"))
    rank.hear(SAVE)
    assert rank.hear(RESUME) == [m.StopSave("i", 1), m.OpenGate(), m.Wake(RESUME)]
    (tell,) = rank.reconnected()
    assert isinstance(tell, m.Tell)
    assert isinstance(tell.message, m.Register)
    assert tell.message.fault is None
    assert not tell.message.frozen


def test_rank_without_the_world_map_is_released_too() -> None:
    rank = Rank()
    rank.take(m.Tick())
    rank.take(m.Connected())
    rank.hear(m.Welcome(generation=1))
    assert rank.hear(STOP) == [m.Wake(STOP), m.Disconnect()]


def test_state_is_reported_only_while_frozen() -> None:
    rank = Rank.frozen()
    rank.hear(RESUME)
    assert rank.take(READ) == []


# -- nobody is heard --------------------------------------------------------------------------------------


def test_gate_opens_without_word_for_the_length_of_the_lease() -> None:
    rank = Rank.frozen()
    rank.hear(SAVE)
    rank.later(OPTIONS.gate_lease_s - 1.0)
    rank.hear(m.Hold(incident="i"))
    assert rank.later(OPTIONS.gate_lease_s - 1.0) == []
    effects = rank.later(1.0)
    assert effects == [m.StopSave("i", 1), m.OpenGate(), m.Disconnect()]
    assert rank.machine.mode is Mode.CONNECTING
    rank.take(m.ConnectionEnded())
    assert m.Connect() in rank.later(1.0)


def test_gate_opens_while_it_looks_for_a_controller() -> None:
    rank = Rank.frozen()
    rank.take(m.ConnectionEnded())
    assert m.OpenGate() in rank.later(OPTIONS.gate_lease_s)


def test_thrower_does_not_wait_for_a_controller_that_hangs() -> None:
    rank = Rank.trained()
    rank.take(m.LocalFault(raised(0)))
    assert rank.later(OPTIONS.gate_lease_s) == [m.Disconnect()]
    rank.take(m.ConnectionEnded())
    effects = rank.later(OPTIONS.lost_controller_s)
    (wake,) = (effect for effect in effects if isinstance(effect, m.Wake))
    assert (wake.release.outcome, wake.release.action) == (Outcome.NOTHING, Action.STOP)
    assert wake.release.cause is FaultKind.RAISED


def test_stall_is_not_waited_for() -> None:
    rank = Rank.trained()
    rank.take(m.LocalFault(stalled(0)))
    assert rank.machine.deadline is None


def test_finished_rank_does_not_wait_for_a_controller_that_hangs() -> None:
    rank = Rank.trained()
    rank.take(m.Finished())
    assert rank.said() == [m.Goodbye()]
    assert rank.later(OPTIONS.goodbye_timeout_s) == []
    assert m.Disconnect() in rank.later(OPTIONS.gate_lease_s)
    rank.take(m.ConnectionEnded())
    assert m.Depart() in rank.later(OPTIONS.lost_controller_s)
    assert rank.machine.mode is Mode.ENDED


# -- unprotected ------------------------------------------------------------------------------------------


def unprotected() -> Rank:
    """A rank that was refused."""
    rank = Rank.trained()
    rank.hear(m.Refused(reason="no", retry=False))
    return rank


def test_fault_without_a_controller_wakes_its_thread_at_once() -> None:
    rank = unprotected()
    (wake,) = rank.take(m.LocalFault(raised(0)))
    assert isinstance(wake, m.Wake)
    assert wake.release.action is Action.STOP


def test_stall_without_a_controller_ends_nothing() -> None:
    assert unprotected().take(m.LocalFault(stalled(0))) == []


def test_rank_without_a_controller_may_go_when_it_has_finished() -> None:
    rank = unprotected()
    assert rank.take(m.Finished()) == [m.Depart()]
    assert rank.machine.mode is Mode.ENDED


# -- finishing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Rank.trained, Rank.frozen], ids=["training", "frozen"])
def test_goodbye_is_said_at_once_and_again_on_a_new_connection(make: object) -> None:
    rank: Rank = make()  # type: ignore[operator]
    rank.take(m.Finished())
    assert rank.said() == [m.Goodbye()]
    rank.reconnected()
    assert m.Goodbye() in rank.said()
    rank.hear(m.Farewell())
    assert rank.effects == [m.Depart(), m.Disconnect()]
    assert rank.machine.mode is Mode.ENDED


def test_goodbye_waits_for_a_connection() -> None:
    rank = Rank()
    rank.take(m.Tick())
    assert rank.take(m.Finished()) == []
    rank.take(m.Connected())
    rank.hear(m.Welcome(generation=1))
    assert rank.said() == [m.Goodbye()]
    assert rank.hear(m.Farewell()) == [m.Depart(), m.Disconnect()]


# -- the controller's errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Rank.trained, m.Welcome(generation=1)),
        (Rank.trained, m.World(members=WORLD)),
        (Rank.frozen, m.World(members=())),
        (Rank.frozen, m.Farewell()),
        (Rank, m.Freeze(incident="i")),
        (Rank, RESUME),
        (Rank, STOP),
        (unprotected, m.Freeze(incident="i")),
    ],
)
def test_message_without_a_row_ends_the_connection_and_changes_nothing(
    make: object, message: m.ToProcessor
) -> None:
    rank: Rank = make()  # type: ignore[operator]
    if make is Rank:
        rank.take(m.Tick())
    before = rank.machine.mode
    assert rank.hear(message) == [m.Disconnect()]
    assert rank.machine.mode is before


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
def test_rank_that_has_just_registered_does_not_give_up_before_the_answer_can_be_there(
    answered: bool,
) -> None:
    rank = Rank()
    rank.take(m.Tick())
    rank.now = OPTIONS.register_timeout_s - 0.01
    rank.take(m.Connected())
    rank.later(OPTIONS.reconnect_s)
    assert rank.machine.mode is Mode.CONNECTING
    if answered:
        rank.hear(m.Welcome(generation=1))
    rank.later(0.01)
    assert rank.machine.mode is (Mode.JOINED if answered else Mode.UNPROTECTED)
