"""Filling live tensors from a checkpoint, and finding the objects that were kept with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from swansong.errors import KeyNeededError, LoadError, SwansongError
from swansong.state import tree
from swansong.state.leaves import Json
from swansong.state.tensors import HostTensor
from swansong.store.catalog import Found
from swansong.store.crypt import Key
from swansong.store.opening import Checkpoint, open_checkpoint
from swansong.store.verify import usable


def structures(of: Mapping[str, Json]) -> Json:
    """Component key -> structure, as a checkpoint's `objects.state`; None if none has any."""
    given: list[Json] = [[key, skeleton] for key, skeleton in sorted(of.items()) if skeleton is not None]
    return {"dict": given} if given else None


def structures_in(state: Json) -> dict[str, Json]:
    """What `structures` has put together; {} for what is nothing of the kind."""
    pairs = state.get("dict") if isinstance(state, dict) else None
    if not isinstance(pairs, list):
        return {}
    return {
        pair[0]: pair[1]
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
    }


def described(holder: str, objects: Mapping[str, Any]) -> dict[str, Any]:
    """`objects` as a checkpoint keeps them, so that each group of ranks finds its own among the others'."""
    return {"holder": holder, "objects": dict(objects)}


class Kept:
    """Of the checkpoints that one may resume from, the last that was found sound: kept open, and verified.

    So what was chosen is what is loaded, whatever comes in its place meanwhile, and is not verified twice.
    Used in a `with` block, it closes what it has.
    """

    def __init__(self, verify: Callable[[Checkpoint], object] = Checkpoint.verify) -> None:
        """`verify` checks all of a checkpoint, in the way in which it is going to be loaded."""
        self._verify = verify
        self._checkpoint: Checkpoint | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def examine(self, found: Found, key: Key | None) -> str | None:
        """See `latest.Examine`."""
        self._close()
        try:
            self._checkpoint = open_checkpoint(found.path, key=key)
            self._verify(self._checkpoint)
        except KeyNeededError:
            return usable(found, key)  # sound, as far as it can be told: whoever loads it hears of the key
        except (SwansongError, OSError) as error:
            self._close()
            return str(error)
        return None

    def open(self, path: Path, key: Key | None) -> Checkpoint:
        """The checkpoint at `path`, if it is the one that is kept; else that is opened. Errors as
        `open_checkpoint`.
        """
        if self._checkpoint is None or self._checkpoint.path != path:
            self._close()
            self._checkpoint = open_checkpoint(path, key=key)
        return self._checkpoint

    def _close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None


def fill(
    tensors: Mapping[str, HostTensor], checkpoint: Checkpoint, holder: str, *, nothing_else: bool
) -> dict[str, Any]:
    """Read a checkpoint into the memory of `tensors`; return the objects of `holder`, {} if there are none.

    Everything is verified before anything is written. Raises LoadError if a tensor is missing or is of
    another type or shape, or, with `nothing_else`, if there are others; and what `Checkpoint.fill` raises.
    """
    missing = sorted(tensors.keys() - checkpoint.entries.keys())
    unknown = sorted(checkpoint.entries.keys() - tensors.keys()) if nothing_else else []
    if missing or unknown:
        raise LoadError(
            f"{checkpoint.path}: does not fit: it lacks {missing[:3]}, and has {unknown[:3]} besides",
            path=str(checkpoint.path),
        )
    objects = _objects(checkpoint, holder)
    checkpoint.fill(tensors)
    return objects


def _objects(checkpoint: Checkpoint, holder: str) -> dict[str, Any]:
    manifest = checkpoint.manifest
    for kept in [] if manifest is None else [manifest.objects, *manifest.rank_objects.values()]:
        extra = tree.unflatten(kept["extra"], {}) if kept and kept.get("extra") else None
        if isinstance(extra, dict) and extra.get("holder") == holder:
            return dict(extra["objects"])
    return {}
