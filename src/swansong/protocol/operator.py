"""What an operator's client and the controller say to each other: `swansong status` and `swansong persist`.

Answers are plain, bounded values that `msgspec.to_builtins` makes JSON of.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from swansong.protocol.messages import FaultKind, Outcome

MAX_LISTED: Final = 256
"""Entries of a list in an answer, at most."""
MAX_TEXT: Final = 1000
"""Characters of a text in a request or an answer, at most."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


def short(text: str) -> str:
    """A text that fits a `Text`: its beginning, if it is too long."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# ---- operator -> controller


class StatusRequest(_Message, frozen=True, kw_only=True):
    """How does the job stand? Answered with Status."""


class PersistRequest(_Message, frozen=True, kw_only=True):
    """Save the job and end it. Answered with PersistBegun and, when it is over, PersistEnded; or Declined."""

    who: Text
    """Who asks, for the incident's report."""


# ---- values inside answers


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as the controller sees it."""

    rank: int
    state: Text
    """connected, absent, lost, left, or missing: never registered."""
    state_s: float
    """How long it has been in that state, seconds; "missing" counts from the controller's beginning."""
    host: Text = ""
    pid: int | None = None
    step: int | None = None
    """Last boundary that it reported; None: none. A rank reports in incidents only."""
    step_age_s: float | None = None
    """How long ago, seconds."""


class FaultStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of the present incident."""

    kind: FaultKind
    rank: int
    """-1: none."""
    what: Text = ""


class IncidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The incident that is under way."""

    incident: Text
    faults: Annotated[tuple[FaultStatus, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    seconds: float
    """Since the first fault."""
    step: int | None = None
    """The one that is being saved, once chosen."""
    savers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    """Ranks that save something, lowest first."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an incident ended."""

    incident: Text
    outcome: Outcome
    step: int | None = None
    path: Text = ""
    reason: Text = ""


# ---- controller -> operator


class Status(_Message, frozen=True, kw_only=True):
    """How the job stands."""

    phase: Text
    """The controller's; see `protocol.states`."""
    phase_s: float
    """How long that has lasted, seconds; while saving, since the last time that a saver was replaced."""
    world_size: int
    generation: int
    up_s: float
    """How long this controller has been there, seconds."""
    protected: bool
    """True if the state would be saved if something went wrong now."""
    reason: Text = ""
    """If it would not: why."""
    counts: Annotated[dict[Text, int], msgspec.Meta(max_length=16)] = {}
    """Ranks by state."""
    ranks: Annotated[tuple[RankStatus, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    """Lowest first, the first `MAX_LISTED`; those in trouble go before those connected."""
    incident: IncidentStatus | None = None
    last: Ending | None = None
    """The incident before, if there was one."""


class PersistBegun(_Message, frozen=True, kw_only=True):
    """The request is taken; the end of the incident is told, too."""

    incident: Text


class PersistEnded(_Message, frozen=True, kw_only=True):
    """The incident is over."""

    ending: Ending


class Declined(_Message, frozen=True, kw_only=True):
    """Not done, and why."""

    reason: Text


class Closed(_Message, frozen=True, kw_only=True):
    """The controller ends. Said, unasked, to whoever has asked how the job stands and is still there."""

    reason: Text
    last: Ending | None = None
    """The last incident, if there was one."""


OperatorRequest: TypeAlias = StatusRequest | PersistRequest
OperatorAnswer: TypeAlias = Status | PersistBegun | PersistEnded | Declined | Closed
