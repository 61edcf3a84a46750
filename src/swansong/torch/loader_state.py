"""What a loader with `state_dict` says of itself, packed with the tensors in it, as generators' states are.

Packed it is two plain values, `skeleton` (a skeleton of `state.tree`, as JSON) and `tensors` (a list of
`BoundaryTensor`), or None.
"""

from __future__ import annotations

from typing import Any

import msgspec

from swansong.errors import LoadError, MalformedError
from swansong.persist.boundary import BoundaryTensor, tensor_of, unpacked
from swansong.state import tree
from swansong.torch.optimizers import in_torch
from swansong.torch.tensors import as_tensor


class _Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skeleton: bytes
    tensors: list[BoundaryTensor]


def pack_loader(state: Any) -> Any:
    """As a skeleton in which bytes stand for themselves; copies. Raises UnrepresentableError."""
    if state is None:
        return None
    flat = tree.flatten(state, as_tensor)
    shown = flat.tensors | {name: flat.tensors[original] for name, original in flat.aliases.items()}
    tensors = [tensor_of(name, tensor) for name, tensor in shown.items()]
    return {"dict": (("skeleton", msgspec.json.encode(flat.skeleton)), ("tensors", tensors))}


def unpack_loader(packed: Any) -> Any:
    """The state, of what `pack_loader` gave and a checkpoint kept. Raises LoadError."""
    if packed is None:
        return None
    try:
        found = msgspec.convert(packed, type=_Packed)
        tensors = {one.name: unpacked(one) for one in found.tensors}
        return in_torch(tree.unflatten(msgspec.json.decode(found.skeleton), tensors))
    except (msgspec.MsgspecError, MalformedError, RecursionError) as error:
        raise LoadError(f"position in the data: loader: {error}") from error
