"""Verifying: every problem is told, all at once, and nothing else is called one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from store_support import CONTAINERS, KEY, OTHER_KEY, commit, flip, named, overwrite, tensors
from swansong.errors import CheckpointNotFoundError, LoadError, MalformedError, SwansongWarning
from swansong.store import catalog
from swansong.store import verify as module
from swansong.store.catalog import Found
from swansong.store.manifest import attach_tail, decode, detach_tail, encode
from swansong.store.series import Series
from swansong.store.verify import Problem, check, usable, verify

LARGE = {"tensors": tensors(w=(5_000_000,), b=(7,))}
"""Two pieces."""


def record_of(path: Path) -> Path:
    return path / "manifest.json" if path.is_dir() else catalog.sidecars(path.parent)[path.name][0]


def data_of(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("c*"))


def about(problems: tuple[Problem, ...]) -> set[str]:
    return {Path(problem.path).name for problem in problems}


# -- sound -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_sound_checkpoint_has_every_byte_read(series: Series, container: str, key: Any) -> None:
    if key is not None and container == "safetensors":
        key = None
    rest = {} if container == "directory" else {"rest": tensors(moment=(3,))}
    saved = commit(series, named(container), container=container, key=key, **LARGE, **rest)
    steps: list[int] = []
    for given in {None, key}:
        steps.clear()
        report = verify(saved.path, key=given, progress=steps.append)
        assert (report.ok, report.problems, report.checkpoints) == (True, (), 1)
        assert report.checked_bytes == saved.nbytes == sum(steps)
        assert report.authenticated is (None if given is None else True)
    assert len(steps) >= 2


def test_a_directory_of_checkpoints_is_checked_one_by_one(series: Series) -> None:
    saved = [
        commit(series, named(container, n), container=container, key=key)
        for n, (container, key) in enumerate(
            [("ckpt", None), ("ckpt", KEY), ("safetensors", None), ("directory", None), ("directory", KEY)]
        )
    ]
    told: list[tuple[str, int]] = []
    report = verify(
        series.directory, checked=lambda found, problems: told.append((found.name, len(problems)))
    )
    assert report.ok
    assert (report.checkpoints, report.checked_bytes) == (5, sum(s.nbytes for s in saved))
    assert told == [(s.path.name, 0) for s in reversed(saved)]


def test_what_has_no_manifest_or_is_not_finished_is_no_problem(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt").path
    shutil.copy(path, path.with_name("alone.ckpt"))
    with series.space.reserve("x.ckpt", "deadbeef") as place:
        place.write_bytes(b"half")
        report = verify(series.directory)
    assert (report.ok, report.checkpoints) == (True, 2)


def test_an_encrypted_file_without_manifest_tells_nothing_without_its_key(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt", key=KEY).path
    alone = Path(shutil.copy(path, path.with_name("alone.ckpt")))
    assert (verify(alone).problems, verify(alone).unverified, verify(alone).ok) == ((), 1, False)
    with pytest.warns(SwansongWarning, match="no manifest vouches"):
        report = verify(alone, key=KEY)
    assert (report.problems, report.authenticated) == ((), False)
    assert verify(alone, key=OTHER_KEY).problems


# -- damaged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["without key", "with key"])
@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_every_damaged_piece_is_told_by_file_offset_and_tensor(
    series: Series, container: str, key: Any
) -> None:
    saved = commit(series, named(container), container=container, key=key, **LARGE)
    data = data_of(saved.path)
    flip(data, 9_000)
    flip(data, (1 << 24) + 9)
    for given in {None, key}:
        report = verify(saved.path, key=given)
        assert [(p.path, p.file, p.offset) for p in report.problems] == [
            (str(saved.path), str(data), 0),
            (str(saved.path), str(data), 1 << 24),
        ]
        assert report.checked_bytes == 0
        assert report.authenticated is (None if given is None else False)
        if given == key:
            assert {p.tensor for p in report.problems} <= {"w", "b"}
        assert "committed was" in report.problems[0].what


def test_every_problem_of_a_directory_is_listed_at_once(series: Series) -> None:
    path = {n: commit(series, named("ckpt", n), container="ckpt").path for n in range(6)}
    native = {n: commit(series, named("directory", n)).path for n in range(10, 14)}
    flip(path[1])
    overwrite(path[2], b"another tool's")
    flip(record_of(path[3]))
    with record_of(path[4]).open("r+b") as file:
        file.truncate(50)
    flip(data_of(native[10]))
    data_of(native[11]).unlink()
    flip(native[12] / "manifest.json")
    (series.directory / "foreign.ckpt").write_bytes(b"nonsense")
    (series.directory / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    report = verify(series.directory)
    assert about(report.problems) == {
        *(path[n].name for n in (1, 2, 3, 4)),
        *(native[n].name for n in (10, 11, 12)),
        *("foreign.ckpt", "cut.safetensors"),
    }
    assert len(report.problems) == 9
    assert report.checkpoints == 12
    assert all(problem.what for problem in report.problems)
    assert verify(path[0]).ok


def test_several_files_of_one_checkpoint_are_all_checked(series: Series) -> None:
    saved = commit(series, named("ckpt"), container="ckpt", rest=tensors(moment=(9,)))
    (rest,) = (series.directory / ".swansong").glob("*.rest.*")
    flip(saved.path)
    flip(rest, rest.stat().st_size - 1)
    report = verify(saved.path)
    assert [(problem.file, problem.tensor) for problem in report.problems] == [
        (str(saved.path), "weight"),
        (str(rest), "moment"),
    ]


def test_a_newer_format_and_a_mode_that_is_not_read_are_problems_like_others(series: Series) -> None:
    newer = commit(series, named("ckpt"), container="ckpt").path
    body, _ = detach_tail(record_of(newer).read_bytes(), "m")
    record_of(newer).write_bytes(attach_tail(body.replace(b"swansong/1", b"swansong/2"), None))
    sm4 = series.directory / "sm4.ckpt"
    sm4.write_bytes((0x7F3A5EDA).to_bytes(4, "little") + bytes(100))
    sound = commit(series, named("ckpt", 2), container="ckpt").path
    report = verify(series.directory, key=KEY)
    assert about(report.problems) == {newer.name, sm4.name, sound.name}
    assert about(verify(series.directory).problems) == {newer.name}


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_foreign_file_is_checked_for_its_structure(series: Series, suffix: str) -> None:
    container = suffix[1:]
    path = commit(series, named(container), container=container).path
    alone = Path(shutil.copy(path, path.with_name(f"alone{suffix}")))
    assert not verify(alone).problems
    content = alone.read_bytes()
    overwrite(alone, content[:-1])
    (problem,) = verify(alone).problems
    assert problem.file == str(alone)


def test_a_foreign_file_with_a_crc_is_compared_with_it(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt", crc=True).path
    alone = Path(shutil.copy(path, path.with_name("alone.ckpt")))
    flip(alone)
    assert "CRC-32" in verify(alone).problems[0].what


# -- keys --------------------------------------------------------------------------------------------------

ENCRYPTED = [
    {"container": "ckpt", "key": KEY},
    {"container": "ckpt", "key": KEY, "mode": "AES-CBC"},
    {"container": "directory", "key": KEY},
]


@pytest.mark.parametrize("how", ENCRYPTED, ids=["GCM", "CBC", "directory"])
def test_with_a_key_it_is_proved_that_everything_was_sealed_with_it(
    series: Series, how: dict[str, Any]
) -> None:
    path = commit(series, named(how["container"]), **how).path
    assert [verify(path, key=key).authenticated for key in (None, KEY)] == [None, True]
    report = verify(path, key=OTHER_KEY)
    assert (report.ok, report.authenticated) == (False, False)
    assert [(problem.about_key, "another key" in problem.what) for problem in report.problems] == [
        (True, True)
    ]


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_was_saved_without_a_key_is_not_authenticated_by_one(series: Series, container: str) -> None:
    path = commit(series, named(container), container=container).path
    report = verify(path, key=KEY)
    assert (report.ok, report.authenticated) == (False, False)
    (problem,) = report.problems
    assert problem.about_key
    assert "nothing proves who wrote it" in problem.what


def test_damage_is_told_besides_a_key_that_does_not_fit(series: Series) -> None:
    path = commit(series, named("directory"), key=KEY).path
    flip(data_of(path))
    report = verify(path, key=OTHER_KEY)
    assert [problem.about_key for problem in report.problems] == [True, False]
    assert report.problems[1].file == str(data_of(path))


def test_one_unverified_file_among_sealed_ones_is_not_authenticated(series: Series) -> None:
    commit(series, named("directory"), key=KEY)
    assert verify(series.directory, key=KEY).authenticated is True
    alone = commit(series, named("ckpt"), container="ckpt", key=KEY).path
    record_of(alone).unlink()
    with pytest.warns(SwansongWarning):
        assert verify(series.directory, key=KEY).authenticated is False


def test_sealed_bytes_are_decrypted_not_only_digested(
    series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Digests are no proof: whoever can make other bytes of the same digest must not pass.
    path = commit(series, named("directory"), key=KEY).path
    record = decode(record_of(path).read_bytes(), "m", KEY)
    flip(data_of(path))
    digest = xxhash.xxh3_128_hexdigest(data_of(path).read_bytes())
    files = [msgspec.structs.replace(record.files[0], digests=[digest])]
    forged = msgspec.structs.replace(record, files=files, key=None)
    record_of(path).write_bytes(encode(forged, KEY))
    assert verify(path).ok
    report = verify(path, key=KEY)
    assert (report.ok, report.authenticated) == (False, False)
    assert "does not authenticate" in report.problems[0].what


# -- whatever a path may be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["missing", "empty directory", "strangers only"])
def test_where_there_is_nothing_to_check_that_is_said(tmp_path: Path, what: str) -> None:
    path = tmp_path / "d"
    if what != "missing":
        path.mkdir()
    if what == "strangers only":
        (path / "notes.txt").touch()
        os.mkfifo(path / "pipe.ckpt")
        (path / "loop.ckpt").symlink_to("loop.ckpt")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint there"):
        verify(path)


def test_a_pipe_is_not_waited_for_and_a_loop_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(MalformedError, match="wanted a regular file"):
        verify(tmp_path / "pipe")
    with pytest.raises(LoadError, match="cannot be read: Too many levels"):
        verify(tmp_path / "loop")


# -- others at work ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("what", ["pruned", "replaced"])
def test_what_is_pruned_or_replaced_meanwhile_is_no_problem(
    series: Series, container: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (commit(series, named(container, n), container=container) for n in (1, 2))
    real, changed = module._check, []

    def change(found: Found, *arguments: Any) -> Any:
        if found.path == first.path and not changed:
            changed.append(found)
            if what == "replaced":
                commit(series, first.path.name, seed=5, container=container)
            else:
                shutil.rmtree(first.path) if first.path.is_dir() else first.path.unlink()
                series.sweep()
        return real(found, *arguments)

    monkeypatch.setattr(module, "_check", change)
    report = verify(series.directory)
    assert changed
    assert report.problems == ()
    assert report.checked_bytes >= second.nbytes


def test_usable_is_none_or_what_is_wrong(series: Series) -> None:
    path = commit(series, named("ckpt"), container="ckpt", key=KEY).path
    found = catalog.find(path)
    assert [usable(found), usable(found, KEY)] == [None, None]
    assert "another key" in (usable(found, OTHER_KEY) or "")
    flip(path)
    assert "damaged" in (usable(found) or "")
    alone = Path(shutil.copy(path, path.with_name("alone.ckpt")))
    assert usable(catalog.find(alone)) == "no manifest vouches for it"


def test_checking_one_entry_gives_bytes_and_problems(series: Series) -> None:
    saved = commit(series, named("directory"))
    assert check(catalog.find(saved.path)) == (saved.nbytes, [])
