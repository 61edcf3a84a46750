"""Situations that are rare, noticed as they come about: a campaign in which they do not has shown little."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from swansong.protocol import messages as m
from swansong.protocol.states import WORKING, Phase

if TYPE_CHECKING:
    from simulation.sim_controller import SimController
    from simulation.sim_world import World

APART: Final = "components a step apart, nothing in common"
BEHIND: Final = "saved a step that somebody was past"
AGAIN: Final = "chosen anew from fresh reports"
REPLACED: Final = "a saver replaced"
INHERITED: Final = "a part used whose writer is dead"
TWO: Final = "two controllers at work at once"
TURNED_AWAY: Final = "a rank turned its back on an outdated controller"
STEPPED_DOWN: Final = "an outdated controller told by a greeting"
REFUSED: Final = "a rank refused for good"
SKIPPED: Final = "saved after a skipped update"
SITUATIONS: Final = (
    APART,
    BEHIND,
    AGAIN,
    REPLACED,
    INHERITED,
    TWO,
    TURNED_AWAY,
    STEPPED_DOWN,
    REFUSED,
    SKIPPED,
)


def of_rank(event: m.FromController, effects: list[m.ProcessorEffect]) -> Iterator[str]:
    """What a rank's answer to a controller shows."""
    match event.message:
        case m.Welcome() if m.Disconnect() in effects:
            yield TURNED_AWAY
        case m.Refused(retry=False):
            yield REFUSED


def of_controller(
    world: World, controller: SimController, before: Phase, effects: list[m.ControllerEffect]
) -> Iterator[str]:
    """What a controller's call shows."""
    phase = controller.machine.phase
    if (
        phase in WORKING
        and before not in WORKING
        and any(
            other is not controller and not other.stopped and other.connections for other in world.living()
        )
    ):
        yield TWO
    if phase is Phase.FREEZING and before in (Phase.SAVING, Phase.COMMITTING):
        yield AGAIN
    elif phase is Phase.SAVING and any(
        isinstance(effect, m.Send) and isinstance(effect.message, m.Void) for effect in effects
    ):
        yield REPLACED


def of_report(world: World, report: m.Report) -> Iterator[str]:
    """What the end of an incident shows."""
    if report.reason.startswith("no step at which every component is whole"):
        yield APART
    step = report.step
    if step is None:
        return
    if any(done > step for rank in world.ranks for done in rank.main.done.values()):
        yield BEHIND
    if any(not world.ranks[rank].alive for rank in report.savers.values()):
        yield INHERITED
    if any(skipped < step for skipped, _ in world.plan.skips):
        yield SKIPPED
