"""Try to persist: theory of operation, and the tables that are it.

**What it is for.** When a rank of a training job dies, throws, hangs or is told to stop, the others still
hold the state. They agree on one step, write it, and commit it, whatever else breaks meanwhile.

**Who takes part.** Each rank has a *processor*, a thread beside the training loop. One *controller*, a
process of its own, decides. Both are pure machines here: events and the time go in, effects come out.

**A quiet job** sends nothing. Ranks register (`GATHERING`); when the last one has, everybody gets the
world map, who holds which components, and the controller falls silent (`TRAINING`).

**An incident** begins with the first fault.

- `FREEZING`: every rank is told to close its gate, so that no update begins, and to report: at which step
  each of its components is whole. Who is inside an update gets time to leave it. A rank whose connection
  ended may come back within `reconnect_s`; if that was all, it was a false alarm and the gates open. When
  everybody has reported, or time is up, the cut is chosen (`policy.cut`): the newest step at which every
  component is whole on some rank that can still write. If that takes a rank which has not reported, it is
  waited for; who is not needed is not. A dead rank's word counts for nothing: if it alone was ahead, the
  others save the step before.
- `SAVING`: each chosen rank writes its components as one part, shows progress, and says when the part is
  durable. **If a saver dies**, fails (a full disk), or shows no progress for `idle_timeout_s`, another
  holder at the same step gets its components, as a new attempt; parts that are done stay good, though
  their writer may be dead by now. If no such holder is left, everybody reports afresh and the cut is
  chosen anew, at any step, at most `attempts` times.
- `COMMITTING`: the parts are made a checkpoint by one rename.
- `RELEASING`: everybody hears the outcome. After a stall that was saved, gates open and training goes on
  (`TRAINING`). Otherwise the ranks end, and so does the controller (`CLOSED`).

**The end.** A rank that has finished says goodbye and waits, at most `goodbye_timeout_s`, until all have: its
state may be the last that is whole if another is torn in its last update. Then all leave, and the controller
closes. If one has to leave earlier, the others are told, so that no later controller misses it.

**A controller that dies** is started again by a processor on its host. Each rank brings the world map
along when it registers again; without it a successor could not know what is missing, and must not choose.
Who does not come back within `reregister_timeout_s` is lost. If an incident was under way, the gates are
still closed, and it begins afresh; what was committed already is found by the committer and counts as
done.

**A controller that hangs** holds its port, so none can take its place. Whoever waits for its word, because
the gate is closed, a fault stands, or training is over, leaves it after `gate_lease_s`: the gate opens, saves
are void, and after `lost_controller_s` without another controller the rank is on its own.

**Every wait has a deadline**: see `ProtocolOptions`; the deadline of each phase is the controller's
`deadline`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """Where the controller stands."""

    GATHERING = "gathering"
    TRAINING = "training"
    FREEZING = "freezing"
    SAVING = "saving"
    COMMITTING = "committing"
    RELEASING = "releasing"
    CLOSED = "closed"


class On(StrEnum):
    """What moves the controller."""

    WORLD_COMPLETE = "the world is complete"
    FAULT = "a fault"
    FALSE_ALARM = "the lost rank came back"
    CUT = "a cut"
    NO_CUT = "no cut, or no time"
    REPLACED = "a saver was replaced"
    AGAIN = "no holder left at that step"
    PARTS_COMPLETE = "every part is durable"
    COMMITTED = "committed"
    RESUMED = "training goes on"
    ENDED = "nobody is left"


NEXT: Final = {
    (Phase.GATHERING, On.WORLD_COMPLETE): Phase.TRAINING,
    (Phase.GATHERING, On.NO_CUT): Phase.RELEASING,
    (Phase.GATHERING, On.ENDED): Phase.CLOSED,
    (Phase.TRAINING, On.FAULT): Phase.FREEZING,
    (Phase.TRAINING, On.ENDED): Phase.CLOSED,
    (Phase.FREEZING, On.FALSE_ALARM): Phase.TRAINING,
    (Phase.FREEZING, On.CUT): Phase.SAVING,
    (Phase.FREEZING, On.NO_CUT): Phase.RELEASING,
    (Phase.SAVING, On.REPLACED): Phase.SAVING,
    (Phase.SAVING, On.AGAIN): Phase.FREEZING,
    (Phase.SAVING, On.PARTS_COMPLETE): Phase.COMMITTING,
    (Phase.SAVING, On.NO_CUT): Phase.RELEASING,
    (Phase.COMMITTING, On.COMMITTED): Phase.RELEASING,
    (Phase.COMMITTING, On.AGAIN): Phase.FREEZING,
    (Phase.COMMITTING, On.NO_CUT): Phase.RELEASING,
    (Phase.RELEASING, On.RESUMED): Phase.TRAINING,
    (Phase.RELEASING, On.ENDED): Phase.CLOSED,
}
"""The controller's transitions. A local event without a row is a bug and raises."""

WORKING: Final = (Phase.FREEZING, Phase.SAVING, Phase.COMMITTING)
"""Phases in which an incident is being decided, and gates are closed."""


class Mode(StrEnum):
    """Where a processor stands."""

    CONNECTING = "connecting"
    """No controller yet, or none at the moment. The gate is as it was."""
    JOINED = "joined"
    """Registered; the world is not complete."""
    TRAINING = "training"
    """Protected, and silent."""
    FROZEN = "frozen"
    """The gate is closed by a controller's order."""
    UNPROTECTED = "unprotected"
    """There is no controller and will be none; training goes on."""
    ENDED = "ended"
    """Released or told farewell."""


class Got(StrEnum):
    """What moves a processor."""

    WELCOME = "welcome"
    WORLD = "the world map"
    FREEZE = "freeze"
    RESUME = "released, training goes on"
    STOP = "released, the job ends"
    FAREWELL = "farewell"
    DISCONNECTED = "the connection ended"
    LEASE_OVER = "no word from any controller for the length of the lease"
    GIVEN_UP = "no controller to be had"


STEP: Final = {
    (Mode.CONNECTING, Got.WELCOME): Mode.JOINED,
    (Mode.CONNECTING, Got.LEASE_OVER): Mode.CONNECTING,
    (Mode.CONNECTING, Got.GIVEN_UP): Mode.UNPROTECTED,
    (Mode.JOINED, Got.WORLD): Mode.TRAINING,
    (Mode.JOINED, Got.STOP): Mode.ENDED,
    (Mode.JOINED, Got.FAREWELL): Mode.ENDED,
    (Mode.JOINED, Got.LEASE_OVER): Mode.CONNECTING,
    (Mode.JOINED, Got.DISCONNECTED): Mode.CONNECTING,
    (Mode.JOINED, Got.GIVEN_UP): Mode.UNPROTECTED,
    (Mode.TRAINING, Got.FREEZE): Mode.FROZEN,
    (Mode.TRAINING, Got.RESUME): Mode.TRAINING,
    (Mode.TRAINING, Got.STOP): Mode.ENDED,
    (Mode.TRAINING, Got.FAREWELL): Mode.ENDED,
    (Mode.TRAINING, Got.LEASE_OVER): Mode.CONNECTING,
    (Mode.TRAINING, Got.DISCONNECTED): Mode.CONNECTING,
    (Mode.TRAINING, Got.GIVEN_UP): Mode.UNPROTECTED,
    (Mode.FROZEN, Got.FREEZE): Mode.FROZEN,
    (Mode.FROZEN, Got.RESUME): Mode.TRAINING,
    (Mode.FROZEN, Got.STOP): Mode.ENDED,
    (Mode.FROZEN, Got.DISCONNECTED): Mode.CONNECTING,
    (Mode.FROZEN, Got.LEASE_OVER): Mode.CONNECTING,
    (Mode.FROZEN, Got.GIVEN_UP): Mode.UNPROTECTED,
}
"""A processor's transitions. What has no row is the controller's error: the connection ends."""
