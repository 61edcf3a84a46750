"""The cut: one step, and for each component the rank that will save it. Pure.

A component is *whole at N* on a rank if its clock says so: nothing queued, nothing begun that is not done, N
updates. The cut is the newest N at which every component of the world map has a usable holder. Usable means:

- its rank has reported the component whole at N. The map says what must be saved and the report what can be,
  so a component that a rank's report leaves out is not whole there;
- the rank has not failed to save it before;
- its values are those of the largest group of holders at N with equal values, and of equally large groups,
  the one with the lowest rank. Who failed to save is still a witness to which values are right. Who could
  not say its values is none, and is usable only if no holder at N could: then there is nothing to compare.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from swansong.state.components import WorldMap


@dataclass(frozen=True, slots=True)
class Held:
    """A component on one rank, as its clock shows it."""

    step: int | None
    """Whole at this many updates; None: in an update window, or half done for ever."""
    values: str = ""
    """Digest of sampled values: what replicas compare. Equal text, equal samples. Empty: not known."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says after a freeze."""

    rank: int
    held: Mapping[str, Held]
    """By component key."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A decision to save."""

    step: int
    savers: Mapping[str, int]
    """Component key -> the rank that saves it."""
    spares: Mapping[str, tuple[int, ...]]
    """Component key -> the other usable holders at `step`, lowest first, should the saver fail."""
    divergent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Component key -> ranks that are whole at `step` with values other than those saved, if any."""

    def of_rank(self, rank: int) -> tuple[str, ...]:
        """The components that a rank saves, in a fixed order."""
        return tuple(sorted(key for key, saver in self.savers.items() if saver == rank))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that save something, lowest first."""
        return tuple(sorted(set(self.savers.values())))


@dataclass(frozen=True, slots=True)
class NoCut:
    """A reasoned refusal."""

    reason: str
    """Names components, ranks and steps."""
    waiting_for: tuple[int, ...] = ()
    """Expected ranks whose reports may bring a cut, lowest first; without all of them there can be none.

    Empty if and only if no reports of the expected ranks could bring one. Otherwise these are the ranks that
    could give a component a usable holder at a step at which all others have one, or could get one: ranks
    that have not failed to save the component, and ranks that have, if their votes together could make
    another group the largest.
    """


def choose(
    world: WorldMap,
    reports: Mapping[int, Report],
    *,
    expected: AbstractSet[int] = frozenset(),
    excluded: AbstractSet[tuple[int, str]] = frozenset(),
    only_step: int | None = None,
) -> Cut | NoCut:
    """Decide what to save.

    `expected` are ranks that have not reported but still may. `excluded` are (rank, key) pairs that failed to
    save. With `only_step`, no other step is considered. A cut is never put off for the sake of an expected
    rank that is not needed. The result does not depend on the order of any mapping.
    """
    known = _assess(world, reports, expected, excluded)
    steps = set.intersection(*map(set, known.usable.values())) if known.usable else set()
    if only_step is not None:
        steps &= {only_step}
    return _cut(known, max(steps)) if steps else _refusal(known, only_step)


_NAMED: Final = 3
"""At most so many components, steps and states are spelled out in a reason."""

_Votes: TypeAlias = Mapping[str, Sequence[int]]
"""Digest -> ranks that hold a component with these values, lowest first."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The question, and the reports sorted by component key and step."""

    world: WorldMap
    reports: Mapping[int, Report]
    expected: AbstractSet[int]
    """None of them has reported."""
    excluded: AbstractSet[tuple[int, str]]
    votes: Mapping[str, Mapping[int, _Votes]]
    """Every whole holder."""
    usable: Mapping[str, Mapping[int, tuple[int, ...]]]
    """Ranks that can save, lowest first; never an empty tuple."""


def _assess(
    world: WorldMap,
    reports: Mapping[int, Report],
    expected: AbstractSet[int],
    excluded: AbstractSet[tuple[int, str]],
) -> _Known:
    votes: dict[str, dict[int, dict[str, list[int]]]] = {}
    usable: dict[str, dict[int, tuple[int, ...]]] = {}
    for key in world.components:
        votes[key], usable[key] = {}, {}
        for rank in world.holders(key):
            held = reports[rank].held.get(key) if rank in reports else None
            if held is not None and held.step is not None:
                votes[key].setdefault(held.step, {}).setdefault(held.values, []).append(rank)
        for step, at_step in votes[key].items():
            able = tuple(rank for rank in _agreeing(at_step) if (rank, key) not in excluded)
            if able:
                usable[key][step] = able
    return _Known(world, reports, expected - reports.keys(), excluded, votes, usable)


def _agreeing(votes: _Votes) -> Sequence[int]:
    """The largest group with equal values. Unknown values count only where none is known."""
    groups = [ranks for values, ranks in votes.items() if values] or list(votes.values())
    return max(groups, key=lambda ranks: (len(ranks), -ranks[0]))


def _cut(known: _Known, step: int) -> Cut:
    """Spread the bytes over the usable holders.

    Components with the fewest holders go first, of these the largest, each to the least loaded. Where any two
    sets of holders are disjoint or one contains the other, no saver then has more to write than in the best
    spread plus one component: when it got its last one, every other holder of that one had as much to write
    already, all of it in components that only these ranks hold.
    """
    components = known.world.components
    usable = {key: by_step[step] for key, by_step in known.usable.items()}
    load: dict[int, int] = defaultdict(int)
    savers: dict[str, int] = {}
    for key in sorted(usable, key=lambda key: (len(usable[key]), -components[key].nbytes, key)):
        saver = min(usable[key], key=lambda rank: (load[rank], rank))
        savers[key] = saver
        load[saver] += components[key].nbytes
    spares = {key: tuple(rank for rank in ranks if rank != savers[key]) for key, ranks in usable.items()}
    divergent = {key: ranks for key in usable if (ranks := _divergent(known.votes[key][step]))}
    return Cut(step, savers, spares, divergent)


def _divergent(votes: _Votes) -> tuple[int, ...]:
    saved = _agreeing(votes)
    return tuple(
        sorted(rank for values, ranks in votes.items() if values and ranks is not saved for rank in ranks)
    )


def _worth_waiting_for(known: _Known, only_step: int | None) -> tuple[int, ...]:
    """See `NoCut.waiting_for`."""
    holders = {key: known.world.holders(key) for key in known.world.components}
    coming = {
        key: [rank for rank in ranks if rank in known.expected and (rank, key) not in known.excluded]
        for key, ranks in holders.items()
    }
    witnesses = {
        key: [rank for rank in ranks if rank in known.expected and (rank, key) in known.excluded]
        for key, ranks in holders.items()
    }
    turned = {key: _steps_to_turn(known, key, witnesses[key]) for key in holders}
    # Whoever is coming may be whole at any step, so only components without such a rank limit the steps.
    steps = None if only_step is None else {only_step}
    for key in holders:
        if not coming[key]:
            possible = known.usable[key].keys() | turned[key]
            steps = possible if steps is None else steps & possible
    needed: set[int] = set()
    for key in holders:
        if steps is None or not steps <= known.usable[key].keys():
            needed.update(coming[key])
        if turned[key] if steps is None else turned[key] & steps:
            needed.update(witnesses[key])
    return tuple(sorted(needed))


def _steps_to_turn(known: _Known, key: str, witnesses: Sequence[int]) -> set[int]:
    """Steps at which a component is unusable until the votes of `witnesses`, who cannot save it, come in."""
    turned: set[int] = set()
    if not witnesses:
        return turned
    for step in known.votes[key].keys() - known.usable[key].keys():
        votes = known.votes[key][step]
        for values, ranks in votes.items():
            if all((rank, key) in known.excluded for rank in ranks):
                continue
            joined = sorted([*ranks, *witnesses])
            if _agreeing({**votes, values: joined}) is joined:
                turned.add(step)
    return turned


def _refusal(known: _Known, only_step: int | None) -> NoCut:
    waiting = _worth_waiting_for(known, only_step)
    components = known.world.components
    if not components:
        return NoCut("no component is registered", waiting)
    nowhere = [
        key
        for key, by_step in known.usable.items()
        if not by_step or (only_step is not None and only_step not in by_step)
    ]
    if nowhere:
        when = "any step" if only_step is None else f"step {only_step}"
        said = [
            f"component {components[key].label!r} has no intact holder at {when}: "
            f"{_whereabouts(known, key, only_step)}"
            for key in nowhere[:_NAMED]
        ]
        return NoCut("; ".join(said) + _more(len(nowhere) - _NAMED, "component", ";"), waiting)
    steps = sorted({step for by_step in known.usable.values() for step in by_step}, reverse=True)
    said = [_lacking(known, step) for step in steps[:_NAMED]]
    reason = "no step at which every component is whole: " + "; ".join(said)
    return NoCut(reason + _more(len(steps) - _NAMED, "step", ";"), waiting)


def _lacking(known: _Known, step: int) -> str:
    lacking = [key for key, by_step in known.usable.items() if step not in by_step]
    label = known.world.components[lacking[0]].label
    more = _more(len(lacking) - 1, "component")
    return f"step {step} lacks {label!r} ({_whereabouts(known, lacking[0], step)}){more}"


def _whereabouts(known: _Known, key: str, step: int | None) -> str:
    """What keeps each holder of a component from saving it at `step`; None: at any step."""
    by_state: dict[str, list[int]] = {}
    for rank in known.world.holders(key):
        by_state.setdefault(_obstacle(known, key, rank, step), []).append(rank)
    said = [f"{_ranks(ranks)} {state}" for state, ranks in list(by_state.items())[:_NAMED]]
    rest = sum(map(len, list(by_state.values())[_NAMED:]))
    return ", ".join(said) + _more(rest, "rank")


def _obstacle(known: _Known, key: str, rank: int, step: int | None) -> str:
    if rank not in known.reports:
        return "not heard from yet" if rank in known.expected else "lost or silent"
    held = known.reports[rank].held.get(key)
    if held is None:
        return "reported without it"
    if held.step is None:
        return "in the middle of an update"
    if step is not None and held.step != step:
        return f"whole at step {held.step}"
    if (rank, key) in known.excluded:
        return "failed to save it"
    return "with other values" if held.values else "without a digest of its values"


def _ranks(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
    return f"rank{'s' if len(listed) != 1 else ''} {shown}"


def _more(count: int, what: str, after: str = "") -> str:
    return f"{after} and {count} more {what}{'s' if count != 1 else ''}" if count > 0 else ""
