"""Choosing what to resume from: by seq, only what verifies, and every one that was passed over is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swansong.errors import SwansongWarning
from swansong.state.tensors import HostTensor
from swansong.store import catalog
from swansong.store.checkpoint import Container, Content, Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer

SUFFIX: dict[Container, str] = {"ckpt": ".ckpt", "safetensors": ".safetensors", "directory": ""}


def commit(series: Series, step: int, container: Container = "ckpt", key: Key | None = None) -> Path:
    content = Content(tensors={"weight": HostTensor.of(np.full(100, step, np.float32))})
    name = f"{series.stem}-1_{step}{SUFFIX[container]}"
    options = SaveOptions(container=container, key=key)
    saved = save(
        series,
        Writer(Files()),
        name,
        content,
        Point(step=step),
        kind="periodic",
        seq=series.draw(),
        options=options,
    )
    return saved.path


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(raw)


def data_file(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("c*.safetensors"))


def test_an_empty_or_missing_directory_has_none(tmp_path: Path) -> None:
    assert choose([tmp_path, tmp_path / "missing"], "run").newest is None


def test_the_highest_seq_wins_over_the_highest_step(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path, "run", Files())
    commit(series, 100)
    resumed = Series.resumed(catalog.find(commit(series, 50)), Files())
    newest = commit(resumed, 60)

    found = choose([tmp_path], "run").newest

    assert found is not None
    assert found.path == newest


@pytest.mark.parametrize("container", ["ckpt", "safetensors", "directory"])
def test_a_damaged_newest_is_passed_over_and_named(tmp_path: Path, container: Container) -> None:
    series = Series.fresh(tmp_path, "run", Files())
    good, bad = commit(series, 1, container), commit(series, 2, container)
    flip(data_file(bad))

    choice = choose([tmp_path], "run")

    assert choice.newest is not None
    assert choice.newest.path == good
    assert [found.path for found, _ in choice.passed_over] == [bad]
    with pytest.warns(SwansongWarning, match=rf"{bad.name} is passed over: .*digest"):
        choice.warn()


def test_older_damaged_ones_are_not_mentioned(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path, "run", Files())
    flip(commit(series, 1))
    commit(series, 2)

    assert choose([tmp_path], "run").passed_over == ()


def test_all_damaged_gives_none_and_names_all(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path, "run", Files())
    paths = [commit(series, step) for step in (1, 2, 3)]
    for path in paths:
        flip(path)

    choice = choose([tmp_path], "run")

    assert choice.newest is None
    assert {found.path for found, _ in choice.passed_over} == set(paths)


def test_a_damaged_manifest_is_named_by_the_files_name(tmp_path: Path) -> None:
    series = Series.fresh(tmp_path, "run", Files())
    good, bad = commit(series, 1), commit(series, 2)
    found = catalog.find(bad)
    assert found.manifest_path is not None
    flip(found.manifest_path)

    choice = choose([tmp_path], "run")

    assert choice.newest is not None
    assert choice.newest.path == good
    assert [f.path for f, _ in choice.passed_over] == [bad]


def test_other_series_and_strangers_do_not_count(tmp_path: Path) -> None:
    mine = commit(Series.fresh(tmp_path, "run", Files()), 1)
    commit(Series.fresh(tmp_path, "run-1", Files()), 2)
    (tmp_path / "run-2023.ckpt").write_bytes(b"a person's")

    choice = choose([tmp_path], "run")

    assert choice.newest is not None
    assert choice.newest.path == mine
    assert choice.passed_over == ()


def test_a_second_directory_counts_by_seq(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    series = Series.fresh(here, "run", Files())
    first = catalog.find(commit(series, 1))
    newest = commit(Series.resumed(first, Files(), directory=there), 2)

    found = choose([here, there], "run").newest

    assert found is not None
    assert found.path == newest


def test_with_a_key_only_what_it_sealed_is_usable(tmp_path: Path) -> None:
    key, other = Key(b"k" * 16), Key(b"o" * 16)
    series = Series.fresh(tmp_path, "run", Files())
    mine = commit(series, 1, key=key)
    commit(series, 2, key=other)
    commit(series, 3)

    choice = choose([tmp_path], "run", key=key)

    assert choice.newest is not None
    assert choice.newest.path == mine
    reasons = [reason for _, reason in choice.passed_over]
    assert any("without one" in reason for reason in reasons)
    assert any("another key" in reason for reason in reasons)
