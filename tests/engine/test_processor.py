"""The thread around the processor machine, against a real controller over real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from child_process import forked
from engine_support import INCARNATION, PATIENCE_S, PATIENT, QUICK, TOKEN, Served, Store, member, serve, until
from swansong.engine.address import Address
from swansong.engine.processor import ProcessorThread, StateMovedError
from swansong.engine.transport import Connection, connect
from swansong.errors import UnreachableError
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.processor import Processor
from swansong.protocol.states import Mode


@dataclass
class Trainer:
    """One rank whose training loop is played by the test."""

    number: int
    step: int = 7
    gate_closed: bool = False
    released: list[m.Release] = field(default_factory=list)
    wrote: list[m.StartSave] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    departed: bool = False
    fails: BaseException | None = None
    """What `save` raises."""
    hold: threading.Event = field(default_factory=threading.Event)
    """A save waits for it, or until it is told to stop."""
    gave_up: bool = False
    """True once a save saw that it was not wanted."""

    def __post_init__(self) -> None:
        self.hold.set()

    def close_gate(self) -> None:
        self.gate_closed = True

    def open_gate(self) -> None:
        self.gate_closed = False

    def read_state(self) -> m.StateRead:
        held = {"model": Held(self.step, "v")}
        return m.StateRead(held=held, settled=True, boundary=self.step, main="in forward")

    def save(self, order: m.StartSave, progress: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        self.wrote.append(order)
        progress(10)
        while not self.hold.wait(0.01):
            if stopped():
                self.gave_up = True
                return
        if self.fails is not None:
            raise self.fails

    def wake(self, release: m.Release) -> None:
        self.released.append(release)

    def depart(self) -> None:
        self.departed = True

    def unprotected(self, reason: str) -> None:
        self.warned.append(reason)

    def watch(self, now: float) -> m.Fault | None:
        return None


@dataclass
class Running:
    """Trainers and their threads."""

    trainers: list[Trainer]
    threads: list[ProcessorThread]
    machines: list[Processor]
    connections: dict[int, Connection]

    def cut(self, rank: int) -> None:
        """End a rank's connection below both ends."""
        with socket.socket(fileno=os.dup(self.connections[rank].fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)

    def kill(self, rank: int) -> None:
        """As if its process were gone: the connection ends, and nobody comes back."""
        self.machines[rank].mode = Mode.ENDED
        self.cut(rank)

    def fault(self, rank: int, kind: m.FaultKind = m.FaultKind.RAISED) -> None:
        step = self.trainers[rank].step
        self.threads[rank].post(m.LocalFault(m.Fault(kind=kind, rank=rank, what="ValueError: no", step=step)))


@contextmanager
def running(address: Address, size: int, options: ProtocolOptions = QUICK) -> Iterator[Running]:
    run = Running([Trainer(rank) for rank in range(size)], [], [], {})

    def dial(rank: int) -> Connection:
        me = Identity(role=Role.RANK, rank=rank, incarnation=INCARNATION)
        run.connections[rank] = connect(address, TOKEN, me, timeout_s=1.0)
        return run.connections[rank]

    for rank, trainer in enumerate(run.trainers):
        machine = Processor(member(rank), size, options, time.monotonic())
        run.machines.append(machine)
        run.threads.append(ProcessorThread(machine, trainer, lambda rank=rank: dial(rank)))  # type: ignore[misc]
    for thread in run.threads:
        thread.start()
    try:
        yield run
    finally:
        for machine, thread in zip(run.machines, run.threads, strict=True):
            machine.mode = Mode.ENDED
            thread.post(m.Tick())
            assert thread.join(PATIENCE_S)


@contextmanager
def training(size: int, options: ProtocolOptions = QUICK) -> Iterator[tuple[Served, Running]]:
    """So many ranks that are protected."""
    with serve(size, options=options) as served, running(served.address, size, options) as run:
        until(lambda: all(machine.mode is Mode.TRAINING for machine in run.machines))
        yield served, run


def committed(store: Store) -> list[m.Commit]:
    return [what for name, what in store.asked if name == "commit"]


def test_a_rank_that_is_gone_is_made_up_for_by_the_others() -> None:
    with training(3) as (served, run):
        run.kill(1)
        until(lambda: run.trainers[0].released and run.trainers[2].released)

        release = run.trainers[0].released[0]
        assert (release.outcome, release.step, release.cause) == (m.Outcome.SAVED, 7, m.FaultKind.LOST)
        assert [commit.step for commit in committed(served.store)] == [7]
        assert len(run.trainers[0].wrote) + len(run.trainers[2].wrote) == 1
        assert not run.trainers[1].wrote


def test_who_threw_hears_where_its_state_is() -> None:
    with training(2, PATIENT) as (_, run):
        run.fault(1)
        until(lambda: all(trainer.released for trainer in run.trainers))

        assert {trainer.released[0].path for trainer in run.trainers} == {"/checkpoints/step-7"}
        assert run.trainers[1].released[0].action is m.Action.STOP


def test_a_stall_is_saved_and_the_gates_open_again() -> None:
    with training(2, PATIENT) as (_, run):
        run.fault(0, m.FaultKind.STALLED)
        until(lambda: all(trainer.released for trainer in run.trainers))

        assert run.trainers[0].released[0].action is m.Action.RESUME
        until(lambda: not any(trainer.gate_closed for trainer in run.trainers))
        assert all(machine.mode is Mode.TRAINING for machine in run.machines)


@pytest.mark.parametrize(
    "failure",
    [OSError(28, "No space left on device"), StateMovedError("its clock moved")],
    ids=["full", "moved"],
)
def test_a_saver_that_fails_is_replaced(failure: BaseException) -> None:
    with training(2, PATIENT) as (served, run):
        run.trainers[0].fails = failure
        run.fault(1)
        until(lambda: all(trainer.released for trainer in run.trainers))

        assert run.trainers[1].released[0].outcome is m.Outcome.SAVED
        assert [rank for _, rank, _ in committed(served.store)[0].parts] == [1]


def test_a_saver_without_progress_is_told_to_stop_and_replaced() -> None:
    options = ProtocolOptions(reconnect_s=60.0, exit_grace_s=2.0, idle_timeout_s=0.3)
    with training(2, options) as (_, run):
        run.trainers[0].hold.clear()
        run.fault(1)
        until(lambda: all(trainer.released for trainer in run.trainers))

        assert run.trainers[1].released[0].outcome is m.Outcome.SAVED
        until(lambda: run.trainers[0].gave_up)


def test_a_connection_that_is_cut_is_made_again_and_was_a_false_alarm() -> None:
    with training(2, PATIENT) as (served, run):
        first = run.connections[1]
        run.cut(1)
        until(lambda: run.connections[1] is not first and run.machines[1].mode is Mode.TRAINING)
        until(lambda: not any(trainer.gate_closed for trainer in run.trainers))

        assert served.store.kinds() == []
        assert not any(trainer.warned for trainer in run.trainers)


def test_everybody_who_has_finished_may_go() -> None:
    with training(2, PATIENT) as (served, run):
        for thread in run.threads:
            thread.post(m.Finished())
        until(lambda: all(trainer.departed for trainer in run.trainers))

        assert all(thread.join(PATIENCE_S) for thread in run.threads)
        assert served.wait_closed()


def test_without_a_controller_protection_is_off_and_said_so() -> None:
    with serve(1) as served:
        address = served.address
    options = ProtocolOptions(register_timeout_s=0.3, lost_controller_s=0.3)
    with running(address, 1, options) as run:
        until(lambda: run.trainers[0].warned)
        with pytest.raises(UnreachableError):
            connect(address, TOKEN, Identity(role=Role.RANK, rank=0, incarnation=INCARNATION), timeout_s=1.0)
        run.fault(0)
        until(lambda: run.trainers[0].released)

        assert run.trainers[0].released[0].outcome is m.Outcome.NOTHING


def test_it_is_protected_while_the_world_is_complete() -> None:
    with training(2, PATIENT) as (_, run):
        assert all(thread.protected for thread in run.threads)
        run.fault(1)
        until(lambda: all(trainer.released for trainer in run.trainers))
        until(lambda: not any(thread.protected for thread in run.threads))


def test_whoever_halts_it_need_not_wait_for_a_controller() -> None:
    with serve(2) as served, running(served.address, 2) as run:
        run.threads[0].halt()
        assert run.threads[0].join(PATIENCE_S)
        assert not run.threads[0].protected


def test_a_forked_child_does_not_keep_the_connection() -> None:
    with training(1, PATIENT) as (_, run):
        assert forked(lambda: os._exit(run.connections[0].fileno() != -1)) == 0
        assert run.connections[0].fileno() != -1
        assert run.threads[0].protected
