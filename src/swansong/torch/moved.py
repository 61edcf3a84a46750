"""What a loop moves besides its live tensors: captured at boundaries, restored when a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from swansong.errors import LoadError
from swansong.persist.boundary import BoundaryState, BoundaryTensor, unpacked
from swansong.state import tree
from swansong.state.leaves import Json
from swansong.state.tensors import HostTensor
from swansong.torch.generators import Generators
from swansong.torch.position import Feed
from swansong.torch.state import TrainingState

_START: Final = "start"
"""Of a position: the same object at every boundary of an epoch, and most of its bytes."""
_LOADER: Final = "loader"
"""Of a position: whatever a loader with `state_dict` says."""


@dataclass(slots=True)
class Progress:
    """Counters that go into checkpoints."""

    skipped: int = 0
    """Steps whose update a gradient scaler left out."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says of one rank, to be taken up."""

    structure: Json
    shared: Json
    tensors: Mapping[str, HostTensor]
    own: Mapping[str, Any]
    """Empty if the checkpoint has nothing of this rank."""
    inexact: tuple[str, ...] = ()
    """What the checkpoint itself says is not exactly as it was."""


class Moved:
    """Captures it. For the thread that trains."""

    def __init__(self, state: TrainingState, feed: Feed | None, generators: Generators, whole: bool) -> None:
        """`whole`: all ranks hold equal state, but for their generators."""
        self._state, self._feed, self._generators, self._whole = state, feed, generators, whole
        self.progress = Progress()
        self._start: tuple[object, Json] = (None, None)
        self._loaded: Any = None
        """The generators that were loaded, while they are not restored yet."""

    def capture(self) -> BoundaryState:
        """As things stand at a boundary."""
        self._state.look()
        return self._captured()

    def _captured(self) -> BoundaryState:
        shared, tensors = self._state.shared()
        own = self._own()
        if self._whole:
            return BoundaryState(own, shared, self._state.moving(), tensors)
        every = (*self._state.moving(), *tensors)
        packed = [msgspec.to_builtins(tensor, builtin_types=(bytes,)) for tensor in every]
        alone = _skeleton({"tensors": packed})
        return BoundaryState(_joined(own, alone, {"dict": [["shared", shared]]}), None, ())

    def provisional(self) -> BoundaryState:
        """What this rank's next boundary will say, at the end of a forward pass."""
        if not self._whole:
            return self._captured()
        return BoundaryState(self._own(), None, self._state.moving())

    def restore(self, saved: Restored, *, allow_reshuffle: bool = False) -> list[str]:
        """Take up what was saved; return what cannot be exact, each with its reason."""
        lacking = self._state.load(saved.tensors, saved.structure, saved.shared)
        if not saved.own:
            return [*lacking, "this rank's generators and position: the checkpoint has none of it"]
        self.progress.skipped = saved.own["skipped"]
        generators = saved.own["generators"]
        position = saved.own["position"]
        if self._feed is None or position is None:
            return lacking + self._generators.restore(generators)
        reasons = lacking + self._generators.check(generators)
        self._loaded = generators
        return reasons + self._feed.load(
            position,
            restore=lambda: self._generators.restore(generators),
            allow_reshuffle=allow_reshuffle,
        )

    def _own(self) -> Json:
        """What only this rank has, as a skeleton in which bytes stand for themselves: see `BoundaryState`."""
        position = self._feed.state() if self._feed is not None else None
        awaiting = self._feed is not None and self._feed.awaiting
        said = {
            "generators": self._loaded if awaiting else self._generators.capture(),
            "skipped": self.progress.skipped,
        }
        return _joined(_skeleton(said), {"dict": [["position", self._of(position)]]})

    def _of(self, position: Mapping[str, Any] | None) -> Json:
        if position is None:
            return None
        if position[_START] is not self._start[0]:
            self._start = position[_START], _skeleton(position[_START])
        rest = {key: value for key, value in position.items() if key not in (_START, _LOADER)}
        pairs = [[_START, self._start[1]], [_LOADER, _flat(position[_LOADER])]]
        return _joined(_skeleton(rest), {"dict": pairs})


def own_of(extra: Json, rank: int) -> tuple[dict[str, Any], Json, dict[str, HostTensor]]:
    """What a rank's own objects say: (plain values, shared skeleton or None, tensors). Raises LoadError."""
    if extra is None:
        return {}, None, {}
    shared: Json = None
    if isinstance(extra, dict) and isinstance(pairs := extra.get("dict"), list):
        shared = next((pair[1] for pair in pairs if isinstance(pair, list) and pair[0] == "shared"), None)
        extra = {"dict": [pair for pair in pairs if not isinstance(pair, list) or pair[0] != "shared"]}
    own = tree.unflatten(extra, {})
    if not isinstance(own, dict) or not {"generators", "skipped", "position"} <= own.keys():
        raise LoadError(f"rank {rank}: its objects in the checkpoint are not those of a PyTorch run")
    packed = msgspec.convert(own.pop("tensors", []), type=list[BoundaryTensor])
    return own, shared, {one.name: unpacked(one) for one in packed}


def _joined(*skeletons: Any) -> Json:
    """Dictionaries' skeletons as one."""
    return {"dict": [pair for skeleton in skeletons for pair in skeleton["dict"]]}


def _flat(value: Any) -> Json:
    """The skeleton of anything without tensors. Raises UnrepresentableError."""
    return None if value is None else tree.flatten(value, lambda _: None).skeleton


def _skeleton(value: Any) -> Any:
    """That of values of our own: dictionaries and lists of None, small numbers, ASCII strings, and bytes.

    `tree.flatten` would spend some 30 microseconds on the generators alone.
    """
    kind = type(value)
    if kind is dict:
        return {"dict": [[key, _skeleton(item)] for key, item in value.items()]}
    if kind is list:
        return [_skeleton(item) for item in value]
    return value
