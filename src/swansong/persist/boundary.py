"""Boundary state: what a loop moves outside of updates, as ranks record it and checkpoints get it. Pure.

Three sorts, each with a rule of its own for a checkpoint of step N:

- **own**: a rank's own objects (generators, its position). From its record of N, or else from the provisional
  one, which was taken when the rank had done everything random in step N.
- **shared**: objects that are the same on all ranks (schedulers, counters), with the tensors in them. From
  any rank that reached the boundary of N, or else the one before.
- **tensors**: one name everywhere, but each rank's own values (batch-norm statistics). Rank 0's count, from
  either of its records of N; another rank's stand in only if it has none.

What had to be taken from elsewhere is listed as inexact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from swansong.errors import MalformedError
from swansong.state.dtypes import DTYPES
from swansong.state.leaves import Json, encode_leaf
from swansong.state.tensors import HostTensor


class BoundaryTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, copied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    """Its elements in C order, little-endian."""


class BoundaryState(msgspec.Struct, frozen=True, array_like=True):
    """What one rank records at a boundary, or, provisionally, before it."""

    own: Any = None
    """A skeleton of `state.tree` without tensors, in which bytes may also stand for themselves: they are the
    most of it, and text is made of them only for a checkpoint. What is packed already may be in it (Raw)."""
    shared: Any = None
    """Such a skeleton, without bytes."""
    tensors: tuple[BoundaryTensor, ...] = ()
    shared_tensors: tuple[BoundaryTensor, ...] = ()
    """Those that `shared` names."""
    shared_step: int | None = None
    """Of `shared` in a provisional record, which has it from the boundary before. See `best`."""

    def host_tensors(self) -> dict[str, HostTensor]:
        """All tensors by name. Raises MalformedError."""
        return {one.name: unpacked(one) for one in (*self.tensors, *self.shared_tensors)}


class Record(msgspec.Struct, frozen=True):
    """The boundary state of a step, packed."""

    step: int
    provisional: bool
    """True: taken before the boundary of that step was reached."""
    payload: bytes

    def state(self) -> BoundaryState | None:
        """Unpack it, bytes as a skeleton has them; None if it is malformed, as only a stranger's can be."""
        try:
            state = msgspec.msgpack.decode(self.payload, type=BoundaryState)
            return msgspec.structs.replace(state, own=_with_text(state.own))
        except (msgspec.MsgspecError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class Assembled:
    """What a checkpoint gets of all ranks' records."""

    boundary_step: int | None
    """The last boundary up to the checkpoint's step that any rank reached; None: no record says."""
    shared: Json = None
    own: Mapping[int, Json] = field(default_factory=dict)
    """By rank."""
    tensors: Mapping[str, HostTensor] = field(default_factory=dict)
    inexact: tuple[Mapping[str, Any], ...] = ()


def tensor_of(name: str, tensor: HostTensor) -> BoundaryTensor:
    """A copy, to be recorded."""
    data = np.ascontiguousarray(tensor.array).tobytes()
    return BoundaryTensor(name, tensor.dtype.name, tensor.shape, data)


def pack(state: BoundaryState) -> bytes:
    """As flight recorders and parts keep it."""
    return msgspec.msgpack.encode(state)


def own_of(payload: bytes) -> bytes:
    """Packed boundary state without all but what is the rank's own."""
    own, *_ = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
    return pack(BoundaryState(own))


def _with_text(node: Any) -> Json:
    """A skeleton with its bytes in the form that `state.tree` gives them."""
    if type(node) is bytes:
        return encode_leaf(node)
    if type(node) is list:
        return [_with_text(item) for item in node]
    if type(node) is dict:
        return {key: _with_text(item) for key, item in node.items()}
    return node  # type: ignore[no-any-return]


def best(records: Iterable[Record], step: int) -> Record | None:
    """The record of a rank that says most of a step: its boundary's, the provisional one, or an older one.

    The provisional one is given what it has not itself, what is shared, from the boundary before it.
    """
    able = [
        record
        for record in records
        if record.step <= step and not (record.provisional and record.step < step)
    ]
    found = max(able, key=lambda record: (record.step, not record.provisional), default=None)
    if found is None or not found.provisional:
        return found
    boundaries = (record for record in able if not record.provisional)
    before = max(boundaries, key=lambda record: record.step, default=None)
    return found if before is None else _completed(found, before)


def _completed(provisional: Record, before: Record) -> Record:
    state, earlier = provisional.state(), before.state()
    if state is None or earlier is None or state.shared is not None:
        return provisional
    whole = msgspec.structs.replace(
        state, shared=earlier.shared, shared_tensors=earlier.shared_tensors, shared_step=before.step
    )
    return msgspec.structs.replace(provisional, payload=pack(whole))


def trimmed(records: Mapping[int, Record], step: int, *, tensors: bool = True) -> dict[int, Record]:
    """Records of several ranks, best of a step, with those tensors only that can count.

    `tensors` False: only those of shared objects.
    """
    states = _states(records)
    exact = [rank for rank, record in records.items() if record.step == step]
    gives = min(exact or records, default=None) if tensors else None
    gives_shared = _gives_shared(states)
    kept = dict(records)
    for rank, (record, state) in states.items():
        less = msgspec.structs.replace(
            state,
            tensors=state.tensors if rank == gives else (),
            shared_tensors=state.shared_tensors if rank == gives_shared else (),
        )
        if less != state:
            kept[rank] = msgspec.structs.replace(record, payload=pack(less))
    return kept


def assemble(records: Mapping[int, Record], *, world_size: int, step: int) -> Assembled:
    """Put together what a checkpoint of `step` gets of each rank's best record."""
    states = _states({rank: record for rank, record in records.items() if rank < world_size})
    inexact = list(_own_inexact(states, world_size, step))
    shared, shared_tensors, reason = _shared(states, step)
    if reason:
        inexact.append({"what": "shared objects", "reason": reason})
    tensors, reason = _tensors(states, step, 0)
    if reason:
        inexact.append({"what": TENSORS, "reason": reason})
    return Assembled(
        boundary_step=max(_boundaries(states).values(), default=None),
        shared=shared,
        own={rank: state.own for rank, (_, state) in states.items() if state.own is not None},
        tensors=tensors | shared_tensors,
        inexact=tuple(inexact),
    )


TENSORS: Final = "boundary tensors"
"""What they are called where they are inexact."""
_NAMED: Final = 8
"""Ranks with the same trouble that are listed one by one."""


_States: TypeAlias = Mapping[int, tuple[Record, BoundaryState]]


def _states(records: Mapping[int, Record]) -> _States:
    """Those that are not malformed, by rank."""
    found = ((rank, record, record.state()) for rank, record in sorted(records.items()))
    return {rank: (record, state) for rank, record, state in found if state is not None}


def tensors(
    records: Mapping[int, Record], step: int, *, authority: int = 0
) -> tuple[dict[str, HostTensor], str]:
    """The boundary tensors that a checkpoint of `step` gets, and why they are inexact, if they are.

    `authority` is the rank whose tensors are exact: the lowest that there can be.
    """
    return _tensors(_states(records), step, authority)


def _own_inexact(states: _States, world_size: int, step: int) -> Iterable[Mapping[str, Any]]:
    having = {rank: record for rank, (record, state) in states.items() if state.own is not None}
    missing = [rank for rank in range(world_size) if rank not in states] if having or not states else []
    stale = [rank for rank, record in having.items() if record.step < step]
    for rank in missing[:_NAMED]:
        yield {"what": "objects", "rank": rank, "reason": "its flight recorder could not be read"}
    for rank in stale[:_NAMED]:
        reason = f"its boundary of step {step} was not reached; they are of step {having[rank].step}"
        yield {"what": "objects", "rank": rank, "reason": reason}
    more = len(missing[_NAMED:]) + len(stale[_NAMED:])
    if more:
        yield {"what": "objects", "reason": f"and those of {more} more ranks likewise"}


def _boundaries(states: _States) -> dict[int, int]:
    """Rank -> the last boundary of which its record tells."""
    found = {
        rank: state.shared_step if record.provisional else record.step
        for rank, (record, state) in states.items()
    }
    return {rank: step for rank, step in found.items() if step is not None}


def _gives_shared(states: _States) -> int | None:
    """The rank whose shared objects count: the lowest of those that came to the newest boundary."""
    boundaries = _boundaries(states)
    return max(boundaries, key=lambda rank: (boundaries[rank], -rank), default=None)


def _shared(states: _States, step: int) -> tuple[Json, dict[str, HostTensor], str]:
    """The shared objects, their tensors, and why they are inexact, if they are."""
    rank = _gives_shared(states)
    if rank is None:
        said = any(state.shared is not None for _, state in states.values())
        return None, {}, "no rank's record of a boundary could be read" if said else ""
    newest, state = _boundaries(states)[rank], states[rank][1]
    try:
        tensors = {one.name: unpacked(one) for one in state.shared_tensors}
    except MalformedError as error:
        return None, {}, f"those of rank {rank} are malformed: {error}"
    if newest == step or state.shared is None:
        return state.shared, tensors, ""
    return state.shared, tensors, f"no rank reached the boundary of step {step}; they are of step {newest}"


def _tensors(states: _States, step: int, authority: int) -> tuple[dict[str, HostTensor], str]:
    """The boundary tensors, and why they are inexact, if they are."""
    if not any(state.tensors for _, state in states.values()):
        return {}, ""
    exact = [rank for rank, (record, _) in states.items() if record.step == step]
    rank = min(exact) if exact else min(states, key=lambda rank: (-states[rank][0].step, rank))
    record, state = states[rank]
    try:
        tensors = {one.name: unpacked(one) for one in state.tensors}
    except MalformedError as error:
        return {}, f"those of rank {rank} are malformed: {error}"
    if record.step != step:
        return tensors, f"no rank has any of step {step}; they are rank {rank}'s of step {record.step}"
    if rank != authority:
        return tensors, f"rank {authority} has no record of step {step}; they are rank {rank}'s"
    return tensors, ""


def unpacked(tensor: BoundaryTensor) -> HostTensor:
    """The tensor, on the bytes that were copied. Raises MalformedError."""
    dtype, least = DTYPES.get(tensor.dtype), min(tensor.shape, default=0)
    if dtype is None or least < 0 or math.prod(tensor.shape) * dtype.itemsize != len(tensor.data):
        what = f"tensor {tensor.name!r}: {tensor.dtype} {list(tensor.shape)} of {len(tensor.data)} bytes"
        raise MalformedError(what)
    return HostTensor(dtype, np.frombuffer(tensor.data, dtype.carrier).reshape(tensor.shape))
