"""The controller's answers to operators."""

from __future__ import annotations

from collections.abc import Callable

from swansong.engine.status import ending
from swansong.protocol import messages as m
from swansong.protocol.controller import Controller
from swansong.protocol.operator import (
    Closed,
    Declined,
    Ending,
    OperatorAnswer,
    PersistBegun,
    PersistEnded,
    short,
)
from swansong.protocol.states import WORKING, Phase


class Desk:
    """Who waits for the end of which incident, who looks on, and how the last incident ended."""

    def __init__(self, answer: Callable[[int, OperatorAnswer], None]) -> None:
        """`answer(connection, message)` sends."""
        self._answer = answer
        self._waiting: dict[int, str] = {}
        """Connection -> incident."""
        self._watching: set[int] = set()
        """Connections of those who have asked how the job stands."""
        self.last: Ending | None = None

    def persist(self, connection: int, machine: Controller, begin: Callable[[], None]) -> None:
        """Take a request to save and stop. `begin` gives it to the machine."""
        if connection in self._waiting:
            self._answer(connection, Declined(reason=f"asked already: {self._waiting[connection]}"))
            return
        if machine.phase is not Phase.TRAINING and machine.phase not in WORKING:
            reason = f"nothing is protected now: the controller is {machine.phase.value}"
            self._answer(connection, Declined(reason=reason))
            return
        before = self.last
        begin()
        if machine.incident is not None:
            self._waiting[connection] = machine.incident.id
            self._answer(connection, PersistBegun(incident=machine.incident.id))
        elif self.last is not None and self.last is not before:  # it ended as soon as it had begun
            self._answer(connection, PersistBegun(incident=self.last.incident))
            self._answer(connection, PersistEnded(ending=self.last))
        else:
            self._answer(connection, Declined(reason=f"the controller is {machine.phase.value}"))

    def visited(self, connection: int) -> None:
        """An operator has asked how the job stands: it is to hear of the controller's end."""
        self._watching.add(connection)

    def waits(self, connection: int) -> bool:
        """True if an operator is still to hear of an end."""
        return connection in self._waiting

    def reported(self, report: m.Report) -> list[int]:
        """An incident is over: tell who waited; return their connections."""
        self.last = ending(report)
        told = [connection for connection, incident in self._waiting.items() if incident == report.incident]
        for connection in told:
            del self._waiting[connection]
            self._answer(connection, PersistEnded(ending=self.last))
        return told

    def closing(self, reason: str) -> None:
        """The controller ends: so does every wait, and there is nothing more to see."""
        for connection in self._waiting:
            self._answer(connection, Declined(reason=short(f"the controller ended: {reason}")))
        for connection in sorted(self._watching - self._waiting.keys()):
            self._answer(connection, Closed(reason=short(reason), last=self.last))
        self._waiting.clear()
        self._watching.clear()

    def left(self, connection: int) -> None:
        """An operator is gone."""
        self._waiting.pop(connection, None)
        self._watching.discard(connection)
