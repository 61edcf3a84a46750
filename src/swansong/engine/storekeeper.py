"""The store's work for a controller, in a thread of its own: one order at a time, in order.

`engine` does not import the store: whoever composes a controller hands it `StoreCalls`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from swansong.protocol import messages as m


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCalls:
    """What a controller asks of the store. All are called in one thread, which is not the controller's."""

    prepare: Callable[[str, int], object]
    """(incident, step): make the place where its parts go, if it is not there; raises if that fails."""
    commit: Callable[[m.Commit], str]
    """Make a checkpoint of the parts and return its path; raises if that fails."""
    discard: Callable[[str], object]
    """(incident): nothing will be committed, its place may go."""
    report: Callable[[m.Report], object]
    """Write the report of an incident that is over."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The place of an incident is there."""

    incident: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something failed that changes nothing for the ranks: a report that could not be written."""

    what: str


Order: TypeAlias = m.Prepare | m.Commit | m.Discard | m.Report
Result: TypeAlias = Prepared | m.Committed | m.CommitFailed | Trouble


class Storekeeper:
    """The thread. `close` ends it."""

    def __init__(self, calls: StoreCalls, wake: Callable[[], object]) -> None:
        """`wake` is called, in the thread, whenever `results` has something new."""
        self._calls, self._wake = calls, wake
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        # A daemon: a store that hangs, as network file systems do, must not keep the process.
        self._thread = threading.Thread(target=self._run, name="swansong-store", daemon=True)
        self._thread.start()

    def do(self, order: Order) -> None:
        """Have it done after everything before it."""
        self._orders.put(order)

    def results(self) -> list[Result]:
        """What was done since the last call."""
        found: list[Result] = []
        while not self._results.empty():
            found.append(self._results.get())
        return found

    def close(self, timeout_s: float) -> bool:
        """Wait until everything is done; False if it was not in time."""
        self._orders.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            result = self._carry_out(order)
            if result is not None:
                self._results.put(result)
                self._wake()

    def _carry_out(self, order: Order) -> Result | None:
        try:
            match order:
                case m.Prepare(incident, step):
                    self._calls.prepare(incident, step)
                    return Prepared(incident)
                case m.Commit(incident=incident):
                    return m.Committed(incident, self._calls.commit(order))
                case m.Discard(incident):
                    self._calls.discard(incident)
                case m.Report():
                    self._calls.report(order)
        # The thread's boundary: the machine decides what a store's failure means, whatever it is.
        except Exception as error:  # noqa: BLE001
            what = f"{type(error).__name__}: {error}"
            if isinstance(order, m.Prepare | m.Commit):
                return m.CommitFailed(order.incident, what)
            return Trouble(f"incident {order.incident}: {type(order).__name__.lower()} failed: {what}")
        return None
