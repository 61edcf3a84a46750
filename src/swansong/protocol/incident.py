"""One incident: its faults, the reports that came, the cut, and how far its savers are. Pure.

The controller machine owns one of these while something is wrong, and turns what is decided here into
messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from swansong.policy import cut as cutting
from swansong.policy.cut import Cut, Held, NoCut
from swansong.protocol import messages as m
from swansong.protocol.messages import Fault, FaultKind, StateReport
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.states import WORKING, Phase
from swansong.state.components import WorldMap


@dataclass(slots=True)
class Order:
    """What one saver was told to write, as one part."""

    attempt: int
    rank: int
    step: int
    keys: tuple[str, ...]
    """Components; none: only what the flight recorders of its host hold."""
    values: tuple[str, ...]
    """Digest of sampled values of each component."""
    nbytes: int = 0
    """Written so far."""
    moved_at: float = 0.0
    """When it last showed progress."""
    done: bool = False
    """True once durable; then it counts whatever becomes of its writer."""


@dataclass(slots=True)
class Incident:
    """Everything between the first fault and the release."""

    id: str
    opened_at: float
    options: ProtocolOptions
    faults: list[Fault] = field(default_factory=list)
    """In the order in which they became known. A lost rank's step is the last boundary that it reported in
    this incident; None: it was not heard, so it may have been gone before."""
    heard: dict[int, int | None] = field(default_factory=dict)
    """Rank -> last boundary that it reported in this incident, of reports that count no more."""
    frozen_at: float = 0.0
    """When reports were last asked for."""
    round: int = 1
    """How often they were asked for."""
    attempt: int = 0
    """Number of the latest order."""
    reports: dict[int, StateReport] = field(default_factory=dict)
    """The latest of each rank, since the last freeze."""
    excluded: set[tuple[int, str]] = field(default_factory=set)
    """(rank, component key) that could not be written."""
    moved: set[tuple[int, str]] = field(default_factory=set)
    """The same, of which the state moved while it was copied: no longer whole at the chosen step."""
    cut: Cut | None = None
    values: dict[str, str] = field(default_factory=dict)
    """By component key, the digest of sampled values that the cut is to save."""
    orders: list[Order] = field(default_factory=list)
    """Of the present cut, and what was done for earlier ones."""
    mute_hosts: set[str] = field(default_factory=set)
    """Hosts whose flight recorders could not be written out."""
    reported_at: float | None = None
    """When everybody had reported since the last freeze, or had had the time to."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long it took, in all its rounds: `detect` the fault after the first sign of one, have everybody
    report (`freeze`), `choose` the cut, `save`, `commit`. Detecting goes on while others report."""
    notes: list[str] = field(default_factory=list)
    """What went wrong on the way, for the report."""
    failure: str = ""
    """Which saver could not deliver last, and why: with what was needed and free, for want of space."""

    # -- time -----------------------------------------------------------------------------------------

    @property
    def budget_ends(self) -> float | None:
        """When everything but the exits must be over."""
        if self.options.budget_s is None:
            return None
        return self.opened_at + self.options.budget_s - self.options.exit_grace_s

    @property
    def saving_ends(self) -> float | None:
        """When the parts must be there."""
        ends = self.budget_ends
        return None if ends is None else ends - self.options.commit_reserve_s

    @property
    def freeze_ends(self) -> float:
        """Until when reports are waited for."""
        return self._within(self.frozen_at + self.options.freeze_timeout_s)

    @property
    def settle_ends(self) -> float:
        """Until when ranks inside an update are waited for."""
        return self._within(self.freeze_ends + self.options.settle_timeout_s)

    @property
    def needed_ends(self) -> float:
        """Until when ranks are waited for without which nothing can be saved."""
        return self._within(self.frozen_at + self.options.needed_timeout_s)

    def records_end(self) -> float:
        """Until when hosts' records are waited for, once every component is durable."""
        moments = [order.moved_at + self.options.idle_timeout_s for order in self.open_orders()]
        return self._within(min(moments, default=0.0))

    def spend(self, phase: Phase, since: float, now: float) -> None:
        """Account for the time in a phase that is over."""
        if phase is Phase.FREEZING:
            reported_at = now if self.reported_at is None else self.reported_at
            self._took("freeze", reported_at - since)
            self._took("choose", now - reported_at)
        elif phase in WORKING:
            self._took("save" if phase is Phase.SAVING else "commit", now - since)

    def _took(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def _within(self, moment: float) -> float:
        ends = self.saving_ends
        return moment if ends is None else min(moment, ends)

    # -- faults ---------------------------------------------------------------------------------------

    @property
    def cause(self) -> FaultKind:
        """What became known first: the ranks end by that. What began it, the report tells."""
        return self.faults[0].kind if self.faults else FaultKind.LOST

    @property
    def stops(self) -> bool:
        """True if the job ends after it: anything but stalls that are only to be saved."""
        return self.options.stall_action == "stop" or any(
            f.kind is not FaultKind.STALLED for f in self.faults
        )

    def add(self, fault: Fault, now: float) -> None:
        """Note a fault, unless it is known already."""
        if not self.faults:
            self._took("detect", now - self.opened_at)
        if fault.kind is FaultKind.LOST:
            report = self.reports.get(fault.rank)
            last = self.heard.get(fault.rank) if report is None else report.boundary
            fault = msgspec.structs.replace(fault, step=last)
        if all((known.kind, known.rank) != (fault.kind, fault.rank) for known in self.faults):
            self.faults.append(fault)

    def note(self, text: str) -> None:
        """Remember what went wrong on the way."""
        if len(self.notes) < 100:
            self.notes.append(text)

    def release(self, outcome: m.Outcome, path: str, reason: str) -> m.Release:
        """What everybody is told at its end; of a failure also what kept the savers from saving."""
        if outcome is m.Outcome.NOTHING and self.failure:
            reason = self.failure if reason in self.failure else f"{reason}; {self.failure}"
        return m.Release(
            incident=self.id,
            outcome=outcome,
            action=m.Action.STOP if self.stops else m.Action.RESUME,
            step=self.cut.step if self.cut is not None and outcome is m.Outcome.SAVED else None,
            path=path,
            reason=reason,
            cause=self.cause,
        )

    def summary(self, release: m.Release) -> m.Report:
        """What its report is made of."""
        done = {key: rank for _, rank, keys in self.parts() for key in keys}
        return m.Report(
            incident=self.id,
            faults=tuple(self.faults),
            outcome=release.outcome,
            step=release.step,
            path=release.path,
            reason=release.reason,
            reports=dict(self.reports),
            savers=done if release.outcome is m.Outcome.SAVED else {},
            notes=tuple(self.notes),
            seconds=dict(self.seconds),
        )

    # -- freezing -------------------------------------------------------------------------------------

    def freeze(self, now: float) -> None:
        """Forget what was reported, and ask anew. Parts that are durable stay."""
        self.frozen_at, self.reported_at = now, None
        for rank in list(self.reports):
            self.forget(rank)
        self.moved.clear()
        self.cut = None
        self.values.clear()
        self.orders = [order for order in self.orders if order.done]

    def forget(self, rank: int) -> None:
        """What a rank reported does not count any more. Parts that it finished stay."""
        report = self.reports.pop(rank, None)
        if report is not None:
            self.heard[rank] = report.boundary

    def readable(self) -> dict[int, cutting.Report]:
        """The reports that say something; who cannot read its clock yet has not reported.

        The state before a rank's first boundary has no record, so it cannot be saved from there.
        """
        boundaries = [report.boundary for report in self.reports.values() if report.boundary is not None]
        first = min(boundaries, default=0)
        return {
            rank: cutting.Report(rank, _from(first, report) if report.boundary is None else report.held)
            for rank, report in self.reports.items()
            if report.held or report.settled
        }

    def unsettled(self) -> list[int]:
        """Ranks that may still come to another step."""
        return sorted(rank for rank, report in self.reports.items() if not report.settled)

    def choose(self, world: WorldMap, expected: AbstractSet[int]) -> Cut | NoCut:
        """The cut as things stand. `expected` may still report, or, if unsettled, report something else."""
        readable = self.readable()
        awaited, moving = expected - readable.keys(), expected & set(self.unsettled())
        if readable and all(self.reports[rank].boundary is None for rank in readable):
            reason = "the fault came before the first step boundary; there is nothing to save yet"
            return NoCut(reason, tuple(sorted(awaited | moving)))
        reports, unable = self._with_durable_parts(readable), self.excluded | self.moved
        decision = cutting.choose(world, reports, expected=awaited, excluded=unable)
        if isinstance(decision, Cut) or not awaited | moving:
            return decision
        # What such a rank is known to hold, or has written, is not all that it may come to say.
        known = {rank: report for rank, report in reports.items() if rank not in awaited | moving}
        hope = cutting.choose(world, known, expected=awaited | moving, excluded=unable)
        waiting_for = hope.waiting_for if isinstance(hope, NoCut) else tuple(sorted(awaited | moving))
        return NoCut(decision.reason, waiting_for)

    def decide(self, cut: Cut) -> None:
        """This cut is to be saved."""
        reports = self._with_durable_parts(self.readable())
        self.cut = cut
        self.values = {key: reports[rank].held[key].values for key, rank in cut.savers.items()}

    def _with_durable_parts(self, readable: dict[int, cutting.Report]) -> dict[int, cutting.Report]:
        """What is durable is held by its writer, though it may be dead by now."""
        held = {rank: dict(report.held) for rank, report in readable.items()}
        for order in self.orders:
            for key, values in zip(order.keys, order.values, strict=True):
                known = held.get(order.rank, {}).get(key)
                if order.done and (known is None or known.step is None):
                    held.setdefault(order.rank, {})[key] = Held(order.step, values)
        return {rank: cutting.Report(rank, of_rank) for rank, of_rank in held.items()}

    # -- saving ---------------------------------------------------------------------------------------

    def order(self, savers: Mapping[str, int], now: float) -> list[Order]:
        """Note one new order for each rank in `savers` (component key -> rank); return them."""
        if self.cut is None or not savers:
            return []
        self.attempt += 1
        new: list[Order] = []
        for rank in sorted(set(savers.values())):
            keys = tuple(sorted(key for key in savers if savers[key] == rank))
            values = tuple(self.values[key] for key in keys)
            new.append(Order(self.attempt, rank, self.cut.step, keys, values, moved_at=now))
        self.orders += new
        return new

    def order_records(self, rank: int, now: float) -> Order:
        """Note a new order to write what a host's flight recorders hold."""
        self.attempt += 1
        order = Order(self.attempt, rank, self.cut.step if self.cut is not None else 0, (), (), moved_at=now)
        self.orders.append(order)
        return order

    def recording(self) -> set[int]:
        """Ranks whose parts, done or to come, have what their hosts' recorders say of the cut's step."""
        if self.cut is None:
            return set()
        given = {order.rank for order in self.durable(self.cut).values()}
        return given | {o.rank for o in self.orders if o.step == self.cut.step and not (o.done and o.keys)}

    def find(self, rank: int, attempt: int) -> Order | None:
        """The order that a saver speaks of."""
        return next((o for o in self.orders if (o.rank, o.attempt) == (rank, attempt)), None)

    def open_orders(self, rank: int | None = None) -> list[Order]:
        """Orders not done yet, of one rank or of all."""
        return [o for o in self.orders if not o.done and rank in (None, o.rank)]

    def idle(self, now: float) -> list[Order]:
        """Orders that have shown no progress for too long."""
        return [o for o in self.open_orders() if now >= o.moved_at + self.options.idle_timeout_s]

    def next_idle(self) -> float | None:
        """When the first order will have been idle for too long, or all savers will be out of time."""
        moments = [order.moved_at + self.options.idle_timeout_s for order in self.open_orders()]
        ends = self.saving_ends
        return min(moments if ends is None else [*moments, ends], default=None)

    def commit(self) -> m.Commit:
        """What the committer is to do, once all is durable."""
        step = self.cut.step if self.cut is not None else 0
        return m.Commit(self.id, step, self.parts(), self.cause)

    def complete(self) -> bool:
        """True if every component of the cut is in a durable part."""
        return self.cut is not None and self.durable(self.cut).keys() == self.cut.savers.keys()

    def durable(self, cut: Cut) -> dict[str, Order]:
        """By component key, the durable part that gives it to a cut; the latest, if there are several."""
        return {
            key: order
            for order in self.orders
            for key, values in zip(order.keys, order.values, strict=True)
            if order.done and order.step == cut.step and values == self.values.get(key)
        }

    def parts(self) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
        """(attempt, rank, component keys): what durable parts give to the cut; every component once."""
        if self.cut is None:
            return ()
        given: dict[tuple[int, int], list[str]] = {
            (order.attempt, order.rank): []
            for order in self.orders
            if order.done and not order.keys and order.step == self.cut.step
        }
        for key, order in sorted(self.durable(self.cut).items()):
            given.setdefault((order.attempt, order.rank), []).append(key)
        return tuple((attempt, rank, tuple(keys)) for (attempt, rank), keys in sorted(given.items()))

    def substitutes(self, failed: list[Order], able: AbstractSet[int]) -> dict[str, int] | None:
        """Others for the components of failed orders, at the same step; None if one has nobody left.

        `able` are the ranks that can be told.
        """
        if self.cut is None:
            return None
        load = {rank: sum(len(o.keys) for o in self.open_orders(rank)) for rank in able}
        chosen: dict[str, int] = {}
        for key in sorted(key for order in failed for key in order.keys):
            others = {self.cut.savers[key], *self.cut.spares[key]}
            free = [
                rank
                for rank in sorted(others & able)
                if self._whole(rank, key, self.cut.step) and (rank, key) not in self.excluded | self.moved
            ]
            if not free:
                return None
            chosen[key] = min(free, key=lambda rank: (load[rank], rank))
            load[chosen[key]] += 1
        return chosen

    def _whole(self, rank: int, key: str, step: int) -> bool:
        held = self.reports[rank].held.get(key) if rank in self.reports else None
        return held is not None and held.step == step

    def drop(self, failed: list[Order]) -> None:
        """Forget orders that come to nothing."""
        self.orders = [order for order in self.orders if order not in failed]


def _from(step: int, report: StateReport) -> dict[str, Held]:
    """What a rank holds, but for what is older than a step."""
    return {
        key: held if held.step is None or held.step >= step else Held(None)
        for key, held in report.held.items()
    }


def false_alarm(incident: str = "") -> m.Release:
    """What ranks are told whose gates were closed for nothing."""
    return m.Release(incident=incident, outcome=m.Outcome.FALSE_ALARM, action=m.Action.RESUME)
