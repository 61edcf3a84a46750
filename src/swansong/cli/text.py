"""Values as people read them, safe for any terminal."""

from __future__ import annotations

from swansong.store import clock


def printable(text: str) -> str:
    """`text` with everything that is not a visible character escaped, as in a Python string.

    Names come from files. Line ends would break a table, escape sequences do things to a terminal,
    direction marks disguise a name, and lone surrogates (bytes that are not UTF-8) cannot be printed.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: float) -> str:
    """A number of bytes: "600 B", "1.2 MiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    units = ["TiB", "GiB", "MiB", "KiB"]
    while (nbytes := nbytes / 1024) >= 1023.95 and len(units) > 1:
        units.pop()
    return f"{nbytes:,.1f} {units[-1]}"


def moment(seconds: float) -> str:
    """A time, to the second: "2026-03-01T12:03:22Z"; beyond the years 1 to 9999, the seconds since 1970."""
    try:
        return clock.iso(int(seconds)).replace(".000000", "")
    except (ValueError, OverflowError):
        return f"{seconds:.0f} s"


def duration(seconds: float) -> str:
    """A span of time in its largest unit: "45 s", "12 min", "3 h", "5 d". Below zero counts as zero."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds / length):,} {unit}"
    return f"{int(seconds)} s"


def count(number: int, noun: str) -> str:
    """A number of things: "1 tensor", "12 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
