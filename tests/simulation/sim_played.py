"""A situation played in the simulation: a world that has run, and what a test asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulation.sim_plan import Fault, Plan
from simulation.sim_world import Recording, World
from swansong.protocol import messages as m

POOLED = (("model",),) * 4
GROUPS = (("X",), ("Y",), ("X",), ("Y",))
"""X on ranks 0 and 2, Y on ranks 1 and 3."""


def played(*faults: Fault, layout: tuple[tuple[str, ...], ...] = POOLED, **details: object) -> World:
    """Run a plan of 4 ranks and 5 steps unless told otherwise; every invariant must hold."""
    settings: dict[str, object] = {"seed": 1, "hosts": (0,) * len(layout), "steps": 5, **details}
    plan = Plan(layout=layout, faults=faults, **settings)  # type: ignore[arg-type]
    world = World(plan, recording=Recording.STORY)
    result = world.run()
    assert not result.violation, "\n".join([*result.transcript, result.violation])
    return world


def found(
    what: Callable[[World], bool],
    *faults: Fault,
    layout: tuple[tuple[str, ...], ...] = POOLED,
    **details: object,
) -> Iterator[World]:
    """Of 80 seeds, the worlds in which it so happened; some at least."""
    number = 0
    for seed in range(80):
        world = played(*faults, layout=layout, seed=seed, **details)
        if what(world):
            number += 1
            yield world
    assert number, "it never happened"


def saved(world: World) -> list[int]:
    """Steps of what was committed, in order."""
    return [checkpoint.step for checkpoint in world.store.checkpoints]


def last(world: World) -> m.Report:
    """Of the latest incident."""
    return world.checks.reports[-1][2]


def report(world: World) -> m.Report:
    """Of the only incident."""
    assert len(world.checks.reports) == 1
    return last(world)


def writers(world: World) -> dict[str, int]:
    """Component -> who wrote it, of the latest incident."""
    return last(world).savers


def at(rank: int, step: int) -> str:
    """The moment at which a rank comes to a boundary."""
    return f"rank {rank} at {step}"


def done(world: World) -> list[dict[str, int]]:
    """By rank, how many updates of each component were finished."""
    return [dict(rank.main.done) for rank in world.ranks]


def undisturbed(world: World) -> bool:
    """True if every rank came to the end of its training."""
    return all(rank.departed and rank.main.step == world.plan.steps for rank in world.ranks)
