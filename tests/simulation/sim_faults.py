"""What goes wrong, done to the simulated world."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.sim_plan import FOR_EVER, REFUSAL, Fault, Kind
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind

if TYPE_CHECKING:
    from simulation.sim_rank import SimRank
    from simulation.sim_world import World


class Faults:
    """Waits for the moments at which faults are due, and commits them."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.begun = False
        self._count: dict[str, int] = {}
        self._waiting: dict[str, list[Fault]] = {}
        for fault in world.plan.faults:
            self._waiting.setdefault(fault.when, []).append(fault)

    def happened(self, what: str) -> None:
        """Something that faults may wait for has happened."""
        self._count[what] = self._count.get(what, 0) + 1
        for fault in self._waiting.get(what, ()):
            if fault.nth == self._count[what]:
                self.world.clock.after(fault.after, self.commit, fault)

    def commit(self, fault: Fault) -> None:
        """Do it."""
        self.begun = True
        self.world.record("fault", f"{fault.kind} {list(fault.ranks) if fault.ranks else ''}".strip())
        everywhere = _EVERYWHERE.get(fault.kind)
        if everywhere is not None:
            everywhere(self, fault)
            return
        each = _EACH[fault.kind]
        for number in fault.ranks:
            if self.world.ranks[number].alive:
                each(self, self.world.ranks[number], fault)

    # -- to ranks -------------------------------------------------------------------------------------

    def _throw(self, rank: SimRank, fault: Fault) -> None:
        rank.run(rank.main.throw, "ValueError: out of luck")

    def _kill(self, rank: SimRank, fault: Fault) -> None:
        rank.kill()

    def _stop(self, rank: SimRank, fault: Fault) -> None:
        if not rank.stopped:
            rank.stop(self.world.clock.now + fault.lasts)
            self.world.touch(rank.number)
            if fault.lasts < FOR_EVER:
                self.world.clock.after(fault.lasts, rank.go_on)

    def _sigterm(self, rank: SimRank, fault: Fault) -> None:
        rank.run(self._local, rank, FaultKind.SIGNALLED, "SIGTERM")

    def _request_here(self, rank: SimRank, fault: Fault) -> None:
        rank.run(self._local, rank, FaultKind.REQUESTED, "the script asks")

    def _local(self, rank: SimRank, kind: FaultKind, what: str) -> None:
        rank.feed(m.LocalFault(m.Fault(kind=kind, rank=rank.number, what=what, step=rank.main.boundary)))

    def _cut(self, rank: SimRank, fault: Fault) -> None:
        network = self.world.network
        self.world.touch(rank.number)
        network.blocked_until[rank.number] = self.world.clock.now + fault.lasts
        if rank.connection is not None:
            network.cut(rank.connection, silent=self.rng.random() < 0.2)

    def _stall(self, rank: SimRank, fault: Fault) -> None:
        rank.main.stalled_until = max(rank.main.stalled_until, self.world.clock.now + fault.lasts)

    def _window(self, rank: SimRank, fault: Fault) -> None:
        rank.main.freezes_window = True

    def _disk_full(self, rank: SimRank, fault: Fault) -> None:
        self.world.store.full.add(rank.number)

    def _hang_writer(self, rank: SimRank, fault: Fault) -> None:
        self.world.store.hung.add(rank.number)

    def _diverge(self, rank: SimRank, fault: Fault) -> None:
        rank.main.diverged = True

    def _refuse(self, rank: SimRank, fault: Fault) -> None:
        if rank.connection is not None:
            controller, why = rank.connection.controller, m.Refused(reason=REFUSAL, retry=False)
            controller.run(controller.refuse, rank.connection, why)
            self.world.touch(rank.number)

    def _absent(self, rank: SimRank, fault: Fault) -> None:
        self.world.network.blocked_until[rank.number] = 1e9

    # -- to everything else ---------------------------------------------------------------------------

    def _request(self, fault: Fault) -> None:
        if self.world.controller is not None:
            self.world.controller.run(self.world.controller.feed, m.Persist("an operator"))

    def _kill_host(self, fault: Fault) -> None:
        for host in fault.ranks:
            self.world.lose_host(host)

    def _kill_controller(self, fault: Fault) -> None:
        if self.world.controller is not None:
            self.world.controller.die()

    def _kill_both(self, fault: Fault) -> None:
        self._kill_controller(fault)
        for number in fault.ranks:
            self.world.ranks[number].kill()

    def _stop_controller(self, fault: Fault) -> None:
        controller = self.world.controller
        if controller is not None and not controller.stopped:
            controller.stop(self.world.clock.now + fault.lasts)
            if fault.lasts < FOR_EVER:
                self.world.clock.after(fault.lasts, controller.go_on)

    def _displace(self, fault: Fault) -> None:
        controller = self.world.controller
        if controller is not None and not controller.stopped:
            self._stop_controller(fault)
            self.world.displace(controller)
            for rank in (self.world.ranks[number] for number in fault.ranks):
                if rank.connection is not None:
                    self.world.network.cut(rank.connection, silent=False)
                    self.world.touch(rank.number)

    def _commit_fails(self, fault: Fault) -> None:
        self.world.store.commits_fail += 1

    def _commit_hangs(self, fault: Fault) -> None:
        self.world.store.commits_hang += 1

    def _supersede(self, fault: Fault) -> None:
        if self.world.controller is not None:
            self.world.controller.run(self.world.controller.feed, m.Superseded())

    def _stray(self, fault: Fault) -> None:
        if self.world.controller is not None:
            order = m.FaultReport(fault=m.Fault(kind=FaultKind.REQUESTED, rank=0))
            self.world.controller.run(self.world.controller.feed, m.Received(-1, order))


_EACH: dict[Kind, Callable[[Faults, SimRank, Fault], None]] = {
    Kind.THROW: Faults._throw,
    Kind.THROW_ALL: Faults._throw,
    Kind.KILL: Faults._kill,
    Kind.STOP: Faults._stop,
    Kind.SIGTERM: Faults._sigterm,
    Kind.SIGTERM_ALL: Faults._sigterm,
    Kind.REQUEST_HERE: Faults._request_here,
    Kind.CUT: Faults._cut,
    Kind.STALL: Faults._stall,
    Kind.WINDOW: Faults._window,
    Kind.DISK_FULL: Faults._disk_full,
    Kind.HANG_WRITER: Faults._hang_writer,
    Kind.DIVERGE: Faults._diverge,
    Kind.ABSENT: Faults._absent,
    Kind.REFUSE: Faults._refuse,
}
_EVERYWHERE: dict[Kind, Callable[[Faults, Fault], None]] = {
    Kind.REQUEST: Faults._request,
    Kind.KILL_HOST: Faults._kill_host,
    Kind.KILL_CONTROLLER: Faults._kill_controller,
    Kind.KILL_BOTH: Faults._kill_both,
    Kind.STOP_CONTROLLER: Faults._stop_controller,
    Kind.DISPLACE: Faults._displace,
    Kind.COMMIT_FAILS: Faults._commit_fails,
    Kind.COMMIT_HANGS: Faults._commit_hangs,
    Kind.SUPERSEDE: Faults._supersede,
    Kind.STRAY: Faults._stray,
}
