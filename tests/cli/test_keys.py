"""Key files."""

from __future__ import annotations

import os
import threading

import pytest
import typer

from swansong.cli.keys import read_key
from swansong.errors import SwansongWarning

RAW = bytes(range(100, 132))


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (RAW[:16], RAW[:16]),
        (RAW[:24], RAW[:24]),
        (RAW, RAW),
        (RAW[:15] + b"\n", RAW[:15] + b"\n"),
        (b"0123456789abcdef", b"0123456789abcdef"),
        (b"0123456789abcdef01234567", b"0123456789abcdef01234567"),
        (RAW[:16].hex().encode() + b"\n", RAW[:16]),
        (RAW[:16].hex().upper().encode() + b"\r\n", RAW[:16]),
        (RAW[:24].hex().encode(), RAW[:24]),
        (RAW.hex().encode() + b"\n", RAW),
        (RAW.hex().encode(), RAW),
    ],
    ids=[
        *(
            "16 raw",
            "24 raw",
            "32 raw",
            "raw with a line end as its last byte",
            "16 raw digits",
            "24 raw digits",
        ),
        *("hex of 16", "upper-case hex", "hex of 24 alone", "hex of 32", "hex of 32 alone"),
    ],
)
def test_key_file_is_raw_or_hexadecimal(key_file, content, key):
    assert read_key(key_file(content)).material == key


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "found 0 bytes"),
        (RAW[:16] + b"\n", "found 17 bytes, the last of them a newline"),
        (b"0x" + RAW[:16].hex().encode(), "found 34 bytes"),
        (RAW[:16].hex().encode(), "add a newline if they are hexadecimal"),
        (b"\n" + RAW[:16].hex().encode() + b"\n", "found 34 bytes"),
        (bytes(5000), "found 1024 or more bytes"),
    ],
    ids=["empty", "raw and a line end", "0x", "32 digits alone", "line end first", "endless"],
)
def test_anything_else_is_wrong_use_and_not_shown(swansong, tmp_path, key_file, content, says):
    result = swansong("verify", tmp_path, "--key-file", key_file(content))
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("swansong: Invalid value for --key-file: ")
    assert result.stderr.count("\n") == 1
    assert RAW[:8].hex() not in result.output
    assert repr(RAW[:8])[2:-1] not in result.output


@pytest.mark.parametrize("name", ["missing", "."])
def test_unreadable_key_file_is_wrong_use(swansong, tmp_path, name):
    result = swansong("verify", tmp_path, "--key-file", tmp_path / name)
    assert result.exit_code == 2
    assert str(tmp_path / name) in result.stderr


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400], ids=oct)
def test_private_key_file_is_not_warned_of(key_file, mode):
    assert read_key(key_file(RAW, mode)) is not None


def test_key_file_that_everybody_can_read_is_warned_of(key_file):
    with pytest.warns(SwansongWarning, match="every user of this machine can read this key"):
        read_key(key_file(RAW, 0o644))


def test_key_may_come_through_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o644)
    writer = threading.Thread(target=path.write_bytes, args=(RAW,))
    writer.start()
    assert read_key(path).material == RAW
    writer.join()


def test_no_file_is_no_key():
    assert read_key(None) is None


def test_refusal_is_a_usage_error(key_file):
    with pytest.raises(typer.BadParameter):
        read_key(key_file(b"short"))
