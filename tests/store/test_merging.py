"""A committer takes some components of some parts: each tensor from where it was told, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from parts_support import NAME, T, write
from store_support import tree
from swansong.errors import SaveError
from swansong.store.checkpoint import Content, Point, Saved
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId, Staged, commit_parts, read_parts, staged
from swansong.store.series import Series
from swansong.store.verify import verify

FIRST, SECOND, OTHER = PartId(0, 1, 0), PartId(0, 2, 0), PartId(0, 2, 1)


def part(**components: int) -> Content:
    """Components of one tensor each, filled with a number; the tensor of component X has an alias."""
    return Content(
        tensors={f"{key}/w": T(np.full(5, value, np.int32)) for key, value in components.items()},
        components={key: [f"{key}/w"] for key in components},
        aliases={"tied": "X/w"} if "X" in components else {},
    )


def make(staging: Staged, wanted: dict[PartId, set[str]]) -> Saved:
    return commit_parts(staging, read_parts(staging, wanted), Point(step=9), kind="fault", seq=5)


def test_each_component_comes_from_the_part_that_was_named(series: Series) -> None:
    with staged(series, NAME) as staging:
        write(staging, part(X=1, Y=1), FIRST)
        write(staging, part(Y=2, Z=2), SECOND)
        write(staging, part(X=3), OTHER)
        wanted = {FIRST: {"X"}, SECOND: {"Y", "Z"}, OTHER: set[str]()}
        saved = make(staging, wanted)
    with open_checkpoint(saved.path) as got:
        assert {name: got.read(name).array[0].item() for name in got.entries} == {
            "X/w": 1,
            "tied": 1,
            "Y/w": 2,
            "Z/w": 2,
        }
    names = [f"c0-{number:05}-{staging.id[:8]}.safetensors" for number in (0, 1)]
    assert sorted(tree(saved.path)) == [*names, "manifest.json"]
    assert verify(saved.path).ok


def test_alias_of_a_component_that_is_not_taken_is_not_there(series: Series) -> None:
    with staged(series, NAME) as staging:
        write(staging, part(X=1, Y=1), FIRST)
        saved = make(staging, {FIRST: {"Y"}})
    with open_checkpoint(saved.path) as got:
        assert set(got.entries) == {"Y/w"}
    assert verify(saved.path).ok


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({FIRST: {"X", "Z"}}, "the part of rank 0 lacks component Z"),
        ({FIRST: {"X"}, OTHER: {"X"}}, "'X/w': 0 and 1 both hold"),
    ],
    ids=["component that is not in it", "component twice"],
)
def test_components_that_do_not_make_a_whole_make_nothing(
    series: Series, wanted: dict[PartId, set[str]], message: str
) -> None:
    with staged(series, NAME) as staging:
        write(staging, part(X=1, Y=1), FIRST)
        write(staging, part(X=3), OTHER)
        with pytest.raises(SaveError, match=message):
            make(staging, wanted)
        assert staging.place.exists()
    assert list(series.directory.glob("run*")) == []


def test_part_without_tensors_gives_what_its_objects_say(series: Series) -> None:
    with staged(series, NAME) as staging:
        write(staging, part(X=1), FIRST)
        write(staging, Content(tensors={}, objects={"seed": 7}), OTHER)
        saved = make(staging, {FIRST: {"X"}, OTHER: set()})
    with open_checkpoint(saved.path) as got:
        assert got.manifest is not None
        assert set(got.manifest.rank_objects) == {"0", "1"}
    assert verify(saved.path).ok
