"""Boundary state: what a loop moves outside of updates, as ranks record it and checkpoints get it. Pure.

Three sorts, each with a rule of its own for a checkpoint of step N:

- **own**: a rank's own objects (generators, its position). From its record of N, or else from the provisional
  one, which was taken when the rank had done everything random in step N.
- **shared**: objects that are the same on all ranks (schedulers, counters). From any rank that reached the
  boundary of N.
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
from swansong.state.leaves import Json
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
    """A skeleton of `state.tree` without tensors."""
    shared: Any = None
    """Likewise."""
    tensors: tuple[BoundaryTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """The boundary state of a step, packed."""

    step: int
    provisional: bool
    """True: taken before the boundary of that step was reached."""
    payload: bytes

    def state(self) -> BoundaryState | None:
        """Unpack it; None if it is malformed, as only a stranger's can be."""
        try:
            return msgspec.msgpack.decode(self.payload, type=BoundaryState)
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


def best(records: Iterable[Record], step: int) -> Record | None:
    """The record that says most of a step: its boundary's, the provisional one, or the newest before it."""
    able = [
        record
        for record in records
        if record.step <= step and not (record.provisional and record.step < step)
    ]
    return max(able, key=lambda record: (record.step, not record.provisional), default=None)


def assemble(records: Mapping[int, Record], *, world_size: int, step: int) -> Assembled:
    """Put together what a checkpoint of `step` gets of each rank's best record."""
    states: dict[int, tuple[Record, BoundaryState]] = {}
    for rank, record in sorted(records.items()):
        state = record.state() if rank < world_size else None
        if state is not None:
            states[rank] = record, state
    reached = [record.step for record, _ in states.values() if not record.provisional]
    inexact = list(_own_inexact(states, world_size, step))
    shared, reason = _shared(states, step)
    if reason:
        inexact.append({"what": "shared objects", "reason": reason})
    tensors, reason = _tensors(states, step)
    if reason:
        inexact.append({"what": "boundary tensors", "reason": reason})
    return Assembled(
        boundary_step=max(reached, default=None),
        shared=shared,
        own={rank: state.own for rank, (_, state) in states.items() if state.own is not None},
        tensors=tensors,
        inexact=tuple(inexact),
    )


_NAMED: Final = 8
"""Ranks with the same trouble that are listed one by one."""


_States: TypeAlias = Mapping[int, tuple[Record, BoundaryState]]


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


def _shared(states: _States, step: int) -> tuple[Json, str]:
    """The shared objects, and why they are inexact, if they are."""
    at_boundary = [(record.step, -rank) for rank, (record, _) in states.items() if not record.provisional]
    if not at_boundary:
        said = any(state.shared is not None for _, state in states.values())
        return None, "no rank's record of a boundary could be read" if said else ""
    newest, rank = max(at_boundary)
    shared: Json = states[-rank][1].shared
    if newest == step or shared is None:
        return shared, ""
    return shared, f"no rank reached the boundary of step {step}; they are of step {newest}"


def _tensors(states: _States, step: int) -> tuple[dict[str, HostTensor], str]:
    """The boundary tensors, and why they are inexact, if they are."""
    if not any(state.tensors for _, state in states.values()):
        return {}, ""
    exact = [rank for rank, (record, _) in states.items() if record.step == step]
    rank = min(exact) if exact else min(states, key=lambda rank: (-states[rank][0].step, rank))
    record, state = states[rank]
    try:
        tensors = {one.name: _unpacked(one) for one in state.tensors}
    except MalformedError as error:
        return {}, f"those of rank {rank} are malformed: {error}"
    if record.step != step:
        return tensors, f"no rank has any of step {step}; they are rank {rank}'s of step {record.step}"
    if rank != 0:
        return tensors, f"rank 0 has no record of step {step}; they are rank {rank}'s"
    return tensors, ""


def _unpacked(tensor: BoundaryTensor) -> HostTensor:
    dtype, least = DTYPES.get(tensor.dtype), min(tensor.shape, default=0)
    if dtype is None or least < 0 or math.prod(tensor.shape) * dtype.itemsize != len(tensor.data):
        what = f"tensor {tensor.name!r}: {tensor.dtype} {list(tensor.shape)} of {len(tensor.data)} bytes"
        raise MalformedError(what)
    return HostTensor(dtype, np.frombuffer(tensor.data, dtype.carrier).reshape(tensor.shape))
