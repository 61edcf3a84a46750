"""What must hold, after every event and at the end of a run."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING

from simulation.sim_guarantee import judged
from simulation.sim_plan import REFUSAL, Fault, Kind
from simulation.sim_situations import of_controller, of_rank, of_report
from simulation.sim_transcript import shown
from swansong.protocol import controller as controller_module
from swansong.protocol import messages as m
from swansong.protocol import processor as processor_module
from swansong.protocol.messages import Action, FaultKind, Outcome
from swansong.protocol.states import NEXT, STEP, Mode, On, Phase

if TYPE_CHECKING:
    from simulation.sim_controller import SimController
    from simulation.sim_rank import SimRank
    from simulation.sim_store import Checkpoint, Part
    from simulation.sim_world import World
    from swansong.protocol.incident import Incident

BUSY = 20
"""So many calls of one machine at one moment are a busy loop, if only ticks."""


_ACTS = (m.CloseGate, m.OpenGate, m.StartSave, m.Wake, m.Depart)
"""What a rank does on a controller's word."""


class Violation(Exception):
    """An invariant does not hold."""


class _Visited(dict):  # type: ignore[type-arg]
    """A table that counts how often each row is taken."""

    def __init__(self, table: dict) -> None:  # type: ignore[type-arg]
        super().__init__(table)
        self.visits: Counter[tuple[str, str]] = Counter()

    def __getitem__(self, row):  # type: ignore[no-untyped-def]
        self.visits[row] += 1
        return super().__getitem__(row)

    def get(self, row, default=None):  # type: ignore[no-untyped-def]
        if row in self:
            self.visits[row] += 1
        return super().get(row, default)


class Checks:
    """Watches one run."""

    def __init__(self, world: World) -> None:
        self.world, self.plan = world, world.plan
        self.incidents = 0
        self.outcomes: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        """Situations that are rare, and how often they came about."""
        self.reports: list[tuple[float, SimController, m.Report]] = []
        self.protected_at = 0.0
        """When the world was complete for the first time."""
        self._next, self._step = _Visited(NEXT), _Visited(STEP)
        controller_module.NEXT = self._next  # type: ignore[misc]
        processor_module.STEP = self._step  # type: ignore[misc]
        self._ticks: dict[str, tuple[float, int]] = {}
        self._opened: dict[str, float] = {}
        self._budget_from: dict[str, float] = {}
        self._content: dict[str, Checkpoint] = {}
        self._voted: dict[str, set[tuple[int, str, int | None]]] = {}
        """Incident -> (rank, component, step) as had been reported when its savers were chosen last."""

    @property
    def visits(self) -> Counter[tuple[str, str]]:
        """How often each row of both tables was taken."""
        return self._next.visits + self._step.visits

    def close_the_books(self) -> None:
        """Count the incidents that nobody reported: false alarms, and those whose controller ended first."""
        self.outcomes["false alarm"] = self._next.visits[Phase.FREEZING, On.FALSE_ALARM]
        self.outcomes["cut short"] = self.incidents - self.outcomes.total()

    def that(self, condition: bool, otherwise: str) -> None:
        """Raise Violation unless it holds."""
        if not condition:
            raise Violation(otherwise)

    # -- the machines ---------------------------------------------------------------------------------

    def processor(self, rank: SimRank, event: m.ProcessorEvent) -> list[m.ProcessorEffect]:
        """Feed a processor, and look at what comes out."""
        world, machine = self.world, rank.machine
        now, before = world.clock.now, machine.mode
        try:
            effects = machine.handle(event, now)
        except Exception as error:
            raise Violation(f"{rank.name} raised {error!r} at {event}:\n{traceback.format_exc()}") from error
        if world.recording.value > 1:
            world.record(
                rank.name, f"{machine.mode}  {shown(event)}{''.join(f'; {shown(e)}' for e in effects)}"
            )
        self._tick(rank.name, event, now, machine.deadline)
        if isinstance(event, m.FromController):
            self._follows(rank, effects)
            self.met.update(of_rank(event, effects))
        if isinstance(event, m.Tick) and before not in (Mode.CONNECTING, Mode.UNPROTECTED):
            self._lease_over(rank, before)
        if before is Mode.ENDED:
            self.that(not effects, f"{rank.name}: effects after its end: {effects}")
        if machine.mode is Mode.ENDED:
            self.that(machine.deadline is None, f"{rank.name}: a deadline after its end")
        return effects

    def _follows(self, rank: SimRank, effects: list[m.ProcessorEffect]) -> None:
        """A rank that has acted on a controller's word never acts on an older one's again."""
        connection = rank.connection_before
        if connection is not None and any(isinstance(effect, _ACTS) for effect in effects):
            generation = connection.controller.generation
            self.that(
                generation >= rank.followed,
                f"{rank.name} obeys {connection.controller.name} after controller {rank.followed}",
            )
            rank.followed = generation

    def _lease_over(self, rank: SimRank, before: Mode) -> None:
        """A rank loses its patience only with a controller that is not to be heard."""
        connection = rank.connection_before
        healthy = (
            rank.machine.mode is Mode.CONNECTING
            and connection is not None
            and not connection.broken
            and connection.controller.alive
            and not connection.controller.stopped_until
            and not rank.stopped_until
        )
        self.that(not healthy, f"{rank.name}: the lease was over while {before}, though its controller lives")

    def controller(self, controller: SimController, event: m.ControllerEvent) -> list[m.ControllerEffect]:
        """Feed a controller, and look at what comes out."""
        world, machine = self.world, controller.machine
        now, before = world.clock.now, machine.phase
        incident = machine.incident
        try:
            effects = machine.handle(event, now)
        except Exception as error:
            raise Violation(
                f"{controller.name} raised {error!r} at {event}:\n{traceback.format_exc()}"
            ) from error
        if world.recording.value > 1:
            world.record(
                controller.name, f"{machine.phase}  {shown(event)}{''.join(f'; {shown(e)}' for e in effects)}"
            )
        self._tick(controller.name, event, now, machine.deadline)
        self.met.update(of_controller(world, controller, before, effects))
        if before is Phase.CLOSED:
            self.that(not effects, f"{controller.name}: effects after its end: {effects}")
        if machine.phase is Phase.CLOSED:
            self.that(machine.deadline is None, f"{controller.name}: a deadline after its end")
        if (
            not self.protected_at
            and machine.phase is not Phase.GATHERING
            and machine.members.world is not None
        ):
            self.protected_at = now
        if machine.incident is not None and machine.incident is not incident:
            self.incidents += 1
            self._opened[machine.incident.id] = now
            self._budget_from[machine.incident.id] = machine.incident.opened_at
        return effects

    def _tick(self, who: str, event: object, now: float, deadline: float | None) -> None:
        self.that(deadline is None or deadline >= now, f"{who}: deadline {deadline} is past at {now}")
        moment, count = self._ticks.get(who, (-1.0, 0))
        count = count + 1 if moment == now and isinstance(event, m.Tick) else 0
        self._ticks[who] = now, count
        self.that(count < BUSY, f"{who}: ticks without end at {now}")

    def message(self, message: m.Message) -> None:
        """Steady state is silent."""
        if self.world.faults.begun or isinstance(
            message, m.Register | m.Welcome | m.World | m.Goodbye | m.Farewell | m.Left | m.Refused
        ):
            return
        # Nobody has been hurt yet, so nobody has anything to say, but for stalls that a plan's phases cause.
        raise Violation(f"a message in steady state: {message}")

    # -- the store ------------------------------------------------------------------------------------

    def written(self, commit: m.Commit, part: Part, key: str) -> None:
        """What one part contributes was whole, at the step of the commit, all the time it was copied."""
        seen = part.seen[key]
        self.that(len(seen) == 1, f"{key} is torn: {seen}")
        step, _ = next(iter(seen))
        self.that(step == commit.step, f"{key} is of step {step}, not {commit.step}")
        self.that(key in self.plan.layout[part.rank], f"rank {part.rank} does not hold {key}")

    def committed(self, controller: SimController, checkpoint: Checkpoint, twin: Checkpoint | None) -> None:
        """A checkpoint has come to be, unless there is a twin of that step already."""
        keys = [key for key, _, _ in checkpoint.content]
        self.that(
            sorted(keys) == list(self.plan.keys),
            f"components of the commit: {keys}, of the world: {self.plan.keys}",
        )
        self.that(checkpoint.step > 0, "a commit of the initial state")
        other = self._content.setdefault(checkpoint.incident, checkpoint)
        self.that(
            other.content == checkpoint.content,
            f"incident {checkpoint.incident}: two commits, {other}, {checkpoint}",
        )
        if twin is not None and not any(fault.kind is Kind.DIVERGE for fault in self.plan.faults):
            self.that(twin.content == checkpoint.content, f"step {twin.step} twice: {twin}, {checkpoint}")

    # -- the guarantee --------------------------------------------------------------------------------

    def reported(self, controller: SimController, report: m.Report) -> None:
        """An incident is over: was it the best that could be had?"""
        now, options = self.world.clock.now, self.plan.options
        if report.incident not in self._opened:  # opened and over within one event
            self.incidents += 1
            self._opened[report.incident] = now
        opened = self._opened[report.incident]
        self.outcomes[report.outcome.value] += 1
        self.reports.append((now, controller, report))
        self.met.update(of_report(self.world, report))
        self.world.record(controller.name, f"outcome: {report.outcome}, step {report.step}, {report.reason}")
        if report.outcome is Outcome.SAVED:
            there = any(checkpoint.step == report.step for checkpoint in self.world.store.checkpoints)
            self.that(there, f"{report.incident}: step {report.step} is said to be saved, and is not")
        if options.budget_s is not None and controller.stopped_until <= opened:
            self.that(now <= opened + options.budget_s, f"{report.incident} took {now - opened:.1f} s")
        budget_from = self._budget_from.get(report.incident, opened)
        worse = judged(self.world, controller, report, opened, budget_from)
        self.that(not worse, worse)

    def chose(self, name: str, incident: Incident | None) -> None:
        """A controller has chosen what to save, by the reports that it has."""
        if incident is not None:
            self._voted[name] = {
                (rank, key, held.step)
                for rank, report in incident.readable().items()
                for key, held in report.held.items()
            }

    def divergent(self, checkpoint: Checkpoint) -> None:
        """Of holders with different values that had reported, those in the majority are right."""
        voted = self._voted.get(checkpoint.incident, set())
        for key, step, value in checkpoint.content if self.plan.digests else ():
            values = Counter(
                rank.main.value(key)
                for rank in self.world.ranks
                if (rank.number, key, step) in voted and rank.main.whole(key) == step
            )
            if all(rank.alive for rank in self.world.ranks) and not self.world.touched:
                self.that(
                    values[value] == max(values.values(), default=0),
                    f"{key}: the values {value} of a minority were saved",
                )

    def woken(self, rank: SimRank, release: m.Release) -> None:
        """A main thread hears an outcome."""
        if release.action is Action.RESUME or release.incident:
            return
        # No controller told it: right only if there could be none.
        world = self.world
        excused = (
            0 in world.network.lost_hosts
            or rank.stopped_until
            or any(controller.stopped_until for controller in world.controllers)
            or world.network.blocked_until.get(rank.number, 0.0) > 0.0
            or any(fault.kind in (Kind.SUPERSEDE, Kind.ABSENT) for fault in self.plan.faults)
            or rank.unprotected == REFUSAL
            or not any(other.alive and self._may_start_one(other) for other in world.ranks)
            or any(closed for closed in (controller.closed for controller in world.controllers))
        )
        self.that(bool(excused), f"{rank.name} is left alone: {release.reason}")

    def _may_start_one(self, rank: SimRank) -> bool:
        """True for ranks that start a controller when there is none: on its host, not cut off or refused."""
        away = rank.stopped_until or rank.number in self.world.network.blocked_until
        return rank.host == 0 and not away and rank.unprotected != REFUSAL

    def _outlived(self, rank: SimRank, moment: float) -> bool:
        """True if a rank was there for long enough after, each new controller counting anew."""
        patience_s = 15.0 * len(self.world.controllers)
        return rank.killed_at is None and (rank.died_at is None or rank.died_at > moment + patience_s)

    # -- the end --------------------------------------------------------------------------------------

    def endless(self) -> None:
        """The run did not end in its time."""
        waiting = [
            f"{rank.name}: {rank.machine.mode}, {rank.main.doing}"
            for rank in self.world.ranks
            if rank.alive and not rank.stopped
        ]
        waiting += [
            f"{controller.name}: {controller.machine.phase}, deadline {controller.machine.deadline}"
            for controller in self.world.living()
            if not controller.stopped
        ]
        self.that(not waiting, f"the run does not end: {'; '.join(waiting)}")

    def at_the_end(self) -> None:
        """Everybody has ended."""
        world, faults = self.world, self.plan.faults
        if not faults:
            self.that(not self.incidents, "an incident though nothing went wrong")
        if all(self._benign(fault) for fault in faults):
            for rank in world.ranks:
                # One that has finished may hear an outcome instead of a farewell, and leaves all the same.
                main = rank.main
                self.that(
                    main.step == self.plan.steps and main.doing == "finished",
                    f"{rank.name} was disturbed: {main.doing} at step {main.step}",
                )
        self._stalls_saved_once()
        self._killed_are_noticed()

    def _stalls_saved_once(self) -> None:
        saved: set[tuple[str, int | None]] = set()
        for _, controller, report in self.reports:
            if report.outcome is Outcome.SAVED and all(f.kind is FaultKind.STALLED for f in report.faults):
                self.that(
                    (controller.name, report.step) not in saved, f"{report.incident}: the same stall again"
                )
                saved.add((controller.name, report.step))

    def _killed_are_noticed(self) -> None:
        if 0 in self.world.network.lost_hosts or any(c.stopped_until for c in self.world.controllers):
            return
        for rank in self.world.ranks:
            killed = rank.killed_at
            if killed is None or not self.protected_at or killed < self.protected_at:
                continue
            excused = (
                rank.machine.mode is Mode.ENDED
                or rank.stopped_until
                or any(now <= killed and _stops(report) for now, _, report in self.reports)
                or not any(
                    self._may_start_one(other) and self._outlived(other, killed) for other in self.world.ranks
                )
            )
            saved = (checkpoint.at for checkpoint in self.world.store.checkpoints)
            noticed = any(at >= killed for at in [*saved, *(now for now, _, _ in self.reports)])
            self.that(bool(excused) or noticed, f"{rank.name} was killed, and nobody noticed")

    def _benign(self, fault: Fault) -> bool:
        """True if training goes on as if nothing had been."""
        options = self.plan.options
        match fault.kind:
            case Kind.STRAY | Kind.DISK_FULL | Kind.HANG_WRITER | Kind.DIVERGE:
                return True
            case _ if options.register_timeout_s < 10.0:  # a rank may give up as the world is completed
                return False
            case Kind.KILL_CONTROLLER:
                return True
            case Kind.CUT:
                others = (Kind.KILL_CONTROLLER, Kind.STOP_CONTROLLER)  # then it may come back too late
                return fault.lasts < 0.5 and not any(f.kind in others for f in self.plan.faults)
            case Kind.STOP:
                return fault.lasts < 1.5
            case Kind.STOP_CONTROLLER:
                return fault.lasts < 15.0
            case Kind.STALL:
                save_s = 1.5 * self.plan.save_s * max(map(len, self.plan.layout))
                hung = sum(len(f.ranks) for f in self.plan.faults if f.kind is Kind.HANG_WRITER)
                save_s += hung * options.idle_timeout_s  # gates are closed for as long
                quick = max(fault.lasts, 1.1 * self.plan.stall_s + save_s) < 0.9 * self.plan.collective_s
                return quick and options.stall_action == "save"
        return False


def _stops(report: m.Report) -> bool:
    return any(fault.kind is not FaultKind.STALLED for fault in report.faults)
