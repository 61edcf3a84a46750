"""Every timeout and limit of the protocol, in one frozen value. Seconds are of a monotonic clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from swansong.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolOptions:
    """How long whoever waits waits. Raises ConfigError for a value that is no positive finite number."""

    register_timeout_s: float = 600.0
    """How long a new job's ranks may take to register, all of them; then protection is off, and said so."""
    reregister_timeout_s: float = 10.0
    """How long the ranks of a known world may take to find a controller that was started anew."""
    reconnect_s: float = 2.0
    """How long a rank whose connection ended may take to come back before it counts as lost."""
    freeze_timeout_s: float = 5.0
    """How long ranks may take to report after a freeze; who is needed is waited for."""
    settle_timeout_s: float = 5.0
    """How much longer ranks that are inside an update, or just behind one, may take to leave it."""
    needed_timeout_s: float = 60.0
    """How long a rank without which nothing can be saved is waited for, from the freeze on."""
    idle_timeout_s: float = 30.0
    """How long a saver may show no progress before another takes its place."""
    commit_timeout_s: float = 60.0
    """How long the committer may take."""
    exit_grace_s: float = 5.0
    """How long ranks may take to end after the release."""
    goodbye_timeout_s: float = 60.0
    """How long a rank that has finished waits for the others: until they have, its state may be needed."""
    lost_controller_s: float = 60.0
    """How long a rank that had a controller looks for one before it says that protection is off."""
    gate_lease_s: float = 30.0
    """How long a gate stays closed without a word from any controller."""
    budget_s: float | None = None
    """How long an incident may take as a whole, exits included; None: as long as there is progress."""
    commit_reserve_s: float = 3.0
    """What of the budget is kept for the commit."""
    attempts: int = 3
    """How often savers are chosen anew from fresh reports before the incident is given up."""
    stall_action: Literal["save", "stop"] = "save"
    """After a stall was saved: go on if it can, or end the job."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "stall_action":
                if value not in {"save", "stop"}:
                    raise ConfigError(f"stall_action: wanted 'save' or 'stop', got {value!r}")
            elif spec.name == "budget_s" and value is None:
                continue
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{spec.name}: wanted a positive finite number, got {value!r}")

    @property
    def writing_s(self) -> float | None:
        """What the budget leaves for writing, whatever the rest takes of its time; None: no budget."""
        if self.budget_s is None:
            return None
        rest = self.freeze_timeout_s + self.settle_timeout_s + self.commit_reserve_s + self.exit_grace_s
        return max(0.0, self.budget_s - rest)

    @classmethod
    def within(cls, budget_s: float) -> ProtocolOptions:
        """Timeouts for an incident that a launcher ends after `budget_s` seconds (25 under torchrun)."""
        return cls(
            budget_s=budget_s,
            reregister_timeout_s=min(5.0, budget_s / 5),
            freeze_timeout_s=min(1.0, budget_s / 10),
            settle_timeout_s=min(1.0, budget_s / 10),
            needed_timeout_s=budget_s / 2,
            idle_timeout_s=min(5.0, budget_s / 4),
            commit_reserve_s=min(3.0, budget_s / 8),
            exit_grace_s=min(1.0, budget_s / 10),
        )
