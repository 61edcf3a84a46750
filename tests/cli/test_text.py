"""Values as people read them."""

from __future__ import annotations

import pytest

from swansong.cli import text


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 * 1024**4, "3.0 TiB"),
        (5000 * 1024**4, "5,000.0 TiB"),
    ],
)
def test_size(nbytes, shown):
    assert text.size(nbytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 3, "3 d")],
)
def test_duration(seconds, shown):
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.9, "1970-01-01T00:00:00Z"), (1e9, "2001-09-09T01:46:40Z"), (1e15, "1000000000000000 s")],
)
def test_moment(seconds, shown):
    assert text.moment(seconds) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain é 名 ok", "plain é 名 ok"),
        ("a\tb\r\n", r"a\tb\r\n"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("\udcff", r"\udcff"),
        ("\u200b\u202e", r"\u200b\u202e"),
    ],
    ids=["visible", "white space", "escape", "one-character escape", "not UTF-8", "invisible"],
)
def test_printable(name, shown):
    assert text.printable(name) == shown
