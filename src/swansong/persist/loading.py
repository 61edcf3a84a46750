"""Filling live tensors from a checkpoint, and finding the objects that were kept with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swansong.errors import LoadError
from swansong.state import tree
from swansong.state.leaves import Json
from swansong.state.tensors import HostTensor
from swansong.store.crypt import Key
from swansong.store.opening import Checkpoint, open_checkpoint


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


def fill(
    tensors: Mapping[str, HostTensor], path: Path, holder: str, *, key: Key | None, nothing_else: bool
) -> dict[str, Any]:
    """Read a checkpoint into the memory of `tensors`; return the objects of `holder`, {} if there are none.

    Everything is read and verified before anything is written. Raises LoadError if a tensor is missing or is
    of another type or shape, or, with `nothing_else`, if there are others; and what `open_checkpoint` raises.
    """
    with open_checkpoint(path, key=key) as checkpoint:
        _check_fit(checkpoint, tensors, nothing_else=nothing_else)
        loaded = {name: checkpoint.read(name) for name in tensors}
        objects = _objects(checkpoint, holder)
    for name, tensor in loaded.items():
        np.copyto(tensors[name].array, tensor.array)
    return objects


def _check_fit(checkpoint: Checkpoint, tensors: Mapping[str, HostTensor], *, nothing_else: bool) -> None:
    found = checkpoint.entries
    missing = sorted(tensors.keys() - found.keys())
    unknown = sorted(found.keys() - tensors.keys()) if nothing_else else []
    if missing or unknown:
        raise LoadError(
            f"{checkpoint.path}: does not fit: it lacks {missing[:3]}, and has {unknown[:3]} besides",
            path=str(checkpoint.path),
        )
    for name, tensor in tensors.items():
        stored = found[name]
        if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
            raise LoadError(
                f"{checkpoint.path}: tensor {name!r}: wanted {tensor.dtype.name} {list(tensor.shape)}, "
                f"found {stored.dtype.name} {list(stored.shape)}",
                path=str(checkpoint.path),
            )


def _objects(checkpoint: Checkpoint, holder: str) -> dict[str, Any]:
    manifest = checkpoint.manifest
    for kept in [] if manifest is None else [manifest.objects, *manifest.rank_objects.values()]:
        extra = tree.unflatten(kept["extra"], {}) if kept and kept.get("extra") else None
        if isinstance(extra, dict) and extra.get("holder") == holder:
            return dict(extra["objects"])
    return {}
