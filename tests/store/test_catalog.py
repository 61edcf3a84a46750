"""What lies in a directory: told from manifests and sizes, whatever else is there and whoever is at work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from store_support import CONTAINERS, KEY, Watched, commit, flip, named, overwrite, tensors
from swansong.errors import MalformedError
from swansong.store import catalog
from swansong.store.catalog import find, scan, sidecars
from swansong.store.manifest import attach_tail, detach_tail
from swansong.store.series import Series


def states(directory: Path) -> dict[str, str]:
    return {found.name: found.state for found in scan(directory)}


def sidecar(path: Path) -> Path:
    (found,) = sidecars(path.parent)[path.name]
    return found


def data_of(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("c*"))


def raw_manifest(path: Path) -> Path:
    return path / "manifest.json" if path.is_dir() else sidecar(path)


def make_newer(path: Path) -> None:
    record = raw_manifest(path)
    body, _ = detach_tail(record.read_bytes(), "m")
    record.write_bytes(attach_tail(body.replace(b"swansong/1", b"swansong/9"), None))


# -- states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_a_committed_checkpoint_is_described_by_its_manifest(
    series: Series, container: str, key: Any
) -> None:
    saved = commit(series, named(container), container=container, key=key, step=17)
    (found,) = scan(series.directory)
    assert (found.path, found.state, found.problem, found.committed) == (saved.path, "committed", None, True)
    assert found.manifest is not None
    assert (found.manifest.id, found.manifest.step, found.nbytes) == (saved.id, 17, saved.nbytes)
    assert found.manifest_path == raw_manifest(saved.path)
    assert find(saved.path) == found


def test_newest_by_seq_comes_first_and_what_has_none_last(series: Series) -> None:
    for number in (3, 1, 2):
        commit(series, named("ckpt", number), container="ckpt", step=number)
    old, new = (series.directory / name for name in ("a.ckpt", "b.ckpt"))
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    assert list(states(series.directory)) == [*(named("ckpt", n) for n in (2, 1, 3)), "b.ckpt", "a.ckpt"]


def test_with_a_series_only_what_is_committed_in_it_is_listed(series: Series) -> None:
    commit(series, named("ckpt"), container="ckpt")
    commit(Series.fresh(series.directory, "run-1", Watched()), "run-1-1_1.ckpt", container="ckpt")
    broken = commit(series, named("ckpt", 2), container="ckpt")
    overwrite(broken.path, b"other")
    assert [found.name for found in scan(series.directory, series="run")] == ["run-1_1.ckpt"]
    assert [found.name for found in scan(series.directory, series="run-1")] == ["run-1-1_1.ckpt"]
    assert scan(series.directory, series="ru") == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_another_size_is_damage_that_says_both(series: Series, container: str) -> None:
    saved = commit(series, named(container), container=container)
    data = data_of(saved.path)
    size = data.stat().st_size
    overwrite(data, data.read_bytes()[:-5])
    (found,) = scan(series.directory)
    assert found.state == "damaged"
    assert f"{size:,}" in (found.problem or "")
    assert f"{size - 5:,}" in (found.problem or "")


@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_a_flipped_bit_in_a_manifest_is_damage_that_names_it(series: Series, container: str) -> None:
    saved = commit(series, named(container), container=container)
    flip(raw_manifest(saved.path))
    (found,) = scan(series.directory)
    assert (found.state, found.manifest) == ("damaged", None)
    assert (found.problem or "").startswith(f"{raw_manifest(saved.path)}: the manifest's own digest is")


def test_a_missing_file_of_several_is_damage_that_names_it(series: Series) -> None:
    saved = commit(series, named("directory"))
    gone = data_of(saved.path)
    gone.unlink()
    single = commit(series, named("ckpt"), container="ckpt", rest=tensors(moment=(3,)))
    rest = next((series.directory / ".swansong").glob("*.rest.safetensors"))
    rest.unlink()
    problems = {found.name: found.problem or "" for found in scan(series.directory)}
    assert f"{gone}: missing" in problems[saved.path.name]
    assert f"{rest}: missing" in problems[single.path.name]


def test_a_file_without_manifest_is_unverified(series: Series) -> None:
    saved = commit(series, named("ckpt"), container="ckpt")
    shutil.copy(saved.path, series.directory / "copy.ckpt")
    shutil.copy(saved.path, series.directory / "copy.safetensors")
    assert states(series.directory) == {
        named("ckpt"): "committed",
        "copy.ckpt": "unverified",
        "copy.safetensors": "unverified",
    }


def test_what_is_being_written_is_incomplete_and_its_lock_is_not_listed(series: Series) -> None:
    with (
        series.space.reserve("run-1_1.ckpt", "aaaaaaaa") as file,
        series.space.reserve("d", "bbbbbbbb") as place,
    ):
        file.write_bytes(bytes(10))
        place.mkdir()
        (place / "x").write_bytes(bytes(20))
        found = {f.name: (f.state, f.nbytes, f.manifest) for f in scan(series.directory)}
    assert found == {
        "aaaaaaaa-run-1_1.ckpt": ("incomplete", 10, None),
        "bbbbbbbb-d": ("incomplete", 20, None),
    }


def test_a_single_file_of_any_name_is_known_by_its_manifest(series: Series) -> None:
    commit(series, "best model\n", container="ckpt")
    (series.directory / "notes.txt").touch()
    assert states(series.directory) == {"best model\n": "committed"}


def test_a_directory_keeps_its_manifest_under_another_name(series: Series) -> None:
    saved = commit(series, named("directory"))
    saved.path.rename(series.directory / "best")
    assert states(series.directory) == {"best": "committed"}


def test_a_newer_format_is_told_and_hides_nothing_else(series: Series) -> None:
    make_newer(commit(series, named("ckpt"), container="ckpt").path)
    make_newer(commit(series, named("directory")).path)
    commit(series, named("ckpt", 2), container="ckpt")
    found = {f.name: f for f in scan(series.directory)}
    assert {name: f.state for name, f in found.items()} == {
        named("ckpt", 2): "committed",
        named("ckpt"): "damaged",
        named("directory"): "damaged",
    }
    assert "written in format swansong/9" in (found[named("ckpt")].problem or "")
    assert "written in format swansong/9" in (found[named("directory")].problem or "")


# -- whatever else lies there ------------------------------------------------------------------------------


def test_links_pipes_and_strangers_are_passed_over(series: Series, tmp_path: Path) -> None:
    commit(series, named("ckpt"), container="ckpt")
    there = series.directory
    (there / "loop.ckpt").symlink_to("loop.ckpt")
    (there / "dangling.ckpt").symlink_to("nowhere")
    os.mkfifo(there / "pipe.ckpt")
    (there / "directory.ckpt").mkdir()
    (there / "strange").mkdir()
    (there / "strange" / "manifest.json").mkdir()
    (there / "2023.json").touch()
    (there / ".swansong" / "nonsense").mkdir()
    (there / ".swansong" / "x.json").touch()
    assert states(there) == {named("ckpt"): "committed"}


def test_a_checkpoint_that_was_moved_and_linked_is_still_one(series: Series, tmp_path: Path) -> None:
    saved = commit(series, named("ckpt"), container="ckpt")
    saved.path.rename(tmp_path / "archive")
    saved.path.symlink_to(tmp_path / "archive")
    assert states(series.directory) == {named("ckpt"): "committed"}


@pytest.mark.parametrize("missing", ["no control directory", "a file for it", "no tmp"])
def test_a_directory_without_control_directory_is_listed(tmp_path: Path, missing: str) -> None:
    (tmp_path / "model.ckpt").touch()
    if missing == "a file for it":
        (tmp_path / ".swansong").touch()
    if missing == "no tmp":
        (tmp_path / ".swansong").mkdir()
    assert states(tmp_path) == {"model.ckpt": "unverified"}


def test_there_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        scan(tmp_path / "file")


@pytest.mark.parametrize("name", ["pipe", "device"])
def test_finding_what_is_no_file_does_not_wait(tmp_path: Path, name: str) -> None:
    path = Path("/dev/zero") if name == "device" else tmp_path / "pipe"
    if name == "pipe":
        os.mkfifo(path)
    with pytest.raises(MalformedError, match="wanted a regular file"):
        find(path)


def test_finding_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find(tmp_path / "missing.ckpt")


def test_a_directory_without_manifest_that_is_asked_for_is_damaged(tmp_path: Path) -> None:
    found = find(tmp_path)
    assert (found.state, found.manifest) == ("damaged", None)
    assert "manifest.json" in (found.problem or "")


# -- whoever is at work ------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_what_goes_while_a_directory_is_read_is_left_out(
    series: Series, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(series, named(container), container=container)
    gone = commit(series, named(container, 2), container=container)

    def sidecars_a_moment_later(directory: Path) -> dict[str, list[Path]]:
        shutil.rmtree(gone.path) if gone.path.is_dir() else gone.path.unlink(missing_ok=True)
        return sidecars(directory)

    monkeypatch.setattr(catalog, "sidecars", sidecars_a_moment_later)
    assert states(series.directory) == {named(container): "committed"}


def test_what_is_finished_while_a_directory_is_read_is_left_out(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    with series.space.reserve("run-1_1.ckpt", "aaaaaaaa") as place:
        place.touch()
        monkeypatch.setattr(catalog, "_size", lambda path: (path.unlink(), path.stat())[1].st_size)
        assert scan(series.directory) == []


def test_a_file_replaced_after_its_manifests_were_listed_is_looked_at_again(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(series, named("ckpt"), container="ckpt")
    listings = []

    def stale_at_first(directory: Path) -> dict[str, list[Path]]:
        listings.append(directory)
        if len(listings) == 1:
            stale = sidecars(directory)
            commit(series, named("ckpt"), seed=2, container="ckpt", append_info={"longer": 1})
            return stale
        return sidecars(directory)

    monkeypatch.setattr(catalog, "sidecars", stale_at_first)
    assert [(found.state, found.manifest.seq) for found in scan(series.directory) if found.manifest] == [
        ("committed", 2)
    ]


def test_a_directory_replaced_after_its_manifest_was_read_is_looked_at_again(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = commit(series, named("directory"))
    stale = [raw_manifest(saved.path).read_bytes()]
    commit(series, named("directory"), seed=2)
    real = catalog.read_manifest
    monkeypatch.setattr(catalog, "read_manifest", lambda path: stale.pop() if stale else real(path))
    assert [(found.state, found.manifest.seq) for found in scan(series.directory) if found.manifest] == [
        ("committed", 2)
    ]
