"""The cut as the protocol's page defines it, by trying everything. Written from its words, not from the code.

Slow on purpose: each question is answered by enumerating ranks, steps and whatever could still be reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swansong.policy.cut import Cut, Held, NoCut, Report
from swansong.state.components import Component, WorldMap

UNHEARD_OF = 10**6
"""A step that nobody has reported."""


@dataclass(frozen=True)
class Case:
    """One call of `choose`."""

    world: WorldMap
    reports: Mapping[int, Report]
    expected: frozenset[int] = frozenset()
    excluded: frozenset[tuple[int, str]] = frozenset()
    only_step: int | None = None


def world_of(holders: Mapping[str, Collection[int]], nbytes: Mapping[str, int] | None = None) -> WorldMap:
    """A world map from component key -> ranks; a component's label is its key, and 1 byte its usual size."""
    size = 1 + max((rank for ranks in holders.values() for rank in ranks), default=-1)
    return WorldMap(
        {
            rank: tuple(
                Component(key, key, (nbytes or {}).get(key, 1)) for key in holders if rank in holders[key]
            )
            for rank in range(size)
        }
    )


# -- who may save ---------------------------------------------------------------------------------------


def whole(case: Case, key: str, step: int) -> dict[int, str]:
    """Rank -> digest, of every holder that reports the component whole at the step."""
    found = {}
    for rank, report in case.reports.items():
        on_the_map = any(component.key == key for component in case.world.members.get(rank, ()))
        held = report.held.get(key, Held(None))
        if on_the_map and held.step == step:
            found[rank] = held.values
    return found


def right_values(digests: Mapping[int, str]) -> str:
    """The digest of the largest agreeing group; if several are as large, of the one with the lowest rank.

    A rank without a digest has no say.
    """
    voters = {rank: digest for rank, digest in digests.items() if digest != ""}
    best = ""
    for rank in sorted(voters):
        size = sum(digest == voters[rank] for digest in voters.values())
        if size > sum(digest == best for digest in voters.values()):
            best = voters[rank]
    return best


def usable(case: Case, key: str, step: int) -> set[int]:
    """Ranks that may save the component at the step."""
    digests = whole(case, key, step)
    right = right_values(digests)
    return {rank for rank in digests if digests[rank] == right and (rank, key) not in case.excluded}


def reported_steps(case: Case) -> set[int]:
    """Every step that somebody reports for anything."""
    return {
        held.step
        for report in case.reports.values()
        for held in report.held.values()
        if held.step is not None
    }


def right_step(case: Case) -> int | None:
    """The step of the cut; None if there is none."""
    steps = reported_steps(case) if case.only_step is None else {case.only_step}
    for step in sorted(steps, reverse=True):
        if case.world.components and all(usable(case, key, step) for key in case.world.components):
            return step
    return None


# -- who is worth waiting for ---------------------------------------------------------------------------


def to_wait_for(case: Case) -> set[int]:
    """Expected ranks whose reports could complete a cut.

    At a step that every component can reach, those that can bring a component there that is not: each that
    can by its report alone, and those that have failed to save it, if they can together, by their votes.
    """
    coming = {rank for rank in case.expected if rank not in case.reports}
    steps = {*reported_steps(case), UNHEARD_OF} if case.only_step is None else {case.only_step}
    found: set[int] = set()
    for step in steps:
        helpers = {key: _helpers(case, key, step, coming) for key in case.world.components}
        lacking = [key for key in helpers if not usable(case, key, step)]
        if all(helpers[key] for key in lacking):
            found.update(*(helpers[key] for key in lacking))
    return found


def _helpers(case: Case, key: str, step: int, coming: set[int]) -> set[int]:
    ranks = [rank for rank in case.world.holders(key) if rank in coming]
    alone = {rank for rank in ranks if _could_complete(case, key, step, [rank])}
    failed = [rank for rank in ranks if (rank, key) in case.excluded]
    return alone | set(failed if _could_complete(case, key, step, failed) else [])


def _could_complete(case: Case, key: str, step: int, ranks: Sequence[int]) -> bool:
    """True if some reports of these ranks make the component usable at the step."""
    digests = {*whole(case, key, step).values(), "", "never seen"}
    for answers in itertools.product([None, *digests], repeat=len(ranks)):
        said = {
            rank: Report(rank, {key: Held(step, digest)})
            for rank, digest in zip(ranks, answers, strict=True)
            if digest is not None
        }
        if usable(Case(case.world, {**case.reports, **said}, excluded=case.excluded), key, step):
            return True
    return False


def completions(case: Case, ranks: Iterable[int]) -> Iterator[Case]:
    """The case after each combination of reports, or silence, of `ranks`: all components, all at once."""
    steps = {*reported_steps(case), UNHEARD_OF, *({case.only_step} - {None})}
    digests = {held.values for report in case.reports.values() for held in report.held.values()}
    states = [Held(None), *(Held(step, digest) for step in steps for digest in {*digests, "never seen"})]
    answers: list[list[Report | None]] = []
    for rank in ranks:
        keys = [component.key for component in case.world.members[rank]]
        answers.append([None])
        for held in itertools.product(states, repeat=len(keys)):
            answers[-1].append(Report(rank, dict(zip(keys, held, strict=True))))
    for said in itertools.product(*answers):
        more = {report.rank: report for report in said if report is not None}
        yield Case(case.world, {**case.reports, **more}, excluded=case.excluded, only_step=case.only_step)


# -- judging --------------------------------------------------------------------------------------------


def judge(case: Case, got: Cut | NoCut) -> None:
    """Fail unless `got` is what the definition gives; which of the usable holders saves is left free."""
    step = right_step(case)
    if step is None:
        assert isinstance(got, NoCut), f"no step has usable holders for all, and yet: {got}"
        assert got.reason
        assert got.waiting_for == tuple(sorted(to_wait_for(case)))
        return
    assert isinstance(got, Cut), f"a cut at step {step} was possible: {got}"
    assert got.step == step
    assert got.savers.keys() == got.spares.keys() == set(case.world.components)
    divergent = {}
    for key, saver in got.savers.items():
        able = usable(case, key, step)
        assert saver in able
        assert got.spares[key] == tuple(sorted(able - {saver}))
        digests = whole(case, key, step)
        others = sorted(rank for rank in digests if digests[rank] not in ("", digests[saver]))
        if others:
            divergent[key] = tuple(others)
    assert got.divergent == divergent
    saved = sorted((key, rank) for rank in got.ranks for key in got.of_rank(rank))
    assert saved == sorted(got.savers.items())


def loads(cut: Cut, world: WorldMap) -> dict[int, int]:
    """Bytes that each saver writes."""
    return {rank: sum(world.components[key].nbytes for key in cut.of_rank(rank)) for rank in cut.ranks}


def best_load(able: Mapping[str, Collection[int]], nbytes: Mapping[str, int]) -> int:
    """The least that the most loaded rank can have, over every way to spread the components."""
    best = sum(nbytes[key] for key in able)
    for ranks in itertools.product(*able.values()):
        load = dict.fromkeys(ranks, 0)
        for key, rank in zip(able, ranks, strict=True):
            load[rank] += nbytes[key]
        best = min(best, max(load.values(), default=0))
    return best
