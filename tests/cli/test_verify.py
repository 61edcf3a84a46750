"""`swansong verify`."""

from __future__ import annotations

import json

import pytest

KEY = b"0123456789abcdef"


def test_sound_directory_is_ok(swansong, shelf):
    stored = [
        shelf.save("net-1_1.ckpt").nbytes,
        shelf.save("net-2_1", container="directory").nbytes,
        shelf.save("net-3_1.safetensors", container="safetensors").nbytes,
    ]
    result = swansong("verify", shelf.path, "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "ok": True,
        "checked_bytes": sum(stored),
        "checkpoints": 3,
        "authenticated": None,
        "problems": [],
    }


@pytest.mark.parametrize("container", ["ckpt", "directory"])
def test_flipped_bit_is_named_by_file_offset_and_tensor(swansong, shelf, container):
    shelf.save("net-1_1", container=container)
    [data] = shelf.path.glob("net-1_1/c0-*") if container == "directory" else [shelf.path / "net-1_1"]
    shelf.flip(str(data))
    result = swansong("verify", shelf.path / "net-1_1", "--json")
    document = json.loads(result.stdout)
    [problem] = document["problems"]
    assert result.exit_code == 1
    assert document["ok"] is False
    assert list(problem) == ["path", "file", "offset", "tensor", "what"]
    assert problem["path"] == str(shelf.path / "net-1_1")
    assert problem["file"] == str(data)
    assert problem["offset"] == 0
    assert problem["tensor"] == "conv1.weight"
    assert "digest" in problem["what"]


def test_where_nothing_can_be_verified_not_everything_is_fine(swansong, shelf):
    path = shelf.foreign("other.ckpt")
    result = swansong("verify", path)
    assert result.exit_code == 1
    assert result.stdout.startswith("unverified ")
    assert "1 unverified;" in result.stdout


def test_cut_file_without_manifest_is_damaged(swansong, shelf):
    shelf.foreign("other.ckpt")
    result = swansong("verify", shelf.truncate("other.ckpt"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["problems"][0]["file"] == str(shelf.path / "other.ckpt")


def test_one_line_per_checkpoint_then_the_verdict(swansong, shelf):
    shelf.save("net-1_1.ckpt")
    shelf.save("net-2_1.ckpt")
    shelf.flip("net-1_1.ckpt")
    result = swansong("verify", shelf.path)
    first, second, what, verdict = result.stdout.splitlines()
    assert result.exit_code == 1
    assert first.split()[0::3] == ["ok", "net-2_1.ckpt"]
    assert second.split()[0::3] == ["damaged", "net-1_1.ckpt"]
    assert what.startswith("    damaged: the ")
    assert verdict.startswith("1 ok, 1 damaged; ")
    assert verdict.endswith("/s)")


@pytest.mark.parametrize("container", ["ckpt", "directory"])
@pytest.mark.parametrize(
    ("key", "authenticated", "code"),
    [(None, None, 0), (KEY, True, 0), (b"another key here", False, 1)],
    ids=["no key", "the key", "another key"],
)
def test_authenticated_only_with_the_key(swansong, shelf, key_file, container, key, authenticated, code):
    saved = shelf.save("net-1_1", container=container, key=KEY)
    options = () if key is None else ("--key-file", key_file(key))
    result = swansong("verify", saved.path, "--json", *options)
    document = json.loads(result.stdout)
    assert result.exit_code == code
    assert document["authenticated"] is authenticated
    assert document["checked_bytes"] == saved.nbytes


def test_a_key_for_what_was_saved_without_is_unproven_not_damaged(swansong, shelf, key_file):
    shelf.save("net-1_1.ckpt")
    result = swansong("verify", shelf.path, "--key-file", key_file(KEY))
    assert result.exit_code == 1
    assert result.stdout.startswith("unproven ")
    assert result.stdout.splitlines()[-1].endswith("; not all authenticated")


def test_a_file_in_another_cipher_mode_is_not_called_damaged(swansong, shelf, key_file):
    path = shelf.foreign("other.ckpt", key=KEY, mode="AES-CBC")
    result = swansong("verify", path, "--key-file", key_file(KEY))
    assert not result.stdout.startswith("damaged ")


def test_damage_is_found_though_the_key_does_not_fit(swansong, shelf, key_file):
    shelf.save("net-1_1.ckpt", key=KEY)
    shelf.flip("net-1_1.ckpt")
    result = swansong("verify", shelf.path, "--key-file", key_file(b"another key here"))
    assert result.exit_code == 1
    assert result.stdout.startswith("damaged ")


@pytest.mark.parametrize("name", ["", "missing"])
def test_nothing_to_verify_is_a_problem(swansong, shelf, name):
    result = swansong("verify", shelf.path / name)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.endswith("no checkpoint there\n")
