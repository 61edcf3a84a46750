"""One run: ranks, controllers, network, store and faults under one clock."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from simulation.sim_clock import Clock
from simulation.sim_controller import SimController
from simulation.sim_faults import Faults
from simulation.sim_invariants import Checks, Violation
from simulation.sim_network import Network
from simulation.sim_plan import Plan
from simulation.sim_rank import SimRank
from simulation.sim_store import Store
from simulation.sim_training import Training
from swansong.protocol import messages as m
from swansong.protocol.states import Phase

PATIENCE_S = 450.0
"""After so long the user kills ranks whose main threads hang by themselves."""
MOST_SECONDS = 1500.0
MOST_EVENTS = 400_000


class Recording(Enum):
    """How much goes into the transcript."""

    NOTHING = 0
    STORY = 1
    """Faults, messages as they come, phases, commits, ends."""
    EVERYTHING = 2
    """Also each call of a machine."""


@dataclass(slots=True)
class Result:
    """What came of a run."""

    plan: Plan
    violation: str = ""
    incidents: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    visits: Counter[tuple[str, str]] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    transcript: list[str] = field(default_factory=list)
    seconds: float = 0.0
    messages: int = 0


class World:
    """Everything in one run."""

    def __init__(self, plan: Plan, *, recording: Recording = Recording.NOTHING) -> None:
        self.plan, self.recording = plan, recording
        self.transcript: list[str] = []
        self.clock = Clock()
        rng = random.Random(plan.seed ^ 0x5EED)
        self.checks = Checks(self)
        self.training = Training(self, rng)
        self.network = Network(self, rng)
        self.store = Store(self, rng)
        self.faults = Faults(self, rng)
        self.controller: SimController | None = None
        """The one that has the address now."""
        self.controllers: list[SimController] = []
        """Every one that there was."""
        self.displaced: list[SimController] = []
        """Those that live, and whose address is another's."""
        self.touched: dict[int, float] = {}
        """When a rank was last stopped, or its connection cut."""
        self.ranks = [SimRank(self, number, rng) for number in range(plan.ranks)]
        self._rng = rng
        self._starting = False
        self._first_death: float | None = None

    # -- running --------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Until every process has ended; a violation ends it earlier."""
        result = Result(self.plan)
        try:
            self._run()
            self.checks.at_the_end()
        except Violation as violation:
            result.violation = str(violation)
            self.record("simulation", f"VIOLATION: {violation}")
        self.checks.close_the_books()
        result.incidents = self.checks.incidents
        result.outcomes = self.checks.outcomes
        result.visits = self.checks.visits
        result.met = self.checks.met
        result.transcript = self.transcript
        result.seconds = self.clock.now
        result.messages = self.network.messages
        return result

    def _run(self) -> None:
        self.faults.happened("start")
        self.start_controller("rank 0")
        for rank in self.ranks:
            rank.after(self._rng.random() * 0.5, rank.start)
        self.clock.at(PATIENCE_S, self._user_kills)
        clock = self.clock
        while self._going_on():
            if not clock.step():
                break
            if clock.now > MOST_SECONDS or clock.done > MOST_EVENTS:
                self.checks.endless()
                break

    def _going_on(self) -> bool:
        running = any(not controller.stopped for controller in self.living())
        return running or any(rank.alive for rank in self.ranks)

    def record(self, who: str, what: str) -> None:
        """Note something for the transcript."""
        if self.recording is not Recording.NOTHING:
            self.transcript.append(f"{self.clock.now:9.3f}  {who:<12}  {what}".rstrip())

    # -- controllers ----------------------------------------------------------------------------------

    def start_controller(self, who: str) -> None:
        """A processor on the controller's host starts a controller; it listens a moment later."""
        if not self._starting:
            self._starting = True
            self.record(who, "starts a controller")
            self.clock.after(0.05 + 0.3 * self._rng.random(), self._controller_listens)

    def _controller_listens(self) -> None:
        self._starting = False
        if 0 in self.network.lost_hosts:
            return
        self.controller = SimController(self, len(self.controllers) + 1)
        self.controllers.append(self.controller)
        self.happened("gathering")

    def controller_ended(self, controller: SimController) -> None:
        """A controller's process is gone."""
        self.record(controller.name, "ends")
        if self.controller is controller:
            self.controller = None
        elif controller in self.displaced:
            self.displaced.remove(controller)

    def displace(self, controller: SimController) -> None:
        """A controller lives on without its address: who is connected stays, who comes finds another."""
        self.controller = None
        self.displaced.append(controller)

    def living(self) -> list[SimController]:
        """Every controller whose process is there."""
        return [*self.displaced, *([self.controller] if self.controller is not None else [])]

    def reached(self) -> SimController | None:
        """The controller that answers at the address; one that has lost it may still do so, once it runs."""
        returned = [controller for controller in self.displaced if not controller.stopped]
        if self.controller is not None and returned and self._rng.random() < 0.5:
            return self._rng.choice(returned)
        return self.controller

    def phase_entered(self, controller: SimController, before: Phase) -> None:
        """A controller has come to another phase."""
        phase = controller.machine.phase
        self.record(controller.name, f"{before} -> {phase}")
        self.happened(phase.value)

    def happened(self, what: str) -> None:
        """Something that faults may wait for has happened."""
        self.faults.happened(what)

    def part_durable(self) -> None:
        """A part is durable, though nobody has been told."""
        self.happened("part")

    # -- ends -----------------------------------------------------------------------------------------

    def touch(self, rank: int) -> None:
        """A rank could not be counted on from now on."""
        self.touched[rank] = self.clock.now

    def process_ended(self, rank: SimRank) -> None:
        """A rank's process is gone: its peers, its controller and its launcher notice."""
        self.record(rank.name, "is gone")
        self.touch(rank.number)
        self.training.leave(rank.number)
        for controller in self.living() if self.plan.pidfd and rank.host == 0 else ():
            controller.after(0.001, self._died, controller, rank.number)
        if self.plan.launcher and not rank.departed and self._first_death is None:
            self._first_death = self.clock.now
            self.clock.after(0.1, self._launcher_terminates)
            self.clock.after(30.0, self._launcher_kills)

    def _died(self, controller: SimController, rank: int) -> None:
        if controller.machine.members.peers[rank].member is not None:
            controller.feed(m.Died(rank))

    def _launcher_terminates(self) -> None:
        for rank in self.ranks:
            if rank.alive:
                rank.run(self.faults._local, rank, m.FaultKind.SIGNALLED, "SIGTERM")

    def _user_kills(self) -> None:
        for rank in self.ranks:
            if rank.stopped or rank.main.doing == "updating":
                rank.kill()

    def _launcher_kills(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def lose_host(self, host: int) -> None:
        """A host is gone, and everything on it."""
        self.network.lose_host(host)
        for controller in self.living() if host == 0 else ():
            controller.die()
        for rank in self.ranks:
            if rank.host == host:
                rank.kill()


def run(plan: Plan, *, recording: Recording = Recording.NOTHING) -> Result:
    """Run a plan."""
    return World(plan, recording=recording).run()
