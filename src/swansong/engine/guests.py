"""Everybody connected to a controller, and the bounds that keep strangers from harming ranks."""

from __future__ import annotations

import itertools
import math
import selectors
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Final

from swansong.engine.transport import Link
from swansong.errors import ConfigError

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a controller puts up with. Raises ConfigError for a value that is no positive finite number."""

    host_timeout_s: float = 10.0
    """How long a host may be silently gone before its connections end (TCP keep-alive)."""
    handshake_timeout_s: float = 5.0
    """From connecting to having proved who one is, and from there to having registered."""
    operator_timeout_s: float = 60.0
    """How long an operator may be connected without asking anything, or waiting for an answer."""
    linger_s: float = 2.0
    """How long whoever was told to go may take to read that and close."""
    store_exit_s: float = 30.0
    """How long the store may take, at the controller's end, to finish what it was told."""
    max_strangers: int = 256
    """Connections that have not proved who they are, at once; or twice the world size, if that is more.
    The oldest has to make room."""
    max_operators: int = 32
    """Operators at once. The oldest has to make room."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{spec.name}: wanted a positive finite number, got {value!r}")


class Standing(Enum):
    """What a connection is to the controller."""

    STRANGER = auto()
    """It has not proved who it is."""
    PROVED = auto()
    """It has proved to be a rank, and is to register. No number of strangers makes it go."""
    RANK = auto()
    """A registered rank."""
    OPERATOR = auto()
    """An operator who may ask something."""
    WAITING = auto()
    """An operator who waits for the end of an incident."""
    LEAVING = auto()
    """It was told to go. What it sends is thrown away."""


@dataclass(slots=True, eq=False)
class Guest:
    """One connection."""

    number: int
    """By which the machine knows it; never used twice."""
    link: Link
    where: str
    """The other end's address, for people."""
    standing: Standing = Standing.STRANGER
    deadline: float | None = None
    """When it has to go; None: it may stay."""
    events: int = READ
    """What the selector waits for."""

    @property
    def here(self) -> bool:
        """False once it is leaving, or gone."""
        return self.standing is not Standing.LEAVING and self.link.fileno() >= 0

    def __str__(self) -> str:
        return f"{self.link.peer} at {self.where}" if self.link.peer is not None else self.where


class Guests:
    """All connections of one selector. Those of one standing are in the order of their deadlines."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        ready: Callable[[Guest, int], None],
        limits: Limits,
        ranks: int,
    ) -> None:
        """`ready(guest, events)` is what the selector's keys carry, as a function of the events."""
        self._selector, self._ready = selector, ready
        self._most = {
            Standing.STRANGER: max(limits.max_strangers, 2 * ranks),
            Standing.PROVED: 2 * ranks,
            Standing.OPERATOR: limits.max_operators,
            Standing.WAITING: limits.max_operators,
            Standing.LEAVING: max(limits.max_strangers, 2 * ranks),
        }
        self._stay_s = {
            Standing.STRANGER: limits.handshake_timeout_s,
            Standing.PROVED: limits.handshake_timeout_s,
            Standing.OPERATOR: limits.operator_timeout_s,
            Standing.LEAVING: limits.linger_s,
        }
        self._numbers = itertools.count(1)
        self._by_standing: dict[Standing, dict[int, Guest]] = {standing: {} for standing in Standing}
        self._all: dict[int, Guest] = {}

    def __len__(self) -> int:
        return len(self._all)

    def get(self, number: int) -> Guest | None:
        """The guest of a number, unless it is gone or leaving."""
        guest = self._all.get(number)
        return guest if guest is not None and guest.standing is not Standing.LEAVING else None

    def everybody(self) -> list[Guest]:
        """Those who are leaving, too."""
        return list(self._all.values())

    def present(self) -> list[Guest]:
        """Everybody who is not leaving."""
        return [guest for guest in self._all.values() if guest.standing is not Standing.LEAVING]

    def admit(self, link: Link, where: str, now: float) -> Guest:
        """Take in a new connection."""
        guest = Guest(next(self._numbers), link, where)
        self._all[guest.number] = guest
        self._selector.register(link, READ, lambda events: self._ready(guest, events))
        self.move(guest, Standing.STRANGER, now)
        return guest

    def move(self, guest: Guest, standing: Standing, now: float) -> None:
        """Give a guest a standing; time to stay begins anew."""
        self._by_standing[guest.standing].pop(guest.number, None)
        stay_s = self._stay_s.get(standing)
        guest.standing, guest.deadline = standing, None if stay_s is None else now + stay_s
        self._by_standing[standing][guest.number] = guest

    def surplus(self, standing: Standing) -> Guest | None:
        """Who has to make room, if there are too many of a standing."""
        found = self._by_standing[standing]
        most = self._most.get(standing)
        return self.oldest(standing) if most is not None and len(found) > most else None

    def oldest(self, standing: Standing) -> Guest | None:
        """Who has been of a standing for the longest time."""
        return next(iter(self._by_standing[standing].values()), None)

    def overdue(self, now: float) -> list[Guest]:
        """Whose time is up."""
        found: list[Guest] = []
        for standing in self._stay_s:
            for guest in self._by_standing[standing].values():
                if guest.deadline is None or guest.deadline > now:
                    break
                found.append(guest)
        return found

    def next_deadline(self) -> float | None:
        """When somebody's time will be up."""
        first = (self.oldest(standing) for standing in self._stay_s)
        return min((g.deadline for g in first if g is not None and g.deadline is not None), default=None)

    def listen_for_room(self, guest: Guest) -> None:
        """Have the selector watch for what the link needs now."""
        events = READ | (WRITE if guest.link.blocked else 0)
        if events != guest.events:
            guest.events = events
            key = self._selector.get_key(guest.link)
            self._selector.modify(guest.link, events, key.data)

    def remove(self, guest: Guest) -> None:
        """Close a connection for good."""
        if self._all.pop(guest.number, None) is not None:
            self._by_standing[guest.standing].pop(guest.number, None)
            self._selector.unregister(guest.link)
            guest.link.close()
