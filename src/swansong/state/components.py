"""Components: the parts of a rank's state that are saved and replaced as a unit, and who holds them.

Two ranks hold replicas of a component if and only if their keys for it are equal. A key is a digest of names,
types, global shapes, boxes and of the *known* placement. Equal names and shapes are not enough: pipeline
stages and expert shards have them with different values. Where placement is not known the rank itself is part
of the key, so that the component has a sole holder and can never be pooled by mistake.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swansong.errors import ConfigError
from swansong.state.boxes import Box


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a key says of one tensor; never its values."""

    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    box: Box | None = None
    """The part held; None: all of it, as a box that covers the whole shape says, too."""


def component_key(tensors: Mapping[str, TensorShape], *, placement: str | None, rank: int) -> str:
    """Return the key of a component, 32 hexadecimal digits: BLAKE2b over canonical JSON.

    `tensors` are named by their full names; their order does not matter. `placement` names the group of ranks
    that hold replicas, the same text on each of them ("ddp", "shard 3 of mesh dp=2 tp=4"). None: not known,
    and `rank` makes the component its own.
    """
    described = [
        [
            name,
            spec.dtype,
            list(spec.shape),
            None
            if spec.box is None or spec.box == Box.whole(spec.shape)
            else [list(spec.box.offset), list(spec.box.shape)],
        ]
        for name, spec in sorted(tensors.items())
    ]
    place = ["rank", rank] if placement is None else ["placement", placement]
    text = json.dumps([place, described], separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"swansong/1 key").hexdigest()


@dataclass(frozen=True, slots=True)
class Component:
    """A component as one rank announces it."""

    key: str
    label: str
    """For people: "model and optimizer", "shard 3"."""
    nbytes: int
    """Bytes that saving it writes, by this rank's account."""


@dataclass(frozen=True)
class WorldMap:
    """Which rank holds which components: fixed once every rank has registered.

    Raises ConfigError unless the members are ranks 0 to n - 1, each with every key once.
    """

    members: Mapping[int, tuple[Component, ...]]
    """By rank, every rank of the world."""
    _holders: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _components: dict[str, Component] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = len(self.members)
        if strangers := sorted(self.members.keys() - range(size)):
            raise ConfigError(f"world map: wanted {size} ranks from 0 to {size - 1}, got rank {strangers[0]}")
        holders: dict[str, list[int]] = {}
        components: dict[str, Component] = {}
        for rank in sorted(self.members):
            for component in self.members[rank]:
                ranks = holders.setdefault(component.key, [])
                if rank in ranks[-1:]:
                    raise ConfigError(f"world map: rank {rank} names component {component.label!r} twice")
                ranks.append(rank)
                # Optimizer state may exist on some replicas only so far, so the largest account counts.
                if component.nbytes > components.setdefault(component.key, component).nbytes:
                    components[component.key] = component
        object.__setattr__(self, "_holders", {key: tuple(ranks) for key, ranks in holders.items()})
        object.__setattr__(self, "_components", components)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def components(self) -> Mapping[str, Component]:
        """Every component by its key, in the account of the holder for which it is largest."""
        return self._components

    def holders(self, key: str) -> tuple[int, ...]:
        """The ranks that hold a component, lowest first; none for a key that is not on the map."""
        return self._holders.get(key, ())

    def sole_holders(self) -> list[tuple[int, Component]]:
        """(rank, component) for each that only one rank holds: what that rank's death would lose."""
        return [(ranks[0], self._components[key]) for key, ranks in self._holders.items() if len(ranks) == 1]

    def lost_with(self, ranks: Iterable[int]) -> list[Component]:
        """The components that nobody but `ranks` holds."""
        gone = set(ranks)
        return [self._components[key] for key, holders in self._holders.items() if gone.issuperset(holders)]
