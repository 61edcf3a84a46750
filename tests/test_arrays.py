"""Plain arrays in one process, without a controller: periodic checkpoints, resuming, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import swansong.arrays
from swansong import CheckpointConfig
from swansong.arrays import Run
from swansong.errors import (
    ConfigError,
    DamagedError,
    KeyNeededError,
    LoadError,
    NotSupportedError,
    SaveError,
    SwansongWarning,
)
from swansong.errors import UnrepresentableError as Unrepresentable
from swansong.store import catalog
from swansong.store.opening import open_checkpoint

EVERY_2 = CheckpointConfig(save_checkpoint_steps=2, keep_checkpoint_max=2)


def protected(arrays: dict[str, Any], directory: Path, **given: Any) -> Run:
    return swansong.arrays.protect(arrays, directory=directory, prefix="model", **given)


def train(run: Run, array: np.ndarray[Any, Any], until: int) -> None:
    while run.step < until:
        with run.update():
            array += run.step + 1
        run.step_end(seen=[run.step])


def steps(directory: Path) -> list[tuple[int, str]]:
    manifests = [found.manifest for found in catalog.scan(directory)]
    return [(manifest.step, manifest.kind) for manifest in manifests if manifest is not None]


def test_saved_by_policy_and_at_the_end_and_resumed_in_place(tmp_path: Path) -> None:
    array = np.zeros((3, 4), np.float32)
    with protected({"w": array}, tmp_path, config=EVERY_2) as run:
        assert run.resume() == 0
        train(run, array, 5)
    assert steps(tmp_path) == [(5, "final"), (4, "periodic")]

    again = np.zeros((3, 4), np.float32)
    with protected({"w": again}, tmp_path, config=EVERY_2) as run:
        assert (run.resume(), run.objects) == (5, {"seen": [4]})
        assert np.array_equal(again, array)
        train(run, again, 6)
    assert steps(tmp_path) == [(6, "final"), (5, "final")]
    assert {path.name for path in (tmp_path / ".swansong").iterdir()} == {"model.lock", "tmp"}


def test_an_exception_passes_and_nothing_is_saved_without_a_controller(tmp_path: Path) -> None:
    array = np.zeros(3)

    def fail() -> None:
        with protected({"w": array}, tmp_path, config=EVERY_2) as run:
            train(run, array, 3)
            raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        fail()
    assert steps(tmp_path) == [(2, "periodic")]


def test_a_step_without_an_update_counts(tmp_path: Path) -> None:
    with protected({"w": np.zeros(3)}, tmp_path) as run:
        run.step_end()
        assert run.step == 1


def test_a_fresh_start_in_an_occupied_directory_is_a_new_stem(tmp_path: Path) -> None:
    array = np.zeros(3)
    for _ in range(2):
        with protected({"w": array}, tmp_path, config=EVERY_2) as run:
            train(run, array, 1)
    assert {found.name for found in catalog.scan(tmp_path)} == {"model-1", "model_1-1"}


def test_objects_are_those_of_the_boundary_whatever_becomes_of_them(tmp_path: Path) -> None:
    seen = [1]
    with protected({"w": np.zeros(3)}, tmp_path, config=EVERY_2) as run:
        run.step_end(seen=seen)
        seen.append(2)
        path = run.save()
    assert path is not None
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.objects["objects"] == {"seen": [1]}


def test_with_a_key_nothing_can_be_read_without_it(tmp_path: Path) -> None:
    array = np.zeros(3)
    with protected({"w": array}, tmp_path, config=EVERY_2, key=bytes(32)) as run:
        train(run, array, 1)
    with pytest.raises(KeyNeededError, match="encrypted"), protected({"w": array}, tmp_path) as run:
        run.resume()
    with protected({"w": np.zeros(3)}, tmp_path, key=bytes(32)) as run:
        assert run.resume() == 1


def test_nothing_usable_is_an_error_unless_a_fresh_start_is_allowed(tmp_path: Path) -> None:
    array = np.zeros(3)
    with protected({"w": array}, tmp_path, config=EVERY_2) as run:
        train(run, array, 1)
    (data,) = (tmp_path / "model-1").glob("*.safetensors")
    data.chmod(0o600)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="allow_fresh"), protected({"w": array}, tmp_path) as run:
        run.resume()
    with protected({"w": array}, tmp_path) as run, pytest.warns(SwansongWarning, match="passed over"):
        assert run.resume(allow_fresh=True) == 0


@pytest.mark.parametrize(
    "arrays",
    [
        {"v": np.zeros(3)},
        {"w": np.zeros(4)},
        {"w": np.zeros(3, np.float32)},
        {"w": np.zeros(3), "v": np.zeros(3)},
    ],
    ids=["name", "shape", "dtype", "one more"],
)
def test_a_checkpoint_of_other_arrays_is_refused_and_nothing_is_changed(
    tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]]
) -> None:
    trained = np.zeros(3)
    with protected({"w": trained}, tmp_path, config=EVERY_2) as run:
        train(run, trained, 1)
    with pytest.raises(LoadError, match=r"does not fit|wanted"), protected(arrays, tmp_path) as run:
        run.resume()
    assert all(not array.any() for array in arrays.values())


FROZEN = np.zeros(3)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"arrays": {}}, ConfigError),
        ({"arrays": {"w": [1.0]}}, ConfigError),
        ({"arrays": {"w": FROZEN}}, ConfigError),
        ({"arrays": {"w": np.zeros(3, ">f4")}}, ConfigError),
        ({"arrays": {"w": np.array(["a"])}}, Unrepresentable),
        ({"rank": -2}, ConfigError),
        ({"rank": 1}, ConfigError),
        ({"world_size": 0}, ConfigError),
        ({"world_size": 2}, ConfigError),
        ({"ttp": "127.0.0.1:70000"}, ConfigError),
        ({"ttp": "2000"}, ConfigError),
        ({"world_size": 2, "incarnation": bytes(16), "config": EVERY_2}, NotSupportedError),
    ],
    ids=[
        "no arrays",
        "no array",
        "read-only",
        "byte order",
        "no numbers",
        "negative rank",
        "rank too high",
        "no ranks",
        "no incarnation",
        "port",
        "no host",
        "split and periodic",
    ],
)
def test_what_cannot_be_is_refused_at_once(
    tmp_path: Path, given: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"wanted|cannot be (stored|read)|replicas"):
        protected(**{"arrays": {"w": np.zeros(3)}, "directory": tmp_path, **given})


@pytest.mark.parametrize("late", ["resume", "update"])
def test_what_comes_out_of_order_is_refused(tmp_path: Path, late: str) -> None:
    with protected({"w": np.zeros(3)}, tmp_path) as run:
        with run.update():
            pass
        with pytest.raises(ConfigError, match=late):
            run.resume() if late == "resume" else run.update().__enter__()


def test_what_needs_a_controller_or_a_config_says_so(tmp_path: Path) -> None:
    with protected({"w": np.zeros(3)}, tmp_path) as run:
        with pytest.raises(NotSupportedError, match="ttp"):
            run.persist_and_stop()
        with pytest.raises(NotSupportedError, match="config"):
            run.save()
        with pytest.raises(Unrepresentable, match="strange"):
            run.step_end(strange=object())


def test_a_final_save_that_fails_is_raised(tmp_path: Path) -> None:
    array = np.zeros(3)

    def fail() -> None:
        with protected({"w": array}, tmp_path, config=EVERY_2) as run:
            train(run, array, 1)
            (tmp_path / ".swansong" / "tmp").rmdir()

    with pytest.raises(SaveError, match="model-1"):
        fail()
    assert steps(tmp_path) == []


def test_an_orderly_exit_in_the_loop_is_an_end_like_any_other(tmp_path: Path) -> None:
    array = np.zeros(3)

    def leave() -> None:
        with protected({"w": array}, tmp_path, config=EVERY_2) as run:
            train(run, array, 1)
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert steps(tmp_path) == [(1, "final")]
