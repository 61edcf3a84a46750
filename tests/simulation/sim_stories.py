"""The main incidents as stories, kept in `tests/golden/transcript_*.txt`: the protocol by example."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simulation.sim_plan import Fault, Kind, Plan
from simulation.sim_world import Recording, run


def _plan(*faults: Fault, components: str = "mmm", **details: object) -> Plan:
    layout = tuple((component,) for component in components)
    settings: dict[str, object] = {
        "seed": 1,
        "hosts": (0,) * len(layout),
        "steps": 3,
        "step_s": 0.5,
        **details,
    }
    return Plan(layout=layout, faults=faults, **settings)  # type: ignore[arg-type]


_KILLED = Fault(Kind.KILL, (1,), "rank 1 at 2", 0.1)

STORIES: Mapping[str, Plan] = MappingProxyType(
    {
        "killed_rank": _plan(_KILLED),
        "killed_saver": _plan(_KILLED, Fault(Kind.KILL, (0,), "saving", 0.4)),
        "false_alarm": _plan(Fault(Kind.CUT, (1,), "rank 1 at 1", 0.1, lasts=0.2)),
        "stall": _plan(Fault(Kind.STALL, (1,), "rank 1 at 2", 0.1, lasts=100.0)),
        "killed_controller": _plan(
            Fault(Kind.THROW, (1,), "rank 1 at 2", 0.1), Fault(Kind.KILL_CONTROLLER, (), "saving", 0.4)
        ),
        "nothing_saved": _plan(_KILLED, components="xyx"),
    }
)


def told(plan: Plan) -> str:
    """The story of a plan, from the moment at which its world is complete."""
    transcript = run(plan, recording=Recording.STORY).transcript
    begin = next(at for at, line in enumerate(transcript) if "gathering -> training" in line)
    return "\n".join([str(plan), "", *transcript[begin:], ""])
