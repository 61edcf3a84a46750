"""What the writer process is told, and what it answers: typed JSON by msgspec.

The tensors themselves lie in shared memory; an order says where in it. Structure and plain objects travel in
the form that a manifest has for them (`state.tree`), so that they arrive exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from swansong import errors
from swansong.errors import DiskFullError, ProtocolError, SaveError, SwansongError
from swansong.policy.keep import KeepAll, KeepLast, KeepPerMinutes, KeepPolicy
from swansong.state import tree
from swansong.state.boxes import Box
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Container, Content, Kind, Mode, Point, Saved, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.saving import objects_of
from swansong.store.series import Series
from swansong.store.shared_memory import Block
from swansong.store.task import Done, Task
from swansong.store.workspace import Workspace
from swansong.store.writer import WriterOptions

ORDER_LIMIT: Final = 1 << 30
"""Bytes of an order: twice a manifest's, since names stand in it more than once."""
ANSWER_LIMIT: Final = 1 << 20
"""Bytes of an answer."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Texts = dict[str, str]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, row-major in the shared memory."""

    dtype: str
    shape: tuple[_Count, ...]
    offset: _Count


class SeriesPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A series, by its fields."""

    directory: str
    name: str
    stem: str
    run: str
    parent: str | None
    floor: int


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of ours; those of users stay with the process that has their code."""

    policy: Literal["all", "last", "minutes"]
    number: int | float = 0


class Secret(msgspec.Struct, frozen=True):
    """A key, which is never shown."""

    material: bytes

    def __repr__(self) -> str:
        return "Secret(<hidden>)"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Write one checkpoint."""

    memory: _Count
    """Bytes of the shared memory; 0: none comes with it."""
    series: SeriesPlace
    name: str
    point: Point
    kind: Kind
    seq: int
    container: Container
    mode: Mode
    crc: bool
    key: Secret | None
    keep: Keep | None
    writer: WriterOptions
    tensors: dict[str, Place]
    rest: dict[str, Place]
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    """Name -> global shape, the box's offset, its shape."""
    aliases: _Texts
    skeleton: Any
    extra: Any
    rank_objects: dict[int, Any]
    append_info: Any
    """As a skeleton."""
    appended: dict[str, Place]
    """The tensors in it."""
    inexact: tuple[dict[str, Any], ...]


class Success(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It is on disk."""

    id: str
    nbytes: _Count
    direct: bool
    unpruned: str | None


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It is not."""

    error: str
    """Name of a class in `errors`."""
    message: str
    path: str = ""
    needed: int = 0
    free: int = 0


Answer = Success | Failure


def encode_order(task: Task, writer: WriterOptions, block: Block | None) -> bytes:
    """The order for `task`, whose tensors lie in `block`; None: they are all empty.

    Raises UnrepresentableError, as the save itself would.
    """
    content, options, series = task.content, task.options, task.series
    appended = tree.flatten(dict(content.append_info), lambda v: v if isinstance(v, HostTensor) else None)
    order = Order(
        memory=block.size if block is not None else 0,
        series=SeriesPlace(
            directory=str(series.directory.absolute()),
            name=series.name,
            stem=series.stem,
            run=series.run,
            parent=series.parent,
            floor=series.floor,
        ),
        name=task.name,
        point=task.point,
        kind=task.kind,
        seq=task.seq,
        container=options.container,
        mode=options.mode,
        crc=options.crc,
        key=Secret(options.key.material) if options.key is not None else None,
        keep=_keep(task.keep),
        writer=writer,
        tensors=_places(content.tensors, block),
        rest=_places(content.rest, block),
        boxes={name: (shape, box.offset, box.shape) for name, (shape, box) in content.boxes.items()},
        aliases=dict(content.aliases),
        skeleton=content.skeleton,
        extra=objects_of(content)["extra"],
        rank_objects=dict(content.rank_objects),
        append_info=appended.skeleton,
        appended=_places(appended.tensors, block),
        inexact=tuple(dict(entry) for entry in content.inexact),
    )
    return msgspec.json.encode(order)


def decode_order(payload: bytes) -> Order:
    """Raises ProtocolError."""
    try:
        return msgspec.json.decode(payload, type=Order)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no order: {error}") from error


def task_of(order: Order, memory: NDArray[np.uint8], files: Files) -> Task:
    """What an order asks for; its tensors show `memory`. Raises ProtocolError, ConfigError."""
    place = order.series
    return Task(
        series=Series(
            space=Workspace(Path(place.directory), files),
            name=place.name,
            stem=place.stem,
            run=place.run,
            parent=place.parent,
            floor=place.floor,
        ),
        name=order.name,
        content=Content(
            tensors=_tensors(order.tensors, memory),
            boxes={name: (shape, Box(offset, size)) for name, (shape, offset, size) in order.boxes.items()},
            aliases=order.aliases,
            rest=_tensors(order.rest, memory),
            skeleton=order.skeleton,
            extra=order.extra,
            rank_objects=order.rank_objects,
            append_info=tree.unflatten(order.append_info, _tensors(order.appended, memory)),
            inexact=order.inexact,
        ),
        point=order.point,
        kind=order.kind,
        seq=order.seq,
        options=SaveOptions(
            container=order.container,
            key=Key(order.key.material) if order.key is not None else None,
            mode=order.mode,
            crc=order.crc,
        ),
        keep=_policy(order.keep),
    )


def encode_answer(answer: Done | Exception) -> bytes:
    """What the worker says."""
    told: Answer
    if isinstance(answer, Done):
        saved = answer.saved
        told = Success(id=saved.id, nbytes=saved.nbytes, direct=saved.direct, unpruned=answer.unpruned)
    else:
        known = isinstance(answer, SwansongError)
        text = str(answer) if known else f"not saved: {type(answer).__name__}: {answer}"
        told = Failure(
            error=type(answer).__name__ if known else SaveError.__name__,
            message=text[: ANSWER_LIMIT // 16],
            path=getattr(answer, "path", ""),
            needed=getattr(answer, "needed", 0),
            free=getattr(answer, "free", 0),
        )
    return msgspec.json.encode(told)


def outcome(payload: bytes, task: Task) -> Done:
    """What a worker has said of `task`. Raises the error that it met."""
    answer: Answer = msgspec.json.decode(payload, type=Answer)
    if isinstance(answer, Success):
        path = task.series.directory / task.name
        saved = Saved(path=path, id=answer.id, seq=task.seq, nbytes=answer.nbytes, direct=answer.direct)
        return Done(saved=saved, unpruned=answer.unpruned)
    kind = getattr(errors, answer.error, SaveError)
    if kind is DiskFullError:
        raise DiskFullError(answer.message, path=answer.path, needed=answer.needed, free=answer.free)
    if kind is SaveError or not issubclass(kind, SwansongError):
        raise SaveError(answer.message, path=answer.path)
    raise kind(answer.message)


def travels(keep: KeepPolicy | None) -> bool:
    """True for a policy of ours."""
    return _keep(keep) is not None


def _keep(policy: KeepPolicy | None) -> Keep | None:
    # Of that very class: a subclass decides as its user's code says.
    match policy:
        case KeepLast(count) if type(policy) is KeepLast:
            return Keep(policy="last", number=count)
        case KeepPerMinutes(minutes) if type(policy) is KeepPerMinutes:
            return Keep(policy="minutes", number=minutes)
        case KeepAll() if type(policy) is KeepAll:
            return Keep(policy="all")
        case _:
            return None


def _policy(keep: Keep | None) -> KeepPolicy | None:
    match keep:
        case Keep(policy="last", number=int(count)):
            return KeepLast(count)
        case Keep(policy="minutes", number=minutes):
            return KeepPerMinutes(minutes)
        case Keep():
            return KeepAll()
        case _:
            return None


def _places(tensors: Mapping[str, HostTensor], block: Block | None) -> dict[str, Place]:
    places = {}
    for name, tensor in tensors.items():
        offset = block.offset_of(tensor.array) if tensor.nbytes and block is not None else 0
        if offset is None or (tensor.nbytes and not tensor.contiguous):
            raise ValueError(f"tensor {name!r} does not lie in the memory that is shared")
        places[name] = Place(tensor.dtype.name, tensor.shape, offset)
    return places


def _tensors(places: Mapping[str, Place], memory: NDArray[np.uint8]) -> dict[str, HostTensor]:
    tensors = {}
    for name, place in places.items():
        dtype = DTYPES.get(place.dtype)
        size = dtype.itemsize if dtype is not None else 0
        for length in place.shape:
            size *= length
        if dtype is None or place.offset + size > len(memory):
            raise ProtocolError(f"tensor {name!r}: {place.dtype}{list(place.shape)} is not in the memory")
        array = memory[place.offset : place.offset + size].view(dtype.carrier).reshape(place.shape)
        tensors[name] = HostTensor(dtype, array)
    return tensors
