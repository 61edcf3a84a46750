"""The guarantee: was the outcome of an incident the best that could be had?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.sim_plan import FOR_EVER, Kind
from swansong.protocol import messages as m
from swansong.protocol.messages import Outcome

if TYPE_CHECKING:
    from simulation.sim_controller import SimController
    from simulation.sim_rank import SimRank
    from simulation.sim_world import World


def judged(
    world: World, controller: SimController, report: m.Report, opened: float, budget_from: float
) -> str:
    """Why an outcome is not the best; empty if it is, or if nothing was promised.

    `opened` is when the incident began, `budget_from` when its budget did.
    """
    promised = (
        controller.stopped_until <= opened
        and controller.machine.members.world is not None
        and not any(fault.kind in (Kind.COMMIT_FAILS, Kind.COMMIT_HANGS) for fault in world.plan.faults)
    )
    if not promised:
        return ""
    options = world.plan.options
    if report.outcome is Outcome.SAVED:
        best = _best(world, controller, opened, opened + min(1.0, options.freeze_timeout_s / 2))
        if best is not None and best > (report.step or 0):
            return f"{report.incident}: {report.step} saved, not {best}"
    elif not report.reason.startswith("no time left"):  # that depends on who was waited for
        ends = opened + options.needed_timeout_s - 1.0
        if options.budget_s is not None:
            ends = min(ends, budget_from + options.budget_s / 2)
        best = _best(world, controller, opened, ends)
        saved = max((checkpoint.step for checkpoint in world.store.checkpoints), default=-1)
        parted = any(fault.kind is Kind.DIVERGE for fault in world.plan.faults)  # a minority may not save
        if best is not None and best > saved and not parted:
            return f"{report.incident}: {best} is whole on ranks that answer, but: {report.reason}"
    return ""


def _best(world: World, controller: SimController, opened: float, answered_by: float) -> int | None:
    """The newest step that is to be had from ranks that nothing happens to, if they answer by then."""
    sound = [rank for rank in world.ranks if _sound(world, rank, controller, opened, answered_by)]
    steps = [
        {rank.main.whole(key) for rank in sound if key in rank.main.keys} - {None} for key in world.plan.keys
    ]
    return max(set.intersection(*steps), default=None)


def _sound(world: World, rank: SimRank, controller: SimController, opened: float, answered_by: float) -> bool:
    main, registered = rank.main, controller.machine.members.peers[rank.number].since
    return (
        rank.alive
        and rank.stopped_until < answered_by
        and rank.connection is not None
        and not rank.connection.broken
        and rank.connection.controller is controller
        # One that comes back later may have counted as lost.
        and rank.connection.made_at < opened
        and registered is not None
        and registered <= opened
        and world.touched.get(rank.number, -FOR_EVER) < opened - 20.0
        and rank.number not in world.store.full | world.store.hung
        and main.changed_at < answered_by
        and main.unreadable_until < answered_by
        and main.boundary is not None
    )
