"""The controller's loop with real sockets and processes: who gets in, what is told to whom, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from engine_support import (
    OTHER_TOKEN,
    PATIENT,
    TOKEN,
    Rank,
    Served,
    Store,
    finish_incident,
    member,
    serve,
    status,
    until,
    world,
)
from swansong.engine.guests import Limits
from swansong.errors import UnreachableError, WrongJobError
from swansong.protocol import messages as m
from swansong.protocol.options import ProtocolOptions

LOST = m.FaultKind.LOST


def test_everybody_hears_the_world_map_once_the_last_has_registered() -> None:
    with serve(4) as served:
        ranks = [Rank(served, rank) for rank in range(4)]
        for rank in ranks[:3]:
            rank.register(4)
            assert rank.hear(m.Welcome).generation == served.server.generation
        assert not status(served).protected
        ranks[3].register(4)
        worlds = [rank.hear(m.World) for rank in ranks]
        assert [other.rank for other in worlds[0].members] == [0, 1, 2, 3]
        assert len(set(worlds)) == 1
        assert status(served).protected


RANK_PROGRAM = textwrap.dedent(
    """
    import os, sys
    sys.path.insert(0, sys.argv[1])
    from engine_support import Rank
    from swansong.engine.address import resolve
    from swansong.protocol import messages as m

    rank = Rank(resolve("127.0.0.1", int(sys.argv[2])), int(sys.argv[3]))
    rank.register(int(sys.argv[4]))
    rank.hear(m.Welcome)
    keeper = os.fork() if sys.argv[5] == "kept open" else -1
    if keeper == 0:
        sys.stdin.read()  # as a loader's worker, which keeps the connection open
        os._exit(0)
    print(keeper, flush=True)
    rank.hear(m.Release)
    """
)


def start_rank(served: Served, rank: int, world_size: int, how: str) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parents[1])
    arguments = [tests, str(served.server.port), str(rank), str(world_size), how]
    return subprocess.Popen(
        [sys.executable, "-c", RANK_PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["closed by its death", "kept open"])
def test_killed_rank_is_lost_at_once_though_its_child_keeps_the_connection(how: str) -> None:
    with serve(4, options=PATIENT) as served:
        ranks = [Rank(served, rank) for rank in range(3)]
        with start_rank(served, 3, 4, how) as child:
            register_all_but_last(ranks)
            assert child.stdout is not None
            assert child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            release = finish_incident(ranks, step=7)
            child.communicate()
        assert (release.outcome, release.step, release.cause) == (m.Outcome.SAVED, 7, LOST)
        assert until(lambda: served.store.kinds()[-1:] == ["report"])
        report: m.Report = served.store.asked[-1][1]
        assert [(fault.kind, fault.rank, fault.what) for fault in report.faults] == [
            (LOST, 3, "its process ended")
        ]


def test_rank_killed_before_the_world_is_complete_is_noticed_though_nothing_can_be_saved() -> None:
    with serve(3, options=PATIENT) as served, Rank(served, 0) as rank:
        rank.register(3)
        with start_rank(served, 1, 3, "kept open") as child:
            assert child.stdout is not None
            assert child.stdout.readline()
            child.kill()
            release = rank.hear(m.Release)
            child.communicate()
        assert (release.outcome, release.cause) == (m.Outcome.NOTHING, LOST)
        assert "rank 2 had not registered" in release.reason


def register_all_but_last(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.register(len(ranks) + 1)
    for rank in ranks:
        rank.hear(m.World)


def test_incident_is_saved_committed_and_reported_and_the_controller_ends() -> None:
    with serve(3) as served, world(served, 3) as ranks:
        ranks[2].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=2, what="ValueError: no")))
        release = finish_incident(ranks, step=5)
        assert (release.step, release.path) == (5, "/checkpoints/step-5")
        for rank in ranks:
            rank.connection.close()
        assert served.wait_closed() == "the job ended after an incident"
        assert served.store.kinds() == ["prepare", "commit", "report"]
        assert [note for note in served.notes if "stop" not in note] == []


def test_orders_to_save_wait_until_the_place_is_prepared() -> None:
    store = Store()
    store.may_prepare.clear()
    with serve(2, store=store) as served, world(served, 2) as ranks:
        ranks[1].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=1)))
        incident = ranks[0].hear(m.Freeze).incident
        for rank in ranks:
            rank.report(incident, 4)
        until(lambda: (now := status(served).incident) is not None and now.savers == (0,))
        assert ranks[0].connection.receive(0.05) is None
        store.may_prepare.set()
        assert ranks[0].save().step == 4
        assert ranks[0].hear(m.Release).outcome is m.Outcome.SAVED


def test_end_of_an_incident_is_told_though_the_store_hangs() -> None:
    store = Store()
    store.may_prepare.clear()
    options = ProtocolOptions(idle_timeout_s=0.2, attempts=1, exit_grace_s=60.0)
    with serve(1, store=store, options=options) as served, world(served, 1) as (rank,):
        rank.say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0)))
        rank.report(rank.hear(m.Freeze).incident, 4)
        assert rank.hear(m.Release).outcome is m.Outcome.NOTHING
        assert served.store.asked == []
        store.may_prepare.set()


@pytest.mark.parametrize(("call", "outcome"), [("prepare", "nothing saved"), ("commit", "nothing saved")])
def test_store_that_fails_ends_the_incident_with_its_words(call: str, outcome: str) -> None:
    store = Store(fails={call: "the disk is on fire"})
    options = ProtocolOptions(attempts=1, exit_grace_s=2.0)
    with serve(1, store=store, options=options) as served, world(served, 1) as (rank,):
        rank.say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0)))
        rank.report(rank.hear(m.Freeze).incident, 1)
        rank.save()
        release = rank.hear(m.Release)
        assert release.outcome == outcome
        assert "the disk is on fire" in release.reason
        assert until(lambda: "discard" in store.kinds())


def test_report_that_cannot_be_written_is_noted_and_harms_nothing() -> None:
    store = Store(fails={"report": "no room for it"})
    with serve(1, store=store) as served, world(served, 1) as (rank,):
        rank.say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0)))
        finish_incident([rank], step=1)
        assert until(lambda: [note for note in served.notes if "no room for it" in note])


def test_cut_connection_of_a_rank_that_returns_is_a_false_alarm() -> None:
    with serve(3, options=PATIENT) as served, world(served, 3) as ranks:
        known = ranks[0].member
        ranks[1].connection.close()
        incident = ranks[0].hear(m.Freeze).incident
        with Rank(served, 1) as again:
            members = (known, again.member, ranks[2].member)
            again.register(3, world=members)
            releases = [rank.hear(m.Release) for rank in (ranks[0], ranks[2])]
            assert {(r.incident, r.outcome, r.action) for r in releases} == {
                (incident, m.Outcome.FALSE_ALARM, m.Action.RESUME)
            }
            assert status(served).protected


def test_connection_that_stays_cut_is_a_loss() -> None:
    with serve(2) as served, world(served, 2) as ranks:
        ranks[1].connection.close()
        release = finish_incident(ranks[:1], step=3)
        assert (release.outcome, release.cause) == (m.Outcome.SAVED, LOST)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"world_size": 5}, "this job has 2 ranks"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"keys": ("a", "a")}, "names a component twice"),
    ],
    ids=["another world size", "rank beyond the world", "a component twice"],
)
def test_registration_that_cannot_be_is_refused_with_its_reason(
    wrong: dict[str, object], reason: str
) -> None:
    with serve(2) as served:
        size = wrong.pop("world_size", 2)
        with Rank(served, int(str(wrong.pop("rank", 1))), **wrong) as rank:
            rank.register(int(str(size)))
            refused = rank.hear(m.Refused)
            assert reason in refused.reason
            assert not refused.retry
            with pytest.raises(UnreachableError):
                rank.connection.receive(20)


def test_another_process_of_a_registered_rank_is_told_to_try_again() -> None:
    with serve(2) as served, Rank(served, 0) as first, Rank(served, 0, pid=os.getppid()) as second:
        first.register(2)
        first.hear(m.Welcome)
        second.register(2)
        assert second.hear(m.Refused).retry
        assert status(served).counts == {"connected": 1, "missing": 1}


def test_second_job_on_a_port_is_told_whose_it_is() -> None:
    with serve(1) as served, world(served, 1) as (rank,):
        with pytest.raises(WrongJobError, match="choose another port") as caught:
            Rank(served, 0, token=OTHER_TOKEN)
        assert caught.value.got == TOKEN.job.hex()
        assert until(lambda: [note for note in served.notes if OTHER_TOKEN.job.hex() in note])
        assert rank.connection.receive(0) is None
        assert status(served).protected


def test_new_start_of_the_job_takes_the_port_over() -> None:
    with (
        serve(2) as served,
        world(served, 2) as ranks,
        Rank(served, 0, incarnation=b"the next start..") as next_0,
    ):
        port = served.server.port
        assert next_0.hear(m.Refused).retry
        assert all(rank.hear(m.Refused).retry for rank in ranks)
        for rank in (*ranks, next_0):
            rank.connection.close()
        assert served.wait_closed() == "another start of the job took over"
        with serve(2, port=port, incarnation=b"the next start..") as successor:
            assert successor.server.port == port


def test_new_start_waits_until_the_incident_is_over() -> None:
    with serve(2) as served, world(served, 2) as ranks:
        ranks[1].say(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=1)))
        with Rank(served, 0, incarnation=b"the next start..") as next_0:
            assert next_0.hear(m.Refused).retry
        assert finish_incident(ranks, step=2).outcome is m.Outcome.SAVED


def test_straggler_of_a_start_that_is_over_does_not_end_its_successor() -> None:
    with (
        serve(1) as served,
        world(served, 1),
        Rank(served, 0, incarnation=b"a former start..", generation=5) as old,
    ):
        refused = old.hear(m.Refused)
        assert (refused.reason, refused.retry) == ("another start of the job has taken over", False)
        assert status(served).protected


def test_controller_steps_down_before_a_rank_that_knows_a_later_one() -> None:
    with serve(1) as served, Rank(served, 0, generation=served.server.generation + 1) as rank:
        assert rank.hear(m.Refused).retry
        rank.connection.close()
        assert served.wait_closed() == "another start of the job took over"


def test_successor_finds_dead_members_of_the_map_that_is_brought_along() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        dead = member(1, pid=child.pid)
        child.kill()
    with serve(2, options=PATIENT) as served, Rank(served, 0) as rank:
        rank.register(2, world=(rank.member, dead))
        release = finish_incident([rank], step=9)
        assert (release.outcome, release.step) == (m.Outcome.SAVED, 9)


def test_pid_of_another_host_says_nothing_here() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        gone = child.pid
    elsewhere = msgspec.structs.replace(member(1), host="elsewhere", pid=gone)
    with serve(2, options=PATIENT) as served, Rank(served, 0) as rank:
        rank.register(2, world=(rank.member, elsewhere))
        rank.hear(m.Welcome)
        answer = status(served)
        assert answer.counts == {"connected": 1, "absent": 1}
        assert answer.incident is None


def test_ranks_that_say_goodbye_are_let_go_and_the_controller_ends() -> None:
    with serve(2) as served, world(served, 2) as ranks:
        for rank in ranks:
            rank.say(m.Goodbye())
        for rank in ranks:
            rank.hear(m.Farewell)
            rank.connection.close()
        assert served.wait_closed() == "every rank has finished"


def test_silent_connection_is_ended_after_the_handshake_timeout() -> None:
    with serve(1, limits=Limits(handshake_timeout_s=0.2)) as served:
        with socket.create_connection(("127.0.0.1", served.server.port)) as silent:
            silent.settimeout(20)
            while silent.recv(1000):
                pass
        until(lambda: any("did not say who it is within" in note for note in served.notes))


def test_proved_rank_that_does_not_register_is_ended_too() -> None:
    with (
        serve(1, limits=Limits(handshake_timeout_s=0.2)) as served,
        Rank(served, 0) as rank,
        pytest.raises(UnreachableError),
    ):
        rank.connection.receive(20)


def test_oldest_stranger_makes_room() -> None:
    with serve(1, limits=Limits(max_strangers=3, handshake_timeout_s=60)) as served:
        silent = [socket.create_connection(("127.0.0.1", served.server.port)) for _ in range(4)]
        silent[0].settimeout(20)
        while silent[0].recv(1000):
            pass
        assert until(lambda: served.server.connections == 3)
        with world(served, 1):
            assert status(served).protected
        for sock in silent:
            sock.close()


def test_no_number_of_strangers_drives_out_who_has_proved_to_be_a_rank() -> None:
    with serve(1, limits=Limits(max_strangers=1, handshake_timeout_s=60)) as served, Rank(served, 0) as rank:
        crowd = [socket.create_connection(("127.0.0.1", served.server.port)) for _ in range(10)]
        until(lambda: len([note for note in served.notes if "makes room" in note]) == 8)
        rank.register(1)
        rank.hear(m.World)
        for sock in crowd:
            sock.close()
