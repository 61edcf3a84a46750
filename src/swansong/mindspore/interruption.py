"""What an exception has interrupted: the state at a boundary, a finished update, or one under way."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from swansong.errors import SaveError
from swansong.mindspore.position import Counters, Place

_NOTHING: Final = object()


class Interrupted(Enum):
    """What the Parameters are, when an exception ends training."""

    BOUNDARY = "the state at the boundary reached last"
    UPDATED = "the state after the step that was under way: its update is done, its boundary was not reached"
    TORN = "perhaps half updated"
    UNKNOWN = "not known: the optimizer keeps no count of its updates"


class UpdateWatch:
    """Compares MindSpore's own traces of an update with those at the last boundary.

    `Model` sets `net_outputs` to what the train network returned, so a new object there means that the update
    is done. MindSpore's optimizers raise `global_step` before they write anything else, so an old value
    means that the update has not begun.
    """

    def __init__(self) -> None:
        self._step: object = _NOTHING
        self._outputs: object = _NOTHING
        self._updates: int | None = None

    def boundary(self, params: Any) -> None:
        """Note the traces at a boundary, or before the first step."""
        self._step = params.cur_step_num
        self._outputs = params.get("net_outputs", _NOTHING)
        self._updates = _updates(params)

    def judge(self, params: Any) -> Interrupted:
        """Say what the Parameters are now. Waits for kernels under way, whose RuntimeError passes."""
        if params.cur_step_num == self._step:
            return Interrupted.BOUNDARY
        updates = _updates(params)
        if params.get("net_outputs", _NOTHING) is not self._outputs:
            return Interrupted.UPDATED
        if updates is None or self._updates is None:
            return Interrupted.UNKNOWN
        return Interrupted.BOUNDARY if updates == self._updates else Interrupted.TORN


def _updates(params: Any) -> int | None:
    counter = getattr(params.get("optimizer"), "global_step", None)
    return None if counter is None else int(counter.asnumpy()[0])


def interrupted_place(
    watch: UpdateWatch, counters: Counters, params: Any, start_step: int
) -> tuple[Place, tuple[Mapping[str, Any], ...]]:
    """The step whose state the Parameters hold when an exception ends training, and what is not sure of it.

    `start_step` is where this run began. Raises SaveError if they may be half updated.
    """
    found = watch.judge(params)
    if found is Interrupted.TORN:
        raise SaveError(f"step {params.cur_step_num}: no breakpoint checkpoint: its update may be half done")
    if found is Interrupted.UPDATED:
        return counters.place(params), ()
    place = counters.last
    if place is None or place.step < start_step:
        place = Place(step=start_step, epoch=int(params.cur_epoch_num), step_in_epoch=0)
    if found is Interrupted.BOUNDARY:
        return place, ()
    return place, (
        {"what": "parameters", "reason": f"an exception came at step {place.step + 1}; {found.value}"},
    )
