"""Capturing: what was captured stays as it was, and staging memory is bounded and used again."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest

from store_support import same
from swansong.state.tensors import HostTensor
from swansong.store import capture as module
from swansong.store.capture import Staging
from swansong.store.checkpoint import Content

T = HostTensor.of
LARGE = 3 * 1024 * 1024
"""Elements of 8 bytes: 24 MiB, more than one run."""


def arrays() -> dict[str, np.ndarray]:
    base = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    return {
        "plain": base.copy(),
        "view": base[1:, ::2],
        "transposed": base.T,
        "backwards": base[::-1],
        "broadcast": np.broadcast_to(np.float64(3), (2, 2)),
        "0-dim": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.complex128),
        "bool": base > 30,
        "one byte": np.array([5], np.uint8),
        "large": np.arange(LARGE, dtype=np.float64),
        "large, transposed": np.arange(LARGE, dtype=np.float64).reshape(3, -1).T,
    }


def tensors(**given: np.ndarray) -> dict[str, HostTensor]:
    return {name: T(array) for name, array in given.items()}


def frozen(content: dict[str, HostTensor]) -> dict[str, HostTensor]:
    return {name: HostTensor(t.dtype, t.array.copy()) for name, t in content.items()}


@pytest.mark.parametrize("threads", [1, 3])
def test_later_changes_do_not_reach_what_was_captured(threads: int) -> None:
    given, rest, appended = arrays(), arrays(), {"t": np.ones(3, np.float32)}
    content = Content(
        tensors=tensors(**given), rest=tensors(**rest), append_info={"n": 1, **tensors(**appended)}
    )
    want = frozen({**content.tensors}), frozen({**content.rest}), frozen(content.appended)
    captured, give_back = Staging(threads).capture(content)
    for array in (*given.values(), *rest.values(), *appended.values()):
        if array.flags.writeable:
            array[...] = 0
    assert same(captured.tensors, want[0])
    assert same(captured.rest, want[1])
    assert same(captured.appended, want[2])
    assert captured.append_info["n"] == 1
    assert all(tensor.contiguous for tensor in captured.tensors.values())
    give_back()


def test_objects_that_change_later_are_captured_too() -> None:
    state: dict[str, Any] = {"history": [1], "nested": {"lr": 0.1}}
    reasons = [{"what": "dropout"}]
    content = Content(tensors={}, objects=state, skeleton={"dict": [["a", [1]]]}, inexact=tuple(reasons))
    captured, _ = Staging(1).capture(content)
    state["history"].append(2)
    state["nested"]["lr"] = 0.2
    content.skeleton["dict"].clear()
    reasons[0]["what"] = "changed"
    assert captured.objects == {"history": [1], "nested": {"lr": 0.1}}
    assert captured.skeleton == {"dict": [["a", [1]]]}
    assert captured.inexact == ({"what": "dropout"},)


def test_names_types_and_what_is_no_tensor_are_kept() -> None:
    content = Content(
        tensors={"half": T(np.zeros(3, np.uint16), dtype="bfloat16")},
        aliases={"tied": "half"},
        objects={"n": None},
    )
    captured, _ = Staging(1).capture(content)
    assert captured.tensors["half"].dtype.name == "bfloat16"
    assert (captured.aliases, captured.objects) == (content.aliases, content.objects)


def test_memory_is_taken_once_and_used_again() -> None:
    staging, content = Staging(1), Content(tensors=tensors(a=np.ones(10_000)))
    with mock.patch.object(module.mmap, "mmap", wraps=module.mmap.mmap) as taken:
        for _ in range(5):
            _, give_back = staging.capture(content)
            give_back()
        assert taken.call_count == 1
        first, second = staging.capture(content), staging.capture(content)
        assert taken.call_count == 2
        assert not np.shares_memory(first[0].tensors["a"].array, second[0].tensors["a"].array)
        first[1]()
        second[1]()
        staging.close()
        staging.capture(content)
        assert taken.call_count == 3


def test_memory_that_has_become_too_small_is_replaced() -> None:
    staging = Staging(1)
    staging.capture(Content(tensors=tensors(a=np.ones(10))))[1]()
    grown, _ = staging.capture(Content(tensors=tensors(a=np.full(100_000, 7.0))))
    assert np.array_equal(grown.tensors["a"].array, np.full(100_000, 7.0))


def test_nothing_to_capture_takes_a_generation_like_anything_else() -> None:
    captured, give_back = Staging(1).capture(Content(tensors={}))
    assert captured.tensors == {}
    give_back()


def test_a_third_capture_waits_until_an_earlier_one_is_given_back() -> None:
    staging = Staging(1)
    first = np.ones(1000)
    content, give_back = staging.capture(Content(tensors=tensors(a=first)))
    staging.capture(Content(tensors=tensors(a=np.full(1000, 2.0))))
    third: list[Content] = []
    waiting = threading.Thread(
        target=lambda: third.append(staging.capture(Content(tensors=tensors(a=np.full(1000, 3.0))))[0])
    )
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()  # and stays so, however long one looks
    assert np.array_equal(content.tensors["a"].array, first)
    give_back()
    waiting.join()
    assert np.array_equal(third[0].tensors["a"].array, np.full(1000, 3.0))


def test_giving_back_twice_frees_one_generation_only() -> None:
    staging, content = Staging(1), Content(tensors={})
    _, give_back = staging.capture(content)
    staging.capture(content)
    give_back()
    give_back()
    staging.capture(content)
    assert not staging._free.acquire(blocking=False)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["plain", "large"])
def test_an_error_in_a_copy_is_the_captures_and_frees_its_generation(threads: int, name: str) -> None:
    staging, real = Staging(threads), np.copyto
    content = Content(tensors=tensors(**{name: arrays()[name]}))

    def broken(target: np.ndarray, source: np.ndarray) -> None:
        raise MemoryError("no page")

    for _ in range(3):
        with mock.patch.object(module.np, "copyto", broken), pytest.raises(MemoryError, match="no page"):
            staging.capture(content)
    assert np.copyto is real
    captured, _ = staging.capture(content)
    assert same(captured.tensors, content.tensors)
