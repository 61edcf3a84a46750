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
from swansong.torch.loader_state import pack_loader, unpack_loader
from swansong.torch.position import Feed
from swansong.torch.state import TrainingState

_START: Final = "start"
"""Of a position: the same object at every boundary of an epoch, and most of its bytes."""
_LOADER: Final = "loader"
"""Of a position: whatever a loader with `state_dict` says."""
_packed: Final = msgspec.msgpack.Encoder().encode


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
        self._marks: dict[str, object] = {}
        """Of each generator, when it was packed."""
        self._states: dict[str, msgspec.Raw] = {}
        """Name and state of each, packed."""
        self._start: tuple[object, msgspec.Raw] = None, msgspec.Raw(_packed(None))
        """Of a position, and that packed: at every boundary of an epoch the same object."""
        self._at: Mapping[str, Any] | None = None
        """The position that was told last."""
        self._skipped = 0
        """How many steps were said last to have been left out."""
        self._settled: Json = None
        """What is shared, as it was told provisionally; None if the boundary is to say it."""
        self._loaded: Any = None
        """The generators that were loaded, while they are not restored yet."""

    def provisional(self, last: int | None) -> bytes:
        """What this rank's next boundary will say, at the end of a forward pass, packed.

        `last` is the step of the last boundary that was recorded, if there was one.
        """
        if not self._whole:
            return self._everything()
        own, state = {"dict": self._own()}, self._state
        self._settled = state.settled
        if self._settled is None:
            return _packed(BoundaryState(own, None, state.moving()))
        return _packed(BoundaryState(own, self._settled, (), (), last))

    def boundary(self) -> bytes | None:
        """As things stand at a boundary, packed; None if that is what `provisional` has said."""
        self._state.look()
        holds, self._settled = self._holds(), None
        return None if holds else self._everything()

    def capture(self) -> bytes:
        """As things stand now, packed."""
        self._state.look()
        return self._everything()

    def _everything(self) -> bytes:
        shared, tensors = self._state.shared()
        moving = self._state.moving()
        if self._whole:
            return _packed(BoundaryState({"dict": self._own()}, shared, moving, tensors))
        alone = ("tensors", (*moving, *tensors)), ("shared", shared)
        return _packed(BoundaryState({"dict": (*self._own(), *alone)}))

    def _holds(self) -> bool:
        if self._settled is None or self._state.settled is not self._settled or not self._state.unchanged():
            return False
        at = None if self._feed is None else self._feed.state()
        if at is not None and at[_LOADER] is not None:  # may be anything, such as tensors: not to be compared
            return False
        if at != self._at or self.progress.skipped != self._skipped:
            return False
        marks = self._marks
        return [reader.mark() for reader in self._generators.readers.values()] == list(marks.values())

    def restore(self, saved: Restored, *, allow_reshuffle: bool = False) -> list[str]:
        """Take up what was saved; return what cannot be exact, each with its reason."""
        position = _with_loader(saved.own.get("position"))
        lacking = self._state.load(saved.tensors, saved.structure, saved.shared)
        if not saved.own:
            return [*lacking, "this rank's generators and position: the checkpoint has none of it"]
        self.progress.skipped = saved.own["skipped"]
        generators = saved.own["generators"]
        if self._feed is None or position is None:
            return lacking + self._generators.restore(generators)
        reasons = lacking + self._generators.check(generators)
        self._loaded = generators
        return reasons + self._feed.load(
            position,
            restore=lambda: self._generators.restore(generators),
            allow_reshuffle=allow_reshuffle,
        )

    def _own(self) -> tuple[tuple[str, Any], ...]:
        """What only this rank has: a skeleton's pairs, in which bytes stand for themselves.

        In two or three calls, for each costs a microsecond when it comes but once a step.
        """
        feed = self._feed
        self._skipped = self.progress.skipped
        if feed is None:
            return ("generators", self._drawn()), ("skipped", self.progress.skipped), ("position", None)
        states = _skeleton(self._loaded) if feed.awaiting else self._drawn()
        self._at = at = feed.state()
        if at[_START] is not self._start[0]:
            self._start = at[_START], msgspec.Raw(_packed(_skeleton(at[_START])))
        position = (
            ("epoch", at["epoch"]),
            ("batch", at["batch"]),
            (_START, self._start[1]),
            ("workers", _skeleton(at["workers"])),
            ("order", at["order"]),
            (_LOADER, pack_loader(at[_LOADER])),
        )
        return (
            ("generators", states),
            ("skipped", self.progress.skipped),
            ("position", {"dict": position}),
        )

    def _drawn(self) -> Any:
        """The generators' states; each is packed anew only if it was drawn from."""
        marks, states = self._marks, self._states
        for name, reader in self._generators.readers.items():
            mark = reader.mark()
            if mark != marks.get(name):
                marks[name] = mark
                states[name] = msgspec.Raw(_packed((name, _skeleton(reader.state()))))
        return {"dict": tuple(states.values())}


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


def _with_loader(position: Any) -> Any:
    """A position out of a checkpoint, with what its loader said. Raises LoadError."""
    if not isinstance(position, dict) or position.get(_LOADER) is None:
        return position
    return {**position, _LOADER: unpack_loader(position[_LOADER])}


def _skeleton(value: Any) -> Any:
    """That of values of our own: dictionaries and lists of None, small numbers, ASCII strings, and bytes.

    `tree.flatten` would spend some 30 microseconds on the generators alone.
    """
    kind = type(value)
    if kind is dict:
        pairs = value.items()
        return {"dict": [[key, item if type(item) is bytes else _skeleton(item)] for key, item in pairs]}
    if kind is list:
        return [_skeleton(item) for item in value]
    return value
