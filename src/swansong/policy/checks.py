"""Checks of numbers and bounded descriptions of refused values, shared by policies and configuration."""

from __future__ import annotations

import math
import reprlib
from numbers import Integral
from operator import index

from swansong.errors import ConfigError


def whole_number(name: str, value: object, *, least: int = 1, wanted: str = "a positive int") -> int:
    """Return an int or NumPy integer as an int of at least `least`.

    bool is refused, and so are NumPy's durations, which call themselves integers. Raises ConfigError, which
    says that argument `name` should be what `wanted` says.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        try:
            number = index(value)
        except TypeError:
            number = least - 1
        if number >= least:
            return number
    raise ConfigError(f"{name}: wanted {wanted}, got {shown(value)}")


def positive_number(name: str, value: object) -> float:
    """Return a finite number above 0: a float as it is, anything else by the rule of `whole_number`."""
    if isinstance(value, float) and math.isfinite(value) and value > 0:
        return float(value)
    return whole_number(name, value, wanted="a positive number")


class _Short(reprlib.Repr):
    """Bounded in breadth and depth. Bytes may be a key put in the wrong place, so they are only counted."""

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, bytes | bytearray | memoryview):
            return f"<{len(x)} bytes>"
        if isinstance(x, int) and x.bit_length() > 1024:
            return f"<{x.bit_length()} bits>"
        return super().repr1(x, level)


def brief(value: object) -> str:
    """Return a `repr` of at most 200 characters, whatever `value` is, in which bytes are only counted."""
    text = _Short().repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def shown(value: object) -> str:
    """Describe a refused value for a message: as much of it as is short and no secret, and its type."""
    return f"{brief(value)} ({type(value).__name__})"
