"""`swansong inspect`."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from swansong.store import manifest

KEY = b"0123456789abcdef"
OWN_KEYS = {"path", "state", "problem", "bytes", "encrypted", "sealed", "tensors"}
MANIFEST_KEYS = {
    *("format", "id", "name", "container", "series", "stem", "seq", "kind", "run", "parent", "step"),
    *("boundary_step", "epoch", "step_in_epoch", "world_size", "created", "software", "files"),
    *("components", "aliases", "objects", "rank_objects", "append_info", "inexact"),
}
TENSORS = [
    {"name": "conv1.weight", "dtype": "float32", "shape": [6, 1, 5, 5], "bytes": 600},
    {"name": "global_step", "dtype": "int32", "shape": [], "bytes": 4},
    {"name": "empty", "dtype": "float64", "shape": [0, 3], "bytes": 0},
]


def by_name(tensors):
    return sorted(tensors, key=lambda tensor: tensor["name"])


@pytest.mark.parametrize("container", ["ckpt", "safetensors", "directory"])
def test_json_is_the_manifest_without_digests_and_the_tensors(swansong, shelf, container):
    saved = shelf.save("net-3_20", container=container, append_info={"epoch_num": 3})
    result = swansong("inspect", saved.path, "--json")
    about = json.loads(result.stdout)
    assert result.exit_code == 0
    assert set(about) == OWN_KEYS | MANIFEST_KEYS
    assert about["id"] == saved.id
    assert about["state"] == "committed"
    assert (about["seq"], about["step"], about["epoch"], about["step_in_epoch"]) == (1, 100, 3, 20)
    assert about["append_info"] == {"epoch_num": 3}
    assert [list(file) for file in about["files"]] == [["name", "size", "piece", "scheme"]]
    assert by_name(about["tensors"]) == by_name(TENSORS)


@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_sealed_shows_public_facts_without_the_key_and_all_with_it(swansong, shelf, key_file, container):
    saved = shelf.save("net-3_20", container=container, key=KEY, append_info={"secret": 5})
    without = swansong("inspect", saved.path, "--json")
    about = json.loads(without.stdout)
    assert without.exit_code == 0
    assert (about["encrypted"], about["sealed"], about["step"]) == (True, True, 100)
    assert about["tensors"] is about["append_info"] is about["software"] is None
    assert "--key-file shows it" in swansong("inspect", saved.path).stdout
    about = json.loads(swansong("inspect", saved.path, "--json", "--key-file", key_file(KEY)).stdout)
    assert (about["encrypted"], about["sealed"]) == (True, False)
    assert about["append_info"] == {"secret": 5}
    assert by_name(about["tensors"]) == by_name(TENSORS)


def test_another_key_is_refused(swansong, shelf, key_file):
    saved = shelf.save("net-3_20", container="directory", key=KEY)
    result = swansong("inspect", saved.path, "--key-file", key_file(b"another key here"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "another key" in result.stderr


@pytest.mark.parametrize("name", ["other.ckpt", "other.safetensors"])
def test_unverified_file_shows_its_tensors_and_nulls(swansong, shelf, name):
    path = shelf.foreign(name, container=name.partition(".")[2])
    result = swansong("inspect", path, "--json")
    about = json.loads(result.stdout)
    assert result.exit_code == 0
    assert set(about) == OWN_KEYS | MANIFEST_KEYS
    assert about["state"] == "unverified"
    assert {key for key in MANIFEST_KEYS if about[key] is not None} <= {"append_info"}
    assert by_name(about["tensors"]) == by_name(TENSORS)


def test_encrypted_unverified_file_needs_the_key(swansong, shelf, key_file):
    path = shelf.foreign("other.ckpt", key=KEY)
    about = json.loads(swansong("inspect", path, "--json").stdout)
    assert (about["encrypted"], about["sealed"], about["tensors"]) == (True, True, None)
    result = swansong("inspect", path, "--json", "--key-file", key_file(KEY))
    assert by_name(json.loads(result.stdout)["tensors"]) == by_name(TENSORS)
    assert result.stderr.startswith("swansong: warning: ")
    assert result.stderr.count("\n") == 1


def test_values_that_json_lacks_are_tagged(swansong, shelf):
    saved = shelf.save("net-3_20", container="directory", append_info={"loss": float("nan"), "lr": 0.1})
    about = json.loads(swansong("inspect", saved.path, "--json").stdout, parse_constant=pytest.fail)
    assert about["append_info"] == {"loss": {"float": "nan"}, "lr": 0.1}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("int8", (2**62,) * 50_000), ("int8", (-1, 3)), ("int3", (2,))],
    ids=["dimensions", "negative", "type"],
)
def test_tensor_that_cannot_be_has_no_size(swansong, shelf, dtype, shape):
    saved = shelf.save("net-3_20", container="directory", arrays={"w": np.zeros(2, np.int8)})
    path = saved.path / "manifest.json"
    sound = manifest.decode(path.read_bytes(), "")
    tensors = {"w": msgspec.structs.replace(sound.tensors["w"], dtype=dtype, shape=shape)}
    path.unlink()
    path.write_bytes(manifest.encode(msgspec.structs.replace(sound, tensors=tensors), None))
    result = swansong("inspect", saved.path, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["tensors"][0]["bytes"] is None
    assert swansong("inspect", saved.path).stdout.endswith("1 tensor, 0 elements, 0 B\n")


def test_directory_without_a_data_file_is_damaged_but_described(swansong, shelf):
    saved = shelf.save("net-3_20", container="directory")
    [data] = saved.path.glob("c0-*")
    data.unlink()
    result = swansong("inspect", saved.path, "--json")
    about = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (about["state"], about["step"]) == ("damaged", 100)
    assert "missing" in about["problem"]


def test_a_directory_of_checkpoints_is_wrong_use(swansong, shelf):
    shelf.save("net-3_20.ckpt")
    result = swansong("inspect", shelf.path)
    assert result.exit_code == 2
    assert "try 'swansong list'" in result.stderr


@pytest.mark.parametrize("name", ["net-3_20.ckpt", "missing.ckpt"], ids=["cut", "missing"])
def test_what_is_no_checkpoint_is_one_line_on_stderr(swansong, shelf, name):
    shelf.save("net-3_20.ckpt")
    shelf.truncate("net-3_20.ckpt")
    result = swansong("inspect", shelf.path / name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"swansong: {shelf.path / name}: ")
    assert result.stderr.count("\n") == 1


def test_page_has_facts_tensors_and_totals(swansong, shelf):
    saved = shelf.save(
        "net-3_20",
        container="directory",
        kind="fault",
        append_info={"lr": 0.1},
        aliases={"tied.weight": "conv1.weight"},
        inexact=({"what": "generator", "reason": "not saved"},),
    )
    result = swansong("inspect", saved.path)
    lines = result.stdout.splitlines()
    facts = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}
    assert result.exit_code == 0
    assert lines[0] == "net-3_20  committed"
    assert facts["kind"] == "fault, seq 1 of series net"
    assert facts["step"] == "100 (epoch 3, step 20 in it)"
    assert facts["content"].startswith("directory, 1 file, ")
    assert facts["appended"] == "lr 0.1"
    assert facts["inexact"] == "what: generator, reason: not saved"
    assert facts["conv1.weight"].split("  ") == ["float32", "[6, 1, 5, 5]", "600 B"]
    assert facts["tied.weight"] == "is tied to conv1.weight"
    assert lines[-1] == "3 tensors, 151 elements, 604 B"


def test_page_elsewhere_than_in_a_terminal_shows_every_tensor(swansong, shelf):
    names = [f"{'layer.' * 20}{i}" for i in range(60)]
    saved = shelf.save("net-3_20", container="directory", arrays={n: np.zeros(2, np.int8) for n in names})
    shown = swansong("inspect", saved.path).stdout.split()
    assert set(names) <= set(shown)


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2Jclear", "[red]w[/red]", "\u202ew"], ids=ascii)
def test_odd_tensor_name_stays_in_its_row(swansong, shelf, name):
    saved = shelf.save("net-3_20", container="directory", arrays={name: np.zeros(2, np.int8)})
    page = swansong("inspect", saved.path).stdout
    assert all(line.isprintable() for line in page.splitlines())
    assert any(line.endswith("  int8   [2]     2 B") for line in page.splitlines())
    about = json.loads(swansong("inspect", saved.path, "--json").stdout)
    assert about["tensors"][0]["name"] == name
