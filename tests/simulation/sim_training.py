"""The training loops: what the main threads do, in collectives, votes, update windows and at boundaries.

A model of what an adapter does with a real framework, after the protocol's page: the clock of a component is
(queued, begun, done); gate and vote are one act; a closed gate contributes no.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, Fault, FaultKind

if TYPE_CHECKING:
    from simulation.sim_rank import SimRank
    from simulation.sim_world import World

VOTE_GRACE_S = 0.4
"""How long a voter whose gate has closed waits for the outcome before it takes `queued` back and parks."""


@dataclass(slots=True)
class Meeting:
    """A collective, or a vote: complete when all members have come."""

    members: tuple[int, ...]
    came: dict[int, bool] = field(default_factory=dict)
    waiting: dict[int, Callable[[bool], None]] = field(default_factory=dict)
    """By rank that has not heard the outcome yet, whom to tell."""
    deaf: set[int] = field(default_factory=set)
    """Ranks for which it fails, though it is complete."""

    @property
    def complete(self) -> bool:
        """True if everybody has come."""
        return len(self.came) == len(self.members)


class Training:
    """What the ranks share: the collectives."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.plan, self.rng = world, world.plan, rng
        self.meetings: dict[tuple[str, int, int], Meeting] = {}
        self.gone: set[int] = set()
        self.voting = len(self.plan.keys) > 1
        self.everyone = tuple(range(self.plan.ranks))
        self.groups = {key: self.plan.holders(key) for key in self.plan.keys}

    def meet(
        self,
        name: tuple[str, int, int],
        members: tuple[int, ...],
        rank: int,
        yes: bool,
        then: Callable[[bool], None],
    ) -> None:
        """A rank comes to a meeting; `then` is called, on that rank, with whether all said yes."""
        meeting = self.meetings.get(name)
        if meeting is None:
            meeting = self.meetings[name] = Meeting(members)
        meeting.came[rank] = yes
        meeting.waiting[rank] = then
        if meeting.complete:
            outcome = all(meeting.came.values())
            for who in meeting.waiting:
                delay = self.rng.random() * self.plan.latency_s
                self.world.ranks[who].after(delay, self._tell, meeting, who, outcome)
            self.world.happened("vote" if name[0] == "vote" else "collective")
        elif self.gone and self.gone.intersection(members) - meeting.came.keys():
            self._fail(meeting, rank)

    @staticmethod
    def _tell(meeting: Meeting, who: int, outcome: bool) -> None:
        call = meeting.waiting.pop(who, None) if who not in meeting.deaf else None
        if call is not None:
            call(outcome)

    def leave(self, rank: int) -> None:
        """A process is gone; who waits for it, or will, notices in its own way."""
        self.gone.add(rank)
        for meeting in self.meetings.values():
            if not meeting.waiting or rank not in meeting.members:
                continue
            if rank not in meeting.came:
                for who in list(meeting.waiting):
                    self._fail(meeting, who)
            elif self.plan.uneven and meeting.complete:
                for who in [who for who in meeting.waiting if self.rng.random() < 0.5]:
                    meeting.deaf.add(who)
                    self._fail(meeting, who)

    def _fail(self, meeting: Meeting, rank: int) -> None:
        main = self.world.ranks[rank].main
        if self.plan.peer_death == "raise":
            main.rank.after(self.rng.random() * 0.5, main.fail_in, meeting)
        elif self.plan.peer_death == "late":
            main.unreadable_until = self.world.clock.now + 33.0
            main.rank.after(33.0, main.fail_in, meeting)


class MainThread:
    """One rank's training loop."""

    def __init__(self, world: World, rank: SimRank, rng: random.Random) -> None:
        self.world, self.rank, self.rng, self.plan = world, rank, rng, world.plan
        self.training = world.training
        self.keys = self.plan.layout[rank.number]
        self.groups = [key for key in sorted(self.keys) if len(self.training.groups[key]) > 1]
        self.step = 0
        self.queued = 0
        self.begun = dict.fromkeys(self.keys, 0)
        self.done = dict.fromkeys(self.keys, 0)
        self.changes = dict.fromkeys(self.keys, 0)
        self.boundary: int | None = None
        self.doing = "starting"
        self.gate_closed = False
        self.woken: m.Release | None = None
        self.ended = False
        self.resume: Callable[[], None] | None = None
        self.unreadable_until = 0.0
        self.changed_at = 0.0
        self.progress_at = 0.0
        self.diverged = False
        self.freezes_window = False
        self.stalled_until = 0.0
        self.round = 0
        self._epoch = 0
        self._pending: tuple[bool, bool | None] = (False, None)  # contributed yes, outcome

    # -- what the processor reads ---------------------------------------------------------------------

    def held(self) -> dict[str, Held]:
        """Where each component stands, by its clock."""
        held: dict[str, Held] = {}
        for key in self.keys:
            step = self.whole(key)
            known = step is not None and self.plan.digests
            held[key] = Held(step, self.value(key) if known else "")
        return held

    def whole(self, key: str) -> int | None:
        """The step at which a component is whole, if it is."""
        done = self.done[key]
        return done if self.queued == self.begun[key] == done else None

    def value(self, key: str) -> str:
        """A digest of values: the same for replicas at one step."""
        return f"{self.changes[key]}" + (f" of rank {self.rank.number}" if self.diverged else "")

    def settled(self) -> bool:
        """True if nothing changes before the gate opens."""
        return self.doing not in ("updating", "updated", "voting")

    # -- the loop -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin training."""
        self.progress_at = self.world.clock.now
        self.rank.after(self.plan.stall_s, self._watch)
        self._compute()

    def _later(self, seconds: float, then: Callable[..., None], *args: object) -> None:
        self.rank.after(seconds, self._go_on, self._epoch, then, args)

    def _go_on(self, epoch: int, then: Callable[..., None], args: tuple[object, ...]) -> None:
        if epoch != self._epoch or self.ended:
            return
        if self.stalled_until > self.world.clock.now:
            self.rank.at(self.stalled_until, self._go_on, epoch, then, args)
            return
        then(*args)

    def _spread(self, seconds: float) -> float:
        return seconds * (0.5 + self.rng.random())

    def _compute(self) -> None:
        if self.step >= self.plan.steps:
            self.doing = "finished"
            self._changed()
            self.rank.feed(m.Finished())
            return
        self.doing = "computing"
        self.round = 0
        self._later(self._spread(self.plan.step_s), self._reduce, 0)

    def _reduce(self, index: int) -> None:
        if index == len(self.groups):
            self._gate()
            return
        self.doing = "in a collective"
        key = self.groups[index]
        self._meet((key, self.step, 0), self.training.groups[key], True, lambda _: self._reduce(index + 1))

    def _meet(
        self, name: tuple[str, int, int], members: tuple[int, ...], yes: bool, then: Callable[[bool], None]
    ) -> None:
        epoch = self._epoch

        def come(outcome: bool) -> None:
            self._go_on(epoch, then, (outcome,))

        self.training.meet(name, members, self.rank.number, yes, come)
        if self.plan.uneven or not self.training.meetings[name].complete:
            self.rank.after(self.plan.collective_s, self._timed_out, epoch, name)

    def _timed_out(self, epoch: int, name: tuple[str, int, int]) -> None:
        meeting = self.training.meetings[name]
        if epoch == self._epoch and self.rank.number in meeting.waiting and not self.ended:
            self.fail_in(meeting, "a collective timed out")

    def fail_in(self, meeting: Meeting, what: str = "a peer is gone") -> None:
        """A collective fails, unless it was completed or left."""
        if meeting.waiting.pop(self.rank.number, None) is not None:
            self.throw(what)

    # -- gate and vote --------------------------------------------------------------------------------

    def _gate(self) -> None:
        if self.woken is not None:
            self.end()
        elif self.training.voting:
            self._vote()
        elif self.gate_closed:
            self._park("parked at the gate", self._gate)
        else:
            self.queued = self.step + 1
            self._update(0)

    def _vote(self) -> None:
        yes = not self.gate_closed
        self._pending = (yes, None)
        if yes:
            self.queued = self.step + 1
            self.doing = "voting"
        else:
            self._park("parked at the gate, voted no", self._read_vote)
        self._changed()
        name = ("vote", self.step, self.round)
        self.round += 1
        self._meet(name, self.training.everyone, yes, self._voted)

    def _voted(self, outcome: bool) -> None:
        self._pending = (self._pending[0], outcome)
        if self.doing == "voting":
            self._read_vote()
        elif self.doing == "waiting for the vote":
            self._vote_or_end()

    def _vote_or_end(self) -> None:
        if self.woken is not None:
            self.end()
        else:
            self._vote()

    def _read_vote(self) -> None:
        """Read the outcome, if there is one; the gate is open, or was when yes was said."""
        yes, outcome = self._pending
        if outcome is None:
            self.doing = "voting" if yes else "waiting for the vote"
            self.queued = self.step + yes
        elif outcome:
            self.queued = self.step + 1
            self._update(0)
        else:
            self.queued = self.step
            self._vote_or_end()
        self._changed()

    def _give_up_voting(self) -> None:
        if self.doing == "voting" and self.gate_closed:
            self.queued = self.step
            self._park("parked, its vote pending", self._read_vote)
            self._changed()

    def _park(self, what: str, resume: Callable[[], None]) -> None:
        if self.woken is not None:
            self.end()
            return
        self.doing, self.resume = what, resume

    def close_gate(self) -> None:
        """No update may begin."""
        self.gate_closed = True
        if self.doing == "voting":
            self._later(VOTE_GRACE_S, self._give_up_voting)

    def open_gate(self) -> None:
        """Updates may begin."""
        self.gate_closed = False
        self.progress_at = self.world.clock.now
        if self.resume is not None:
            resume, self.resume = self.resume, None
            self._later(0.0, resume)

    # -- update and boundary --------------------------------------------------------------------------

    def _update(self, index: int) -> None:
        self.doing = "updating"
        key = self.keys[index]
        self.begun[key] += 1
        if (self.step, key) in self.plan.skips:  # the clock counts in one act
            self._updated(index)
            return
        self._changed()
        if self.freezes_window:
            return
        self._later(self._spread(self.plan.window_s), self._updated, index)

    def _updated(self, index: int) -> None:
        key = self.keys[index]
        self.done[key] += 1
        self.changes[key] += (self.step, key) not in self.plan.skips
        if index + 1 < len(self.keys):
            self._update(index + 1)
            return
        self.doing = "updated"
        self._changed()
        self._later(self._spread(self.plan.boundary_s), self._at_boundary)

    def _at_boundary(self) -> None:
        self.step += 1
        self.boundary = self.step
        self.doing = "at the boundary"
        self.progress_at = self.world.clock.now
        self._changed()
        self.world.record(self.rank.name, f"boundary {self.step}")
        self.world.happened(f"rank {self.rank.number} at {self.step}")
        if self.plan.evaluate_s and self.step == (self.plan.steps + 1) // 2:
            self.doing = "evaluating"
            self._later(self.plan.evaluate_s, self._evaluated)
        else:
            self._compute()

    def _evaluated(self) -> None:
        self.progress_at = self.world.clock.now
        self._compute()

    def _changed(self) -> None:
        self.changed_at = self.world.clock.now
        if self.rank.watching:
            self.rank.read_soon()

    # -- what goes wrong ------------------------------------------------------------------------------

    def throw(self, what: str) -> None:
        """The loop ends with an exception; the thread waits to hear the outcome."""
        if self.ended or self.doing in ("finished", "threw"):
            return
        if self.doing == "voting":
            self.queued = self.step
        self._epoch += 1
        self.doing, self.resume = "threw", None
        self.world.record(self.rank.name, f"throws: {what}")
        self._changed()
        if self.woken is not None:
            self.end()
        else:
            fault = Fault(kind=FaultKind.RAISED, rank=self.rank.number, what=what, step=self.boundary)
            self.rank.feed(m.LocalFault(fault))

    def wake(self, release: m.Release) -> None:
        """Hear how it ended. Who computes notices at the gate, or is ended."""
        if release.action is Action.RESUME:
            return
        self.woken = release
        if self.doing in ("threw", "finished") or self.resume is not None:
            self._epoch += 1
            self.rank.after(0.001, self.end)
        else:
            self.rank.after(self.plan.options.exit_grace_s, self.end)

    def end(self) -> None:
        """The process ends."""
        if not self.ended:
            self.ended = True
            self.rank.exit()

    def _watch(self) -> None:
        """The watchdog: no progress for the stall time, outside of declared phases."""
        now = self.world.clock.now
        exempt = self.gate_closed or self.doing in ("evaluating", "finished", "threw")
        if exempt:
            self.progress_at = now
        elif now >= self.progress_at + self.plan.stall_s:
            self.progress_at = now
            fault = Fault(
                kind=FaultKind.STALLED, rank=self.rank.number, what="no progress", step=self.boundary
            )
            self.rank.feed(m.LocalFault(fault))
        self.rank.at(self.progress_at + self.plan.stall_s * (1.0 + 0.02 * self.rng.random()), self._watch)
