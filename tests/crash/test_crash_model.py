"""The model of a crash by itself: what it lists for programs of a few operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from crash.crash_model import BLOCK, EXHAUSTIVE, SAMPLES, Tree, crashes
from crash.crash_places import directory_in_memory
from crash.crash_recorder import Recorder

Program = Callable[[Recorder], None]


@pytest.fixture
def files() -> Iterator[Recorder]:
    """A recorder of an empty directory."""
    with directory_in_memory() as root:
        yield Recorder(root)


def after_all(files: Recorder) -> list[Tree]:
    """The states that a crash after the last operation can leave."""
    states = crashes(files.trace, files.initial, seed=1, start=len(files.trace))
    return [crash.tree for crash in states]


def contents(files: Recorder, name: str) -> set[bytes | None]:
    """What a file can contain after a crash; None: it is not there."""
    return {tree.get(name) for tree in after_all(files)}


def put(files: Recorder, descriptor: int, data: bytes, offset: int = 0) -> None:
    files.write(descriptor, np.frombuffer(data, np.uint8), offset)


A, B, ZERO = b"a" * BLOCK, b"b" * BLOCK, bytes(BLOCK)
HALF = BLOCK // 2


def test_before_an_fsync_a_block_is_old_new_zero_or_torn(files: Recorder) -> None:
    descriptor = files.create(files.root / "f")
    put(files, descriptor, A)
    files.sync(descriptor)
    files.sync_directory(files.root)
    assert contents(files, "f") == {A}
    put(files, descriptor, B)
    new_then = {B[:HALF] + other[HALF:] for other in (A, ZERO)}
    then_new = {other[:HALF] + B[HALF:] for other in (A, ZERO)}
    assert contents(files, "f") == {A, B, ZERO} | new_then | then_new
    files.sync(descriptor)
    assert contents(files, "f") == {B}
    files.close(descriptor)


def test_blocks_are_lost_one_by_one_and_a_size_is_any_that_was_passed_through(files: Recorder) -> None:
    descriptor = files.create(files.root / "f")
    files.sync_directory(files.root)
    files.preallocate(descriptor, 3 * BLOCK)
    put(files, descriptor, A + B)
    files.truncate(descriptor, 2 * BLOCK)
    found = contents(files, "f")
    assert {b"", A + B, A + ZERO, ZERO + B, ZERO + ZERO, A + B + ZERO, 3 * ZERO} <= found
    assert {len(content) for content in found if content is not None} == {0, 2 * BLOCK, 3 * BLOCK}
    files.close(descriptor)


def test_a_name_survives_without_content_and_content_without_a_name(files: Recorder) -> None:
    descriptor = files.create(files.root / "f")
    put(files, descriptor, A)
    assert {None, b"", A} <= contents(files, "f")
    files.sync(descriptor)
    assert contents(files, "f") == {None, A}
    files.sync_directory(files.root)
    assert contents(files, "f") == {A}
    files.close(descriptor)


def test_a_rename_is_whole_and_certain_with_the_new_directory(files: Recorder) -> None:
    for name in ("old", "new"):
        files.make_directory(files.root / name)
    files.write_small(files.root / "old" / "f", b"1")
    for name in ("old", "", "new"):
        files.sync_directory(files.root / name)
    files.rename(files.root / "old" / "f", files.root / "new" / "f")
    files.sync_directory(files.root / "old")
    apart: Tree = {"old": None, "new": None}
    assert sorted(map(str, after_all(files))) == sorted(
        [str(apart | {"old/f": b"1"}), str(apart | {"new/f": b"1"})]
    )
    files.sync_directory(files.root / "new")
    assert after_all(files) == [apart | {"new/f": b"1"}]


def test_changes_of_one_name_survive_in_order_and_those_of_others_independently(files: Recorder) -> None:
    for name in ("a", "b"):
        files.write_small(files.root / name, name.encode())
    files.sync_directory(files.root)
    files.unlink(files.root / "a")
    files.write_small(files.root / "a", b"again")
    files.unlink(files.root / "b")
    assert {(tree.get("a"), tree.get("b")) for tree in after_all(files)} == {
        (a, b) for a in (b"a", None, b"again") for b in (b"b", None)
    }


def test_a_later_rename_does_not_survive_an_earlier_one_of_the_same_name(files: Recorder) -> None:
    files.write_small(files.root / "a", b"1")
    files.sync_directory(files.root)
    files.rename(files.root / "a", files.root / "b")
    files.rename(files.root / "b", files.root / "c")
    assert [sorted(tree) for tree in sorted(after_all(files), key=sorted)] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("count", [3, EXHAUSTIVE, EXHAUSTIVE + 4])
def test_every_subset_of_few_names_is_tried_and_a_sample_of_many(files: Recorder, count: int) -> None:
    for number in range(count):
        files.write_small(files.root / str(number), b"")
    subsets = {frozenset(tree) for tree in after_all(files)}
    if count <= EXHAUSTIVE:
        assert len(subsets) == 2**count
    else:
        assert SAMPLES * 0.9 < len(subsets) <= SAMPLES + 2 * count + 2
        assert {frozenset(), frozenset(map(str, range(count)))} <= subsets
        assert all(frozenset({str(number)}) in subsets for number in range(count))


def test_every_prefix_counts_and_what_was_promised_by_then(files: Recorder) -> None:
    files.write_small(files.root / "f", b"1")
    files.returned(1)
    states = list(crashes(files.trace, files.initial, seed=1))
    assert [crash.tree for crash in states if crash.prefix == 0] == [{}]
    assert {crash.returned for crash in states if crash.prefix < len(files.trace)} == {0}
    promised = [crash.tree for crash in states if crash.returned == 1]
    assert {"f": b"1"} in promised
    assert {} in promised  # listed again, now that more is promised: this program breaks its word


def test_what_was_there_before_is_certain(files: Recorder) -> None:
    files.write_small(files.root / "f", b"1")
    again = Recorder(files.root)
    again.unlink(files.root / "f")
    assert sorted(map(len, after_all(again))) == [0, 1]
    assert again.initial.contents
    assert Path(files.root).is_dir()
