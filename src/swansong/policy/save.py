"""When a checkpoint is saved: one question, asked at every step boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from swansong.policy.checks import positive_number, whole_number


@dataclass(frozen=True, slots=True)
class SavePoint:
    """What a save policy may look at. Both times are of one monotonic clock."""

    step: int
    """The step that has just become final."""
    last_saved_step: int
    """Step of the last save; before the first, the step at which the run began (0, or that resumed from)."""
    now_s: float
    """The time now, in seconds."""
    last_saved_s: float
    """When the last save began, in seconds; before the first, when saving was set up."""


@runtime_checkable
class SavePolicy(Protocol):
    """Decides whether this boundary gets a checkpoint. A forced save, at the end say, does not ask."""

    def wants(self, at: SavePoint) -> bool:
        """Return True if a checkpoint is due."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Due when `steps` steps have passed since the last save; not at multiples of `steps`.

    Where steps come several at a time (a sink), the first boundary at or after the due step saves.
    """

    steps: int
    """At least 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number("steps", self.steps))

    def wants(self, at: SavePoint) -> bool:
        """See SavePolicy."""
        return at.step - at.last_saved_step >= self.steps


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Due when more than `seconds` seconds have passed since the last save; not yet at exactly as many."""

    seconds: float
    """More than 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", positive_number("seconds", self.seconds))

    def wants(self, at: SavePoint) -> bool:
        """See SavePolicy."""
        return at.now_s - at.last_saved_s > self.seconds


@dataclass(frozen=True, slots=True)
class Never:
    """Never due. Whoever forces a save at the end leaves it out too under this policy, as MindSpore does."""

    def wants(self, at: SavePoint) -> bool:
        """See SavePolicy."""
        return False
