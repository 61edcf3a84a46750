"""What the writer process is told: typed, bounded, and showing no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from store_support import KEY
from swansong.errors import ConfigError, DiskFullError, ProtocolError, SaveError, UnrepresentableError
from swansong.policy.keep import KeepAll, KeepLast, KeepPerMinutes, KeepPolicy
from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content, Point, Saved, SaveOptions
from swansong.store.files import Files
from swansong.store.orders import decode_order, encode_answer, encode_order, outcome, task_of, travels
from swansong.store.series import Series
from swansong.store.shared_memory import SharedMemory
from swansong.store.task import Done, Task
from swansong.store.writer import WriterOptions

OPTIONS = WriterOptions(threads=3)


def task(directory: Path, memory: SharedMemory, keep: KeepPolicy | None = None) -> Task:
    array = memory.allocate(4096)[:12].view(np.float32).reshape(1, 3)
    return Task(
        series=Series.fresh(directory, "m", Files()),
        name="m-1",
        content=Content(tensors={"w": HostTensor.of(array)}, append_info={"n": 1}, objects={"x": (1, b"2")}),
        point=Point(step=1, epoch=2),
        kind="final",
        seq=7,
        options=SaveOptions(key=KEY),
        keep=keep,
    )


def order(directory: Path, **changes: Any) -> bytes:
    memory = SharedMemory()
    told = task(directory, memory)
    block = memory.block_of(told.content.tensors["w"].array)
    fields = msgspec.json.decode(encode_order(told, OPTIONS, block))
    return msgspec.json.encode(fields | changes)


def test_an_order_asks_for_the_same_task(tmp_path: Path) -> None:
    memory = SharedMemory()
    told = task(tmp_path, memory)
    block = memory.block_of(told.content.tensors["w"].array)
    assert block is not None
    heard = decode_order(encode_order(told, OPTIONS, block))
    asked = task_of(heard, np.asarray(block), Files())
    assert heard.writer == OPTIONS
    assert (asked.name, asked.point, asked.kind, asked.seq) == ("m-1", Point(step=1, epoch=2), "final", 7)
    assert (asked.series.run, asked.series.floor) == (told.series.run, told.series.floor)
    assert np.shares_memory(asked.content.tensors["w"].array, told.content.tensors["w"].array)
    assert asked.content.append_info == {"n": 1}
    assert asked.options.key is not None
    assert asked.options.key.material == KEY.material


def test_no_text_of_an_order_shows_the_key(tmp_path: Path) -> None:
    heard = decode_order(order(tmp_path))
    assert "hidden" in repr(heard)
    assert repr(KEY.material)[2:-1] not in repr(heard)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": "1"},
        {"memory": -1},
        {"kind": "other"},
        {"container": "zip"},
        {"tensors": {"w": ["float32", [-1], 0]}},
        {"writer": {"threads": "many"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_no_order_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="no order"):
        decode_order(order(tmp_path, **changes))


@pytest.mark.parametrize(
    ("place", "memory"),
    [
        (["float32", [3], 4088], 4096),
        (["float32", [1 << 40, 1 << 40], 0], 4096),
        (["float32", [1], 0], 0),
        (["object", [1], 0], 4096),
    ],
    ids=["past the end", "huge", "no memory", "type"],
)
def test_a_tensor_outside_the_memory_is_refused(tmp_path: Path, place: list[Any], memory: int) -> None:
    heard = decode_order(order(tmp_path, tensors={"w": place}))
    with pytest.raises(ProtocolError, match=r"'w': .* is not in the memory"):
        task_of(heard, np.zeros(memory, np.uint8), Files())


def test_a_tensor_elsewhere_is_not_sent(tmp_path: Path) -> None:
    memory, told = SharedMemory(), task(tmp_path, SharedMemory())
    block = memory.block_of(memory.allocate(4096))
    with pytest.raises(ValueError, match="does not lie in the memory"):
        encode_order(told, OPTIONS, block)


class Users(KeepLast):
    """A user's own."""


@pytest.mark.parametrize(
    ("policy", "arrives"),
    [(KeepLast(3), True), (KeepPerMinutes(1.5), True), (KeepAll(), True), (Users(3), False), (None, False)],
    ids=repr,
)
def test_policies_of_ours_travel(tmp_path: Path, policy: KeepPolicy | None, arrives: bool) -> None:
    memory = SharedMemory()
    told = task(tmp_path, memory, policy)
    block = memory.block_of(told.content.tensors["w"].array)
    asked = task_of(decode_order(encode_order(told, OPTIONS, block)), np.asarray(block), Files())
    assert travels(policy) is arrives
    assert asked.keep == (policy if arrives else None)


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (DiskFullError("p: full", path="p", needed=5, free=3), DiskFullError),
        (SaveError("p: no", path="p"), SaveError),
        (UnrepresentableError("x"), UnrepresentableError),
        (ConfigError("x"), ConfigError),
        (RuntimeError("bug"), SaveError),
        (MemoryError(), SaveError),
    ],
    ids=lambda given: type(given).__name__,
)
def test_errors_arrive_as_what_they_are(tmp_path: Path, error: Exception, arrives: type[Exception]) -> None:
    with pytest.raises(arrives) as caught:
        outcome(encode_answer(error), task(tmp_path, SharedMemory()))
    assert type(caught.value) is arrives
    assert str(error) in str(caught.value)
    for name in ("path", "needed", "free"):
        assert getattr(caught.value, name, "") == getattr(error, name, "")


def test_success_arrives_as_the_caller_knows_the_path(tmp_path: Path) -> None:
    told = task(tmp_path, SharedMemory())
    saved = Saved(path=tmp_path / "m-1", id="ab", seq=7, nbytes=5, direct=True)
    done = Done(saved=saved, unpruned="why")
    assert outcome(encode_answer(done), told) == done
