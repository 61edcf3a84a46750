"""`swansong list`."""

from __future__ import annotations

import json

import pytest

KEYS = [
    "name",
    "path",
    "series",
    "kind",
    "seq",
    "step",
    "epoch",
    "step_in_epoch",
    "bytes",
    "created",
    "state",
]
KEY = b"0123456789abcdef"


def listed(result):
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_json_has_the_documented_keys_newest_first(swansong, shelf):
    shelf.save("net-1_1.ckpt", step=1)
    shelf.save("net-2_1", container="directory", step=2, kind="fault")
    result = swansong("list", shelf.path, "--json")
    newest, oldest = json.loads(result.stdout)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert [list(newest), list(oldest)] == [KEYS, KEYS]
    assert oldest["name"] == "net-1_1.ckpt"
    assert newest == {
        "name": "net-2_1",
        "path": str(shelf.path / "net-2_1"),
        "series": "net",
        "kind": "fault",
        "seq": 2,
        "step": 2,
        "epoch": 3,
        "step_in_epoch": 20,
        "bytes": sum(p.stat().st_size for p in (shelf.path / "net-2_1").glob("c0-*")),
        "created": newest["created"],
        "state": "committed",
    }
    assert newest["created"].endswith("Z")


def test_what_no_manifest_vouches_for_has_nulls_and_comes_last(swansong, shelf):
    shelf.foreign("other.ckpt")
    shelf.save("net-1_1.ckpt")
    result = swansong("list", shelf.path, "--json")
    last = json.loads(result.stdout)[-1]
    assert result.exit_code == 0
    assert last["name"], last["state"] == ("other.ckpt", "unverified")
    assert {name for name in KEYS if last[name] is None} == {
        *("series", "kind", "seq", "step", "epoch", "step_in_epoch", "created")
    }


def test_truncated_file_is_damaged(swansong, shelf):
    shelf.save("net-1_1.ckpt")
    shelf.truncate("net-1_1.ckpt")
    result = swansong("list", shelf.path, "--json")
    assert result.exit_code == 1
    assert listed(result)["net-1_1.ckpt"]["state"] == "damaged"


@pytest.mark.parametrize(
    ("options", "state", "code"),
    [((), "committed", 0), (("--verify",), "damaged", 1)],
    ids=["sizes only", "bytes read"],
)
def test_flipped_bit_shows_when_bytes_are_read(swansong, shelf, options, state, code):
    shelf.save("net-1_1.ckpt")
    shelf.flip("net-1_1.ckpt")
    result = swansong("list", shelf.path, "--json", *options)
    assert result.exit_code == code
    assert listed(result)["net-1_1.ckpt"]["state"] == state


def test_unfinished_save_is_incomplete_and_no_problem(swansong, shelf):
    shelf.save("net-1_1.ckpt")
    (shelf.path / ".swansong" / "tmp" / "0123abcd-net-2_1.ckpt").write_bytes(b"half")
    result = swansong("list", shelf.path, "--json", "--verify")
    assert result.exit_code == 0
    assert listed(result)["0123abcd-net-2_1.ckpt"]["state"] == "incomplete"


def test_empty_directory_is_an_empty_document_and_a_problem(swansong, shelf):
    result = swansong("list", shelf.path, "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [])
    assert result.stderr == f"swansong: {shelf.path}: no checkpoints there\n"


@pytest.mark.parametrize("name", ["net-1_1", "net-1_1.ckpt"])
def test_a_checkpoint_instead_of_a_directory_is_wrong_use(swansong, shelf, name):
    shelf.save(name, container="ckpt" if name.endswith("ckpt") else "directory")
    result = swansong("list", shelf.path / name)
    assert result.exit_code == 2
    assert "swansong inspect" in result.stderr


def test_another_key_is_reported_but_is_no_damage(swansong, shelf, key_file):
    shelf.save("net-1_1", container="directory", key=KEY)
    shelf.save("net-2_1.ckpt", key=KEY)
    shelf.flip("net-2_1.ckpt")
    result = swansong("list", shelf.path, "--verify", "--json", "--key-file", key_file(b"another key here"))
    assert result.exit_code == 1
    assert {name: row["state"] for name, row in listed(result).items()} == {
        "net-1_1": "committed",
        "net-2_1.ckpt": "damaged",
    }
    assert "another key" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_key_without_verify_is_said_to_be_useless(swansong, shelf, key_file):
    shelf.save("net-1_1.ckpt", key=KEY)
    result = swansong("list", shelf.path, "--key-file", key_file(KEY))
    assert result.exit_code == 0
    assert "without --verify" in result.stderr


def test_table_elsewhere_than_in_a_terminal_is_whole_and_plain(swansong, shelf):
    name = "net-" + "long" * 40 + ".ckpt"
    shelf.save(name)
    shelf.foreign("other.ckpt")
    result = swansong("list", shelf.path)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0].split() == ["NAME", "KIND", "SEQ", "STEP", "EPOCH", "SIZE", "CREATED", "STATE"]
    assert lines[1].split()[:5] == [name, "periodic", "1", "100", "3/20"]
    assert lines[1].endswith("committed")
    assert lines[2].split()[0] == "other.ckpt"
    assert lines[2].endswith("unverified")
    assert all(line.isprintable() and line == line.rstrip() for line in lines)


def test_table_says_what_is_wrong_with_the_damaged(swansong, shelf):
    shelf.save("net-1_1.ckpt")
    shelf.truncate("net-1_1.ckpt")
    result = swansong("list", shelf.path)
    assert result.exit_code == 1
    assert "net-1_1.ckpt: not the committed content: it has 100 bytes" in result.stdout


ODD = {
    "line end": "two\nlines.ckpt",
    "escape sequence": "\x1b[31mred\x1b[0m.ckpt",
    "not UTF-8": "byte-\udc80.ckpt",
    "markup": "[bold red]not red.ckpt",
    "markup that is wrong": "[red on.ckpt",
    "emoji code": ":smile:.ckpt",
    "right to left": "\u202egnp.ckpt",
}


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_odd_name_breaks_neither_table_nor_document(swansong, shelf, name):
    shelf.foreign("plain.ckpt").rename(shelf.path / name)
    table = swansong("list", shelf.path)
    rows = table.stdout.splitlines()
    assert len(rows) == 2
    assert all(row.isprintable() for row in rows)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    assert rows[1].startswith(shown)
    [row] = json.loads(swansong("list", shelf.path, "--json").stdout)
    assert row["name"] == name
