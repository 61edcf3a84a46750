"""Which checkpoints of a series stay, decided after each commit.

`periodic` and `final` checkpoints are *counted*: the policies thin them out. Any other (a fault's, an
exception's, one that was asked for) stays until training has moved on from it: until the runs that descend
from it have committed as many counted checkpoints as the policy keeps. A run descends from a checkpoint if
it was resumed from it, or from a checkpoint of a run that does.

Sequence numbers alone order checkpoints. Steps go back when a run is resumed from an older one, and clocks
are set back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from swansong.policy.checks import positive_number, whole_number

COUNTED: Final = frozenset({"periodic", "final"})
"""The kinds that retention counts and thins out."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that exists, as its manifest describes it."""

    id: str
    """Unlike any other checkpoint's."""
    seq: int
    """Place in the series' order; a checkpoint's is higher than that of the one its run was resumed from."""
    time_s: float
    """When it was committed, by its manifest: seconds since the epoch."""
    kind: str
    """`periodic`, `final`, `exception`, `fault`, `preemption` or `requested`."""
    run: str
    """The incarnation that wrote it."""
    parent: str | None
    """Id of the checkpoint from which `run` was resumed, even if it is gone by now; None: began afresh."""


@runtime_checkable
class KeepPolicy(Protocol):
    """Decides what is removed from a series."""

    def doomed(self, committed: Sequence[Committed], newest: str) -> list[str]:
        """Return the ids to remove now, oldest first.

        `committed` is all that exists of one series, in any order; `newest` is the id of the newest that is
        known to verify. That one always stays; if it is not among `committed`, everything does. Applied to
        what it left, a policy removes nothing, unless a forged parent was younger than the run that names it.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The `count` counted checkpoints with the highest sequence numbers stay."""

    count: int
    """At least 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole_number("count", self.count))

    def doomed(self, committed: Sequence[Committed], newest: str) -> list[str]:
        """See KeepPolicy. n log n in the number of checkpoints."""
        ordered = _ordered(committed)
        surplus = {entry.id for entry in _counted(ordered)[: -self.count]}
        return _listed(ordered, surplus | _outlived(ordered, self.count), newest)


@dataclass(frozen=True, slots=True)
class KeepPerMinutes:
    """Counted checkpoints are thinned to about one per `minutes` minutes, as MindSpore thins them.

    When c commits and a, b are the two newest kept, b goes if and only if c is less than `minutes` minutes
    younger than a. So the oldest and the newest stay, and saves rarer than that all stay. A checkpoint
    counts as committed no earlier than its predecessor, whatever the clock said.
    """

    minutes: float
    """More than 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "minutes", positive_number("minutes", self.minutes))

    def doomed(self, committed: Sequence[Committed], newest: str) -> list[str]:
        """See KeepPolicy. n log n in the number of checkpoints."""
        ordered = _ordered(committed)
        counted = _counted(ordered)
        thinned = {entry.id for entry in counted} - self._kept(counted, newest)
        return _listed(ordered, thinned | _outlived(ordered, 1), newest)

    def _kept(self, counted: Sequence[Committed], newest: str) -> set[str]:
        """Fold the rule over `counted`; ids of those that stay, `newest` among them."""
        window_s = 60 * self.minutes
        kept: list[tuple[str, float]] = []
        for entry in counted:
            # The second look, at what stands once b is gone, finds something only if the clock was set
            # back: c may have owed its time to b. Without it, what stays would be thinned again next time.
            while (
                len(kept) > 1
                and kept[-1][0] != newest
                and max(entry.time_s, kept[-1][1]) - kept[-2][1] < window_s
            ):
                kept.pop()
            kept.append((entry.id, max(entry.time_s, kept[-1][1]) if kept else entry.time_s))
        return {name for name, _ in kept}


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Nothing is ever removed."""

    def doomed(self, committed: Sequence[Committed], newest: str) -> list[str]:
        """See KeepPolicy."""
        return []


def _ordered(committed: Sequence[Committed]) -> list[Committed]:
    return sorted(committed, key=lambda entry: (entry.seq, entry.id))


def _counted(ordered: Sequence[Committed]) -> list[Committed]:
    return [entry for entry in ordered if entry.kind in COUNTED]


def _outlived(ordered: Sequence[Committed], enough: int) -> set[str]:
    """Ids of those not counted from which training has moved on by `enough` counted checkpoints."""
    by_id = {entry.id: entry for entry in ordered}
    first: dict[str, Committed] = {}
    for entry in ordered:
        first.setdefault(entry.run, entry)
    # A run's tally grows to include the runs that descend from it. Runs are taken youngest first, so a
    # tally is complete when it is passed on. A parent that is not older than the run is disregarded: no
    # true manifest names one, and a false one must not remove anything.
    tally = Counter(entry.run for entry in _counted(ordered))
    descending: Counter[str] = Counter()
    for run in reversed(first):
        parent = by_id.get(first[run].parent or "")
        if parent is not None and parent.seq < first[run].seq:
            descending[parent.id] += tally[run]
            tally[parent.run] += tally[run]
    return {entry.id for entry in ordered if entry.kind not in COUNTED and descending[entry.id] >= enough}


def _listed(ordered: Sequence[Committed], going: AbstractSet[str], newest: str) -> list[str]:
    """Put `going` in order, or nothing where none would be known to remain."""
    if all(entry.id != newest for entry in ordered):
        return []
    return [entry.id for entry in ordered if entry.id in going and entry.id != newest]
