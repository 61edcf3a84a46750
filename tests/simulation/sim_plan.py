"""What one run of the simulation is made of: ranks, components, options, faults. All of it from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import StrEnum

from swansong.protocol.options import ProtocolOptions

FOR_EVER = 1e9
REFUSAL = "not of this job"
"""The reason of a refusal."""


class Kind(StrEnum):
    """What can go wrong."""

    THROW = "throw"
    THROW_ALL = "throw all"
    KILL = "kill"
    STOP = "stop"  # SIGSTOP; SIGCONT after `lasts`
    SIGTERM = "sigterm"
    SIGTERM_ALL = "sigterm all"
    REQUEST = "operator request"
    REQUEST_HERE = "request by the script"
    KILL_HOST = "kill host"
    KILL_CONTROLLER = "kill controller"
    STOP_CONTROLLER = "stop controller"
    DISPLACE = "displace controller"  # these ranks, and all who come, find another; stopped for `lasts`
    REFUSE = "refuse"  # ranks that are connected, for good
    KILL_BOTH = "kill controller and ranks"
    CUT = "cut connection"  # and none can be made for `lasts`
    STALL = "stall"  # the main thread does nothing for `lasts`
    WINDOW = "stuck in its update"  # the next update window does not end
    DISK_FULL = "disk full"  # for the parts of these ranks
    HANG_WRITER = "hung writer"
    COMMIT_FAILS = "commit fails"
    COMMIT_HANGS = "commit hangs"
    SUPERSEDE = "another incarnation"
    ABSENT = "never registers"
    DIVERGE = "other values"
    STRAY = "unknown connection"


STORAGE = frozenset({Kind.DISK_FULL, Kind.HANG_WRITER, Kind.COMMIT_FAILS, Kind.COMMIT_HANGS})
"""Failures of the storage: they free us of the guarantee, never of the rest."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong: `after` seconds after the `nth` time that `when` happens."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    when: str = "training"
    """A phase of the controller; "start"; "part": one is durable; "committed": the rename is done;
    "register", "welcome": said by one side, not heard by the other; "rank 1 at 2": at that boundary;
    "collective", "vote": complete, and nobody has heard."""
    after: float = 0.0
    nth: int = 1
    lasts: float = FOR_EVER

    def __str__(self) -> str:
        ranks = f" {list(self.ranks)}" if self.ranks else ""
        lasts = f", for {self.lasts:g} s" if self.lasts < FOR_EVER else ""
        nth = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.kind}{ranks} {self.after:.4f} s after {self.when!r}{nth}{lasts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. The same plan gives the same run."""

    seed: int
    layout: tuple[tuple[str, ...], ...]
    """Component keys of each rank."""
    hosts: tuple[int, ...]
    """Host of each rank. The controller lives on host 0, as rank 0 does."""
    options: ProtocolOptions = field(default_factory=ProtocolOptions)
    faults: tuple[Fault, ...] = ()
    steps: int = 5
    step_s: float = 0.1
    window_s: float = 0.02
    boundary_s: float = 0.005
    latency_s: float = 0.002
    save_s: float = 1.0
    """For one component."""
    commit_s: float = 0.1
    evaluate_s: float = 0.0
    stall_s: float = 60.0
    collective_s: float = 300.0
    """How long a collective waits for ranks that do not come."""
    peer_death: str = "raise"
    """What a collective does when a peer dies: "raise", "hang", or "late" (33 s, the clock not readable)."""
    launcher: bool = False
    """A launcher that sends SIGTERM to all 0.1 s after the first death and SIGKILL 30 s after it."""
    host_timeout_s: float = 10.0
    digests: bool = True
    """Whether holders know digests of their values."""
    pidfd: bool = True
    uneven: bool = False
    """Whether a collective that is complete may still fail for some when a member dies."""
    skips: frozenset[tuple[int, str]] = frozenset()
    """(step, component) of updates that are skipped, as by a gradient scaler: the step counts."""
    greetings: bool = True
    """Whether an outdated controller learns of it from a rank's greeting; else only the rank can know."""
    shape: str = ""
    """Who holds what, in words."""

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.layout)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every component."""
        return tuple(sorted({key for keys in self.layout for key in keys}))

    def holders(self, key: str) -> tuple[int, ...]:
        """Ranks that hold a component."""
        return tuple(rank for rank, keys in enumerate(self.layout) if key in keys)

    def storage_fails(self) -> bool:
        """True if the storage is among what goes wrong."""
        return any(fault.kind in STORAGE for fault in self.faults)

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks on hosts {list(self.hosts)}, {self.steps} steps"]
        lines += [f"  {key}: ranks {list(self.holders(key))}" for key in self.keys]
        budget = self.options.budget_s
        lines.append(
            f"  budget {budget}, peers' death: {self.peer_death}, save {self.save_s:g} s a component"
        )
        lines += [f"  skipped: {sorted(self.skips)}"] if self.skips else []
        lines += ["  collectives may end unevenly"] if self.uneven else []
        lines += [f"  fault: {fault}" for fault in self.faults]
        return "\n".join(lines)


def random_plan(seed: int, least: int = 2, most: int = 8) -> Plan:
    """Draw a plan; small worlds are drawn more often than large ones."""
    rng = random.Random(seed)
    ranks = _ranks(rng, least, most)
    hosts_count = rng.choice((1, 1, 2, 3))
    shape, layout = _layout(rng, ranks)
    launcher = rng.random() < 0.15
    slow = rng.random() < 0.1
    plan = Plan(
        seed=seed,
        layout=layout,
        hosts=tuple(rank * min(hosts_count, ranks) // ranks for rank in range(ranks)),
        options=_options(rng, launcher),
        steps=rng.randint(2, 5),
        step_s=rng.choice((0.02, 0.1, 0.5)),
        window_s=rng.choice((0.001, 0.02, 0.2, 2.0)),
        boundary_s=rng.choice((0.001, 0.02, 0.5)),
        latency_s=rng.choice((0.0002, 0.002, 0.05)),
        save_s=rng.choice((5.0, 40.0)) if slow else rng.choice((0.05, 0.5, 2.0)),
        commit_s=rng.choice((0.01, 0.1, 0.5)),
        evaluate_s=rng.choice((0.0, 0.0, 0.0, 100.0)),
        collective_s=rng.choice((90.0, 300.0)),
        peer_death=rng.choice(("raise", "raise", "hang", "late")),
        launcher=launcher,
        pidfd=rng.random() < 0.7,
        digests=rng.random() < 0.8,
        uneven=rng.random() < 0.3,
        greetings=rng.random() < 0.5,
        shape=shape,
    )
    if rng.random() < 0.15:
        plan = replace(plan, skips=_skips(plan, rng))
    return _with_faults(plan, rng)


def _skips(plan: Plan, rng: random.Random) -> frozenset[tuple[int, str]]:
    """A scaler of its own for each component, or one for all."""
    alone = rng.random() < 0.5
    steps = [(step, rng.random() < 0.4) for step in range(plan.steps)]
    return frozenset(
        (step, key)
        for step, all_skip in steps
        for key in plan.keys
        if (rng.random() < 0.3 if alone else all_skip)
    )


def _ranks(rng: random.Random, least: int, most: int) -> int:
    if most > 8 and (least > 8 or rng.random() < 0.05):
        return rng.randint(max(least, 8), most)
    return rng.choice([n for n in (1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 8) if least <= n <= most] or [least])


def _layout(rng: random.Random, ranks: int) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Who holds what: in words, and by rank."""
    kind = rng.random()
    if kind < 0.35 or ranks == 1:
        return "one component", (("model",),) * ranks
    if kind < 0.62:
        groups = rng.randint(2, max(2, min(4, ranks // 2)))
        return "groups", tuple((f"shard {rank % groups}",) for rank in range(ranks))
    if kind < 0.72:
        return "groups of any size", tuple((f"shard {rng.randrange(2)}",) for _ in range(ranks))
    if kind < 0.82:
        return "one, and pairs", tuple(("model", f"optimizer {rank // 2}") for rank in range(ranks))
    if kind < 0.87:
        return "sole holders", tuple((f"stage {rank}",) for rank in range(ranks))
    if kind < 0.95:
        ring = range(ranks)
        return "ring", tuple((f"shard {rank}", f"shard {(rank + 1) % ranks}") for rank in ring)
    shared = tuple((f"part {rank % 3}",) for rank in range(ranks))
    return "one rank holds all", (("part 0", "part 1", "part 2"), *shared[1:])


def _options(rng: random.Random, launcher: bool) -> ProtocolOptions:
    if launcher or rng.random() < 0.15:
        return ProtocolOptions.within(25.0)
    return ProtocolOptions(
        stall_action=rng.choice(("save", "save", "stop")),
        register_timeout_s=rng.choice((600.0, 600.0, 600.0, 600.0, 600.0, 2.0)),
    )


_FIRST: tuple[tuple[Kind, int], ...] = (
    (Kind.THROW, 6),
    (Kind.KILL, 8),
    (Kind.THROW_ALL, 1),
    (Kind.STOP, 3),
    (Kind.SIGTERM, 2),
    (Kind.SIGTERM_ALL, 1),
    (Kind.REQUEST, 1),
    (Kind.REQUEST_HERE, 1),
    (Kind.KILL_HOST, 1),
    (Kind.KILL_CONTROLLER, 3),
    (Kind.STOP_CONTROLLER, 1),
    (Kind.DISPLACE, 3),
    (Kind.REFUSE, 1),
    (Kind.KILL_BOTH, 1),
    (Kind.CUT, 4),
    (Kind.STALL, 2),
    (Kind.WINDOW, 1),
    (Kind.SUPERSEDE, 1),
    (Kind.ABSENT, 1),
    (Kind.DIVERGE, 1),
    (Kind.STRAY, 1),
)
_AT_A_COLLECTIVE: tuple[tuple[Kind, int], ...] = (
    (Kind.KILL, 12),
    (Kind.THROW, 1),
    (Kind.STOP, 2),
    (Kind.STALL, 1),
    (Kind.CUT, 1),
    (Kind.KILL_BOTH, 1),
    (Kind.KILL_HOST, 1),
)
_THEN: tuple[tuple[Kind, int], ...] = (
    *_FIRST,
    (Kind.DISK_FULL, 5),
    (Kind.HANG_WRITER, 4),
    (Kind.COMMIT_FAILS, 2),
    (Kind.COMMIT_HANGS, 1),
    (Kind.KILL, 10),
    (Kind.CUT, 3),
    (Kind.KILL_CONTROLLER, 5),
    (Kind.STOP, 2),
    (Kind.STOP_CONTROLLER, 2),
    (Kind.DISPLACE, 3),
    (Kind.REFUSE, 1),
)
_OF_NO_RANK = frozenset(
    {
        Kind.REQUEST,
        Kind.KILL_CONTROLLER,
        Kind.STOP_CONTROLLER,
        Kind.SUPERSEDE,
        Kind.STRAY,
        Kind.COMMIT_FAILS,
        Kind.COMMIT_HANGS,
    }
)
_MOMENTS = (
    "freezing",
    "saving",
    "part",
    "committing",
    "committed",
    "releasing",
    "gathering",
    "register",
    "welcome",
)
_OF_SEVERAL = frozenset(
    {
        Kind.KILL,
        Kind.KILL_BOTH,
        Kind.DISK_FULL,
        Kind.HANG_WRITER,
        Kind.STOP,
        Kind.CUT,
        Kind.DISPLACE,
        Kind.REFUSE,
    }
)


def _with_faults(plan: Plan, rng: random.Random) -> Plan:
    """Up to six faults: the first while training, the others then or aimed at a phase."""
    if rng.random() < 0.03:
        return plan
    length = plan.steps * (plan.step_s + plan.window_s + plan.boundary_s) * 1.1 + plan.evaluate_s / 2
    faults = [_first_fault(plan, rng, length)]
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 2, 3, 5))):
        if rng.random() < 0.2:
            faults.append(_fault(plan, rng, _THEN, "training", rng.random() * length))
            continue
        after = rng.choice((0.0, 0.001, 0.01, 0.1, 1.0, 5.0)) * rng.random() * 2
        faults.append(_fault(plan, rng, _THEN, rng.choice(_MOMENTS), after))
    return replace(plan, faults=tuple(faults))


def _first_fault(plan: Plan, rng: random.Random, length: float) -> Fault:
    """At any time; or, as only then components part, when some have heard of a collective and others not."""
    if rng.random() < (0.5 if plan.uneven else 0.05):
        when = "vote" if len(plan.keys) > 1 else "collective"
        return _fault(plan, rng, _AT_A_COLLECTIVE, when, 1.5 * plan.latency_s * rng.random())
    return _fault(plan, rng, _FIRST, "training", length * rng.random())


def _fault(
    plan: Plan, rng: random.Random, kinds: tuple[tuple[Kind, int], ...], when: str, after: float
) -> Fault:
    kind = rng.choices([k for k, _ in kinds], [weight for _, weight in kinds])[0]
    ranks: tuple[int, ...] = (rng.randrange(plan.ranks),)
    if kind in _OF_SEVERAL:
        count = min(plan.ranks, rng.choice((1, 1, 1, 2, 3)))
        ranks = tuple(sorted(rng.sample(range(plan.ranks), count)))
    elif kind is Kind.KILL_HOST:
        ranks = (rng.choice(plan.hosts),)
    elif kind in (Kind.THROW_ALL, Kind.SIGTERM_ALL):
        ranks = tuple(range(plan.ranks))
    elif kind in _OF_NO_RANK:
        ranks = ()
    lasts = FOR_EVER
    if kind in (Kind.STOP, Kind.STOP_CONTROLLER, Kind.CUT, Kind.STALL):
        lasts = rng.choice((0.0, 0.2, 1.0, 1.8, 3.0, 8.0, 20.0, 50.0, 70.0, 100.0, FOR_EVER))
    if kind is Kind.DISPLACE:
        lasts = rng.choice((0.0, 1.0, 3.0, 8.0, 11.0, 14.0, 20.0, 50.0, FOR_EVER))
    if kind in (Kind.CUT, Kind.STALL) and lasts == FOR_EVER:
        lasts = 150.0
    if kind in (Kind.ABSENT, Kind.DIVERGE):
        when, after = "start", 0.0
    return Fault(kind, ranks, when, after, _which(plan, rng, when), lasts)


def _which(plan: Plan, rng: random.Random, when: str) -> int:
    if when == "training":
        return 1
    if when in ("vote", "collective"):
        return rng.randint(1, plan.steps)
    return rng.randint(1, 2 * plan.ranks) if when in ("register", "welcome") else rng.choice((1, 1, 1, 2))
