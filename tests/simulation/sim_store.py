"""Storage: parts that take their time, and commits that are atomic in time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swansong.protocol import messages as m

if TYPE_CHECKING:
    from simulation.sim_controller import SimController
    from simulation.sim_rank import SimRank
    from simulation.sim_world import World


@dataclass(slots=True)
class Part:
    """What one writer has written."""

    rank: int
    keys: tuple[str, ...]
    seen: dict[str, set[tuple[int | None, str]]]
    """By component: the (step, values) that were in memory when each piece was copied."""
    durable: bool = False


@dataclass(slots=True)
class Writer:
    """A save under way in a rank's process."""

    order: m.StartSave
    part: Part
    pieces: int
    stopped: bool = False
    piece: int = 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was committed."""

    incident: str
    step: int
    content: tuple[tuple[str, int, str], ...]
    """(component, step, values), sorted."""
    path: str
    at: float


@dataclass(slots=True)
class Place:
    """Where the parts of one incident lie until they are committed."""

    parts: dict[tuple[int, int], Part] = field(default_factory=dict)
    """(attempt, rank) -> part."""
    commits: int = 0
    """Commits under way."""


class Store:
    """The directory that everybody writes to."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.plan, self.rng = world, world.plan, rng
        self.places: dict[str, Place] = {}
        self.checkpoints: list[Checkpoint] = []
        self.full: set[int] = set()
        self.hung: set[int] = set()
        self.commits_fail = 0
        self.commits_hang = 0
        self.failed_at: list[float] = []

    def place(self, incident: str) -> Place:
        """Where an incident's parts go."""
        return self.places.setdefault(incident, Place())

    # -- parts ----------------------------------------------------------------------------------------

    def start(self, rank: SimRank, order: m.StartSave) -> None:
        """Begin to write a part."""
        part = Part(rank.number, order.keys, {key: set() for key in order.keys})
        # Progress shows often enough, however slow the writing.
        pieces = max(3, math.ceil(3 * self.plan.save_s * len(order.keys) / self.plan.options.idle_timeout_s))
        writer = Writer(order, part, pieces)
        self.world.checks.that(
            (order.incident, order.attempt) not in rank.writers,
            f"{rank.name}: attempt {order.attempt} begun twice",
        )
        rank.writers[order.incident, order.attempt] = writer
        self.place(order.incident).parts[order.attempt, rank.number] = part
        self._copy(rank, writer)

    def stop(self, rank: SimRank, effect: m.StopSave) -> None:
        """Stop writing."""
        writer = rank.writers.get((effect.incident, effect.attempt))
        if writer is not None:
            writer.stopped = True

    def _copy(self, rank: SimRank, writer: Writer) -> None:
        """Copy a piece of each component, and look at the clock again."""
        if writer.stopped:
            return
        order = writer.order
        if rank.number in self.hung:
            return
        for key in order.keys:
            whole = rank.main.whole(key)
            writer.part.seen[key].add((whole, rank.main.value(key)))
            if whole != order.step:
                self._say(rank, m.SaveFailed(order.incident, order.attempt, f"{key} moved", True))
                return
        if rank.number in self.full and writer.piece:
            what = "disk full: 100 bytes needed, 0 free"
            self._say(rank, m.SaveFailed(order.incident, order.attempt, what))
            return
        if writer.piece == writer.pieces:
            writer.part.durable = True
            self._say(rank, m.Saved(order.incident, order.attempt))
            self.world.part_durable()
            return
        writer.piece += 1
        if writer.piece > 1:
            self._say(rank, m.Wrote(order.incident, order.attempt, 100 * writer.piece))
        seconds = self.plan.save_s * len(order.keys) / writer.pieces * (0.5 + self.rng.random())
        rank.after(seconds, self._copy, rank, writer)

    def _say(self, rank: SimRank, event: m.ProcessorEvent) -> None:
        """The writer's thread tells the processor's, which may be busy with something else."""
        rank.after(0.002 * self.rng.random(), rank.feed, event)

    # -- commits --------------------------------------------------------------------------------------

    def prepare(self, controller: SimController, effect: m.Prepare) -> None:
        """Make the place."""
        self.place(effect.incident)

    def commit(self, controller: SimController, effect: m.Commit) -> None:
        """Begin a commit; it comes to be at one moment, unless the controller dies first."""
        self.place(effect.incident).commits += 1
        if self.commits_hang:
            self.commits_hang -= 1
            return
        controller.after(self.plan.commit_s * (0.5 + self.rng.random()), self._committed, controller, effect)

    def _committed(self, controller: SimController, effect: m.Commit) -> None:
        self.place(effect.incident).commits -= 1
        if self.commits_fail:
            self.commits_fail -= 1
            self._answer(controller, m.CommitFailed(effect.incident, "input/output error"))
            return
        place = self.place(effect.incident)
        content: list[tuple[str, int, str]] = []
        for attempt, rank, keys in effect.parts:
            part = place.parts.get((attempt, rank))
            if part is None or not part.durable or not set(keys) <= set(part.keys):
                self.world.checks.that(
                    False, f"commit of a part that is not there: attempt {attempt}, rank {rank}"
                )
                return
            for key in keys:
                self.world.checks.written(effect, part, key)
                content.append((key, *next(iter(part.seen[key]))))
        checkpoint = Checkpoint(
            effect.incident, effect.step, tuple(sorted(content)), f"step {effect.step}", self.world.clock.now
        )
        twin = next((c for c in self.checkpoints if c.step == checkpoint.step), None)
        self.world.checks.committed(controller, checkpoint, twin)
        self.world.checks.divergent(checkpoint)
        if twin is None:
            self.checkpoints.append(checkpoint)
            self.world.record("store", f"step {checkpoint.step} is committed")
        self._answer(controller, m.Committed(effect.incident, checkpoint.path))
        self.world.happened("committed")

    def _answer(self, controller: SimController, event: m.ControllerEvent) -> None:
        controller.after(0.002 * self.rng.random(), controller.feed, event)

    def discard(self, controller: SimController, incident: str) -> None:
        """Nothing more of an incident will be committed; a commit under way is not disturbed."""
        if not self.place(incident).commits:
            self.places.pop(incident)
