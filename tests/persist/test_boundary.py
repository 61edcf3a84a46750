"""Whose record counts for what, and what is said to be inexact."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from swansong.persist.boundary import (
    Assembled,
    BoundaryState,
    BoundaryTensor,
    Record,
    assemble,
    best,
    pack,
    tensor_of,
    trimmed,
)
from swansong.persist.records import as_objects, from_objects
from swansong.state.tensors import HostTensor
from swansong.store.saving import plain_skeleton


def state(value: int, *, own: bool = True, shared: bool = True, tensor: bool = True) -> BoundaryState:
    """One in which everything is `value`."""
    tensors = [tensor_of("mean", HostTensor.of(np.full(3, value, np.float32)))] if tensor else []
    return BoundaryState(value if own else None, value if shared else None, tuple(tensors))


def record(step: int, *, rank: int = 0, provisional: bool = False, **sorts: bool) -> Record:
    """One of which the values tell rank and step: 10 x step + rank, and 5 more if it is provisional."""
    return Record(step, provisional, pack(state(10 * step + rank + 5 * provisional, **sorts)))


def put(records: Mapping[int, Record], world_size: int = 2, step: int = 4) -> Assembled:
    return assemble(records, world_size=world_size, step=step)


def said(assembled: Assembled) -> list[tuple[str, object]]:
    return [(entry["what"], entry.get("rank")) for entry in assembled.inexact]


@pytest.mark.parametrize(
    ("of", "found"),
    [
        ([(4, False), (3, False)], (4, False)),
        ([(4, True), (3, False)], (4, True)),
        ([(4, True), (4, False), (3, False)], (4, False)),
        ([(5, True), (4, False)], (4, False)),
        ([(3, False), (2, False)], (3, False)),
        ([(3, True), (2, False)], (2, False)),
        ([(5, False), (6, True)], None),
    ],
    ids=["boundary", "provisional", "both", "next one's", "boundary before", "half of before", "none"],
)
def test_best_record_of_step_4(of: list[tuple[int, bool]], found: tuple[int, bool] | None) -> None:
    chosen = best([record(step, provisional=provisional) for step, provisional in of], 4)
    assert (chosen and (chosen.step, chosen.provisional)) == found


def test_all_reached_the_boundary_so_everything_is_exact() -> None:
    got = put({0: record(4), 1: record(4, rank=1)})
    assert (got.boundary_step, got.shared, got.own, got.inexact) == (4, 40, {0: 40, 1: 41}, ())
    assert got.tensors["mean"].array.tolist() == [40, 40, 40]


def test_rank_killed_after_its_forward_is_exact_by_its_provisional_record() -> None:
    got = put({0: record(4), 1: record(4, rank=1, provisional=True)})
    assert (got.own, got.inexact) == ({0: 40, 1: 46}, ())


def test_rank_0_killed_after_its_forward_still_gives_the_tensors_but_not_what_the_loop_moves_later() -> None:
    got = put({0: record(4, provisional=True), 1: record(4, rank=1)})
    assert (got.shared, got.tensors["mean"].array[0], got.inexact) == (41, 45, ())


def test_nobody_reached_the_boundary_so_what_the_loop_moves_is_of_the_one_before() -> None:
    got = put({0: record(4, provisional=True), 1: record(3, rank=1)})
    assert (got.boundary_step, got.shared, got.tensors["mean"].array[0]) == (3, 31, 45)
    assert said(got) == [("objects", 1), ("shared objects", None)]


def with_average(step: int, rank: int = 0) -> Record:
    """At a boundary, with a shared object that has a tensor."""
    average = (tensor_of("average", HostTensor.of(np.full(2, 10 * step + rank, np.float32))),)
    full = msgspec.structs.replace(state(10 * step + rank), shared_tensors=average)
    return Record(step, False, pack(full))


def test_tensors_of_shared_objects_are_of_the_rank_that_gives_these() -> None:
    killed = record(4, provisional=True, shared=False)
    for records in ({0: killed, 1: with_average(4, 1)}, trimmed({0: killed, 1: with_average(4, 1)}, 4)):
        got = put(records)
        assert (got.shared, got.inexact) == (41, ())
        assert {name: tensor.array[0] for name, tensor in got.tensors.items()} == {"mean": 45, "average": 41}


def test_nobody_reached_the_boundary_and_all_have_what_is_shared_from_the_one_before() -> None:
    halfway = record(4, provisional=True, shared=False)
    chosen = best([halfway, with_average(3)], 4)
    assert chosen is not None
    got = put({0: chosen}, world_size=1)
    assert (got.boundary_step, got.shared, got.own) == (3, 30, {0: 45})
    assert {name: tensor.array[0] for name, tensor in got.tensors.items()} == {"mean": 45, "average": 30}
    assert said(got) == [("shared objects", None)]


def test_another_ranks_tensors_stand_in_for_rank_0s_and_that_is_said() -> None:
    got = put({1: record(4, rank=1), 2: record(4, rank=2)}, world_size=3)
    assert got.tensors["mean"].array[0] == 41
    assert said(got) == [("objects", 0), ("boundary tensors", None)]


def test_tensors_of_an_older_step_stand_in_only_if_there_are_no_others() -> None:
    assert put({0: record(3), 1: record(4, rank=1)}).tensors["mean"].array[0] == 41
    older = put({0: record(2), 1: record(3, rank=1)})
    assert older.tensors["mean"].array[0] == 31
    assert ("boundary tensors", None) in said(older)


def test_rank_without_record_lacks_nothing_if_no_rank_has_objects_of_its_own() -> None:
    got = put({0: record(4, own=False)})
    assert (got.own, got.inexact) == ({}, ())


def test_without_any_record_that_is_said_of_every_rank() -> None:
    got = put({}, world_size=12)
    assert got.boundary_step is None
    assert [entry.get("rank") for entry in got.inexact] == [*range(8), None]
    assert "4 more ranks" in got.inexact[-1]["reason"]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", pack(state(1))[:-1], b"\x93\x01\x02\x03", b"\x91" * 5000],
    ids=["empty", "no msgpack", "cut", "wrong type", "deep"],
)
def test_malformed_record_is_none(payload: bytes) -> None:
    got = put({0: record(4), 1: Record(4, False, payload)})
    assert got.own == {0: 40}
    assert said(got) == [("objects", 1)]


@pytest.mark.parametrize(
    "tensor",
    [
        BoundaryTensor("mean", "float31", (1,), b"1234"),
        BoundaryTensor("mean", "float32", (2,), b"1234"),
        BoundaryTensor("mean", "float32", (-1, -1), b"1234"),
        BoundaryTensor("mean", "float32", (-1,), b""),
    ],
    ids=["type", "length", "negative", "negative empty"],
)
def test_malformed_tensor_is_told(tensor: BoundaryTensor) -> None:
    got = put({0: Record(4, False, pack(BoundaryState(None, None, (tensor,))))}, world_size=1)
    assert got.tensors == {}
    assert said(got) == [("boundary tensors", None)]


def test_rank_beyond_the_world_is_disregarded() -> None:
    assert put({0: record(4), 1: record(4, rank=1), 2: record(4, rank=2)}).own == {0: 40, 1: 41}


def test_records_travel_in_a_parts_objects_with_one_ranks_tensors() -> None:
    records = {0: record(3), 1: record(4, rank=1), 2: record(4, rank=2, provisional=True)}
    objects = {"state": None, "extra": plain_skeleton(as_objects(records, 4), "objects")}
    back = from_objects(objects)
    assert {rank: (r.step, r.provisional) for rank, r in back.items()} == {
        0: (3, False),
        1: (4, False),
        2: (4, True),
    }
    tensors = {rank: len(state.tensors) for rank, r in back.items() if (state := r.state()) is not None}
    assert tensors == {0: 0, 1: 1, 2: 0}
    assert put(back, 3).own == {0: 30, 1: 41, 2: 47}


@pytest.mark.parametrize(
    "objects",
    [
        None,
        {},
        {"extra": None},
        {"extra": {"dict": [["records", 7]]}},
        {"extra": {"dict": [["records", {"dict": [["x", 1]]}]]}},
        {"extra": {"tensor": "w"}},
    ],
    ids=["none", "empty", "null", "no mapping", "no rank", "tensor"],
)
def test_objects_without_records_have_none(objects: dict[str, object] | None) -> None:
    assert from_objects(objects) == {}
