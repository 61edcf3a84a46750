"""Everything that crosses the wire, goes into a machine, or comes out of one.

Three families of frozen values:

- **messages** travel between a processor (one per rank) and the controller;
- **events** go into a machine: a message has come, a connection is gone, time has passed, the store is done;
- **effects** come out: send this, save that, close the gate. Whoever drives a machine carries them out in
  order, and says how it went with another event.

Orders carry (generation, incident, attempt), so that what belongs to the past can be told from what counts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

from swansong.policy.cut import Held


class FaultKind(StrEnum):
    """Why an incident began."""

    LOST = "lost"
    """A process or its host is gone."""
    RAISED = "raised"
    """The training loop ended with an exception."""
    STALLED = "stalled"
    """No progress for the stall time."""
    SIGNALLED = "signalled"
    """SIGTERM: somebody wants the job to end."""
    REQUESTED = "requested"
    """An operator, or the script itself, wants the job saved and stopped."""


class Outcome(StrEnum):
    """How an incident ended."""

    SAVED = "saved"
    """A checkpoint was committed."""
    NOTHING = "nothing saved"
    """No cut, or storage failed; the reason says which."""
    FALSE_ALARM = "false alarm"
    """The rank that seemed lost came back."""


class Action(StrEnum):
    """What the ranks do after a release."""

    RESUME = "resume"
    """Open the gate and go on."""
    STOP = "stop"
    """End; who threw gets its own exception, who waits TrainingInterrupted."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# ---- values inside messages


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, as the rank that noticed it says."""

    kind: FaultKind
    rank: int
    """The rank at fault; -1: none (an operator's request)."""
    what: str = ""
    """Exception type and message, signal, or other words."""
    traceback: str = ""
    step: int | None = None
    """Last boundary of that rank, if known."""


class ComponentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A component that a rank holds."""

    key: str
    label: str
    nbytes: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the world map, as it registered."""

    rank: int
    host: str
    pid: int
    start_time: int
    """Of the process, in the host's own clock ticks: tells it from another process with its pid."""
    components: tuple[ComponentEntry, ...]

    def same_process(self, other: Member) -> bool:
        """True if both are one process's registrations."""
        return (self.host, self.pid, self.start_time) == (other.host, other.pid, other.start_time)


# ---- processor -> controller


class Register(_Message, frozen=True, kw_only=True):
    """First message on every connection of a rank."""

    member: Member
    world_size: int
    world: tuple[Member, ...] = ()
    """The world map, from a rank that had it: what a controller that was started anew works with."""
    left: tuple[int, ...] = ()
    """Ranks that it knows to have finished and left: a controller that was started anew does not miss
    them."""
    fault: Fault | None = None
    """A fault of this rank that still stands (it threw, it was told to stop)."""
    frozen: bool = False
    """True if the gate is closed by a controller's order."""


class FaultReport(_Message, frozen=True, kw_only=True):
    """Something went wrong on this rank, or was asked for."""

    fault: Fault


class StateReport(_Message, frozen=True, kw_only=True):
    """Where a frozen rank stands. Sent again whenever it changes, until it is settled."""

    incident: str
    held: dict[str, Held]
    """By component key; empty while the clock cannot be read."""
    settled: bool
    """True if nothing of it will change before the gate opens."""
    boundary: int | None
    """Last step boundary whose record exists."""
    main: str
    """What the main thread does, in words."""
    stack: str = ""


class Progress(_Message, frozen=True, kw_only=True):
    """A saver is getting on."""

    incident: str
    attempt: int
    nbytes: int
    """Written so far, in total."""


class PartDone(_Message, frozen=True, kw_only=True):
    """A part is durable."""

    incident: str
    attempt: int


class PartFailed(_Message, frozen=True, kw_only=True):
    """A saver cannot deliver. Nothing of its part counts."""

    incident: str
    attempt: int
    reason: str
    """With what was needed and free, for want of space."""
    moved: bool = False
    """True if the state moved while it was copied: it is not at that step any more, but can be written."""


class Goodbye(_Message, frozen=True, kw_only=True):
    """This rank has come to the end of its training and would like to go."""


# ---- controller -> processor


class Welcome(_Message, frozen=True, kw_only=True):
    """Registration accepted."""

    generation: int


class World(_Message, frozen=True, kw_only=True):
    """The world is complete: training is protected from now on."""

    members: tuple[Member, ...]


class Freeze(_Message, frozen=True, kw_only=True):
    """Close the gate and report. Sent again: report afresh."""

    incident: str


class Hold(_Message, frozen=True, kw_only=True):
    """The incident goes on: keep the gate closed for another lease."""

    incident: str


class Save(_Message, frozen=True, kw_only=True):
    """Write these components at this step, as one part, with what this host's flight recorders hold.

    Without components: only the latter.
    """

    incident: str
    attempt: int
    step: int
    keys: tuple[str, ...]


class Void(_Message, frozen=True, kw_only=True):
    """Stop writing; nothing of attempts up to this one counts any more, unless it was reported done."""

    incident: str
    attempt: int


class Release(_Message, frozen=True, kw_only=True):
    """The incident is over."""

    incident: str
    outcome: Outcome
    action: Action
    step: int | None = None
    path: str = ""
    reason: str = ""
    cause: FaultKind = FaultKind.LOST
    """What began it: decides exit codes."""


class Farewell(_Message, frozen=True, kw_only=True):
    """The answer to a goodbye: nobody needs this rank any more."""


class Left(_Message, frozen=True, kw_only=True):
    """These ranks were told farewell, too: whoever controls next is to know that they are not lost."""

    ranks: tuple[int, ...]


class Refused(_Message, frozen=True, kw_only=True):
    """Not accepted; the connection ends."""

    reason: str
    retry: bool
    """True if it may be otherwise in a moment."""


ToController: TypeAlias = Register | FaultReport | StateReport | Progress | PartDone | PartFailed | Goodbye
ToProcessor: TypeAlias = Welcome | World | Freeze | Hold | Save | Void | Release | Farewell | Left | Refused
Message: TypeAlias = ToController | ToProcessor


# ---- events: what goes into the controller machine


class Received(msgspec.Struct, frozen=True):
    """A rank's message has come, on a connection whose handshake is done."""

    connection: int
    message: ToController


class Disconnected(msgspec.Struct, frozen=True):
    """A connection ended."""

    connection: int


class Died(msgspec.Struct, frozen=True):
    """A process on this host was seen to end."""

    rank: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: at the latest, the deadline."""


class Persist(msgspec.Struct, frozen=True):
    """An operator asks for a save and the end of the job."""

    who: str


class Superseded(msgspec.Struct, frozen=True):
    """A new incarnation of the job wants the port."""


class Committed(msgspec.Struct, frozen=True):
    """The store has made the parts a checkpoint."""

    incident: str
    path: str


class CommitFailed(msgspec.Struct, frozen=True):
    """The store could not prepare or commit."""

    incident: str
    reason: str


ControllerEvent: TypeAlias = (
    Received | Disconnected | Died | Tick | Persist | Superseded | Committed | CommitFailed
)

# ---- effects: what comes out of the controller machine


class Send(msgspec.Struct, frozen=True):
    """Send a message on a connection."""

    connection: int
    message: ToProcessor


class Drop(msgspec.Struct, frozen=True):
    """End a connection, after what was sent."""

    connection: int


class Prepare(msgspec.Struct, frozen=True):
    """Make the place where the parts of an incident go, if it is not there; CommitFailed if that fails."""

    incident: str
    step: int


class Commit(msgspec.Struct, frozen=True):
    """Make a checkpoint of these parts; answer with Committed or CommitFailed."""

    incident: str
    step: int
    parts: tuple[tuple[int, int, tuple[str, ...]], ...]
    """(attempt, rank, component keys): what each part contributes, besides what flight recorders held."""
    cause: FaultKind


class Discard(msgspec.Struct, frozen=True):
    """Nothing will be committed: the place may be removed."""

    incident: str


class Report(msgspec.Struct, frozen=True):
    """The incident is over: write its report."""

    incident: str
    faults: tuple[Fault, ...]
    outcome: Outcome
    step: int | None
    path: str
    reason: str
    reports: dict[int, StateReport]
    savers: dict[str, int]
    notes: tuple[str, ...]
    seconds: dict[str, float]
    """How long its parts took: see `Incident.seconds`."""


class Close(msgspec.Struct, frozen=True):
    """Nobody is left: end the controller and free the port."""

    reason: str


ControllerEffect: TypeAlias = Send | Drop | Prepare | Commit | Discard | Report | Close


# ---- events: what goes into the processor machine


class Connected(msgspec.Struct, frozen=True):
    """The connection to a controller stands, handshake done."""


class ConnectionEnded(msgspec.Struct, frozen=True):
    """The connection ended, or could not be made."""


class FromController(msgspec.Struct, frozen=True):
    """A message from the controller."""

    message: ToProcessor


class LocalFault(msgspec.Struct, frozen=True):
    """Something went wrong on this rank, or was asked for here."""

    fault: Fault


class StateRead(msgspec.Struct, frozen=True):
    """The clock was read: first after Watch, then whenever it changed."""

    held: dict[str, Held]
    settled: bool
    boundary: int | None
    main: str
    stack: str = ""


class Wrote(msgspec.Struct, frozen=True):
    """A save under way has written so many bytes in total."""

    incident: str
    attempt: int
    nbytes: int


class Saved(msgspec.Struct, frozen=True):
    """A part is durable."""

    incident: str
    attempt: int


class SaveFailed(msgspec.Struct, frozen=True):
    """A part could not be written; `moved` as in PartFailed."""

    incident: str
    attempt: int
    reason: str
    moved: bool = False


class Finished(msgspec.Struct, frozen=True):
    """The main thread has come to the end of training."""


ProcessorEvent: TypeAlias = (
    Connected
    | ConnectionEnded
    | FromController
    | LocalFault
    | StateRead
    | Wrote
    | Saved
    | SaveFailed
    | Finished
    | Tick
)

# ---- effects: what comes out of the processor machine


class Connect(msgspec.Struct, frozen=True):
    """Connect to the controller; on its host, start one first if nobody listens."""


class Tell(msgspec.Struct, frozen=True):
    """Send a message to the controller."""

    message: ToController


class Disconnect(msgspec.Struct, frozen=True):
    """End the connection, after what was told."""


class CloseGate(msgspec.Struct, frozen=True):
    """No update may begin any more."""


class OpenGate(msgspec.Struct, frozen=True):
    """Updates may begin again."""


class Watch(msgspec.Struct, frozen=True):
    """Read the clock now and whenever it changes, until the gate opens."""


class StartSave(msgspec.Struct, frozen=True):
    """Write these components at this step as one part, as `Save` says."""

    incident: str
    attempt: int
    step: int
    keys: tuple[str, ...]


class StopSave(msgspec.Struct, frozen=True):
    """Stop writing the part of an attempt; it counts for nothing."""

    incident: str
    attempt: int


class Wake(msgspec.Struct, frozen=True):
    """Tell the main thread, which waits or soon will, how it ended."""

    release: Release


class Depart(msgspec.Struct, frozen=True):
    """The main thread may go: nobody needs this rank any more."""


class Unprotected(msgspec.Struct, frozen=True):
    """There is no controller, and there will be none: say so, loudly."""

    reason: str


ProcessorEffect: TypeAlias = (
    Connect
    | Tell
    | Disconnect
    | CloseGate
    | OpenGate
    | Watch
    | StartSave
    | StopSave
    | Wake
    | Depart
    | Unprotected
)
