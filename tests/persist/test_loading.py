"""The checkpoint that was found sound is the one that is loaded, and is not read again to be sure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store_support import KEY, OTHER_KEY, commit, flip, named, same, tensors
from swansong.errors import KeyNeededError, LoadError
from swansong.persist.loading import Kept, fill
from swansong.state.tensors import HostTensor
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.opening import Checkpoint
from swansong.store.series import Series
from swansong.store.source import PlainFile


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return Series.fresh(tmp_path / "checkpoints", "run", Files())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def newest(series: Series, kept: Kept, key: Any = None) -> Path | None:
    choice = choose([series.directory], "run", key=key, examine=kept.examine)
    return choice.newest.path if choice.newest is not None else None


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_what_was_chosen_is_what_is_loaded_although_it_was_replaced(series: Series, key: Any) -> None:
    path = commit(series, named("directory"), seed=1, key=key).path
    before = descriptors()
    with Kept() as kept:
        assert newest(series, kept, key) == path
        commit(series, named("directory"), seed=2, key=key)
        assert same(kept.open(path, key).read_all(), tensors(1))
    assert descriptors() == before


def test_a_damaged_one_is_passed_over_and_closed(series: Series) -> None:
    commit(series, named("directory", 1), seed=1)
    damaged = commit(series, named("directory", 2), seed=2).path
    flip(next(damaged.glob("c*")))
    before = descriptors()
    with Kept(Checkpoint.map_all) as kept:
        path = newest(series, kept)
        assert path == series.directory / named("directory", 1)
        assert same(kept.open(path, None).map_all(), tensors(1))
    assert descriptors() == before


def test_mapped_it_is_read_from_its_file_once_at_most(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"w": HostTensor.of(np.arange(9_000_000, dtype=np.float32))}
    path = commit(series, named("directory"), tensors=content).path
    read = []
    real = PlainFile.read_into

    def read_into(self: PlainFile, offset: int, out: Any) -> None:
        read.append(len(out))
        real(self, offset, out)

    monkeypatch.setattr(PlainFile, "read_into", read_into)
    with Kept(Checkpoint.map_all) as kept:
        assert newest(series, kept) == path
        assert same(kept.open(path, None).map_all(), content)
    assert sum(read) == 0


def test_another_path_is_opened(series: Series) -> None:
    one, other = (commit(series, named("directory", n), seed=n).path for n in (1, 2))
    with Kept() as kept:
        assert newest(series, kept) == other
        assert same(kept.open(one, None).read_all(), tensors(1))


def test_a_wrong_key_passes_it_over_and_a_missing_one_is_asked_for(series: Series) -> None:
    path = commit(series, named("directory"), key=KEY).path
    with Kept() as kept:
        assert newest(series, kept, OTHER_KEY) is None
        assert newest(series, kept) == path
        with pytest.raises(KeyNeededError):
            kept.open(path, None)


def test_live_memory_is_filled_only_if_everything_fits(series: Series) -> None:
    path = commit(series, named("directory")).path
    live = {name: HostTensor.of(tensor.array * 0) for name, tensor in tensors().items()}
    with Kept() as kept:
        checkpoint = kept.open(path, None)
        with pytest.raises(LoadError, match=r"it lacks \['more'\]"):
            fill(live | {"more": live["bias"]}, checkpoint, "me", nothing_else=True)
        with pytest.raises(LoadError, match=r"has \['bias'\] besides"):
            fill({"weight": live["weight"]}, checkpoint, "me", nothing_else=True)
        assert not live["weight"].array.any()
        assert fill(live, checkpoint, "me", nothing_else=True) == {}
    assert same(live, tensors())
