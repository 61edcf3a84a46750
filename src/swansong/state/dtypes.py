"""Element types, by one name each.

The canonical names are those of NumPy and ml_dtypes ("float32", "bfloat16"). Containers translate them to
their own spelling. Types that NumPy lacks travel as unsigned integers of the same size, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """Canonical name."""
    carrier: np.dtype[np.generic]
    """The little-endian NumPy type whose items have the same size and bytes."""
    exact: bool
    """True if `carrier` also means the same values; False if it only carries the bits."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.carrier.itemsize


def _table() -> dict[str, DType]:
    exact = {
        "bool": "?",
        "int8": "i1",
        "int16": "<i2",
        "int32": "<i4",
        "int64": "<i8",
        "uint8": "u1",
        "uint16": "<u2",
        "uint32": "<u4",
        "uint64": "<u8",
        "float16": "<f2",
        "float32": "<f4",
        "float64": "<f8",
        "complex64": "<c8",
        "complex128": "<c16",
    }
    carried = {
        "bfloat16": "<u2",
        "float8_e4m3fn": "u1",
        "float8_e5m2": "u1",
        "float8_e4m3fnuz": "u1",
        "float8_e5m2fnuz": "u1",
        "float8_e8m0fnu": "u1",
    }
    table = {name: DType(name, np.dtype(code), True) for name, code in exact.items()}
    table.update({name: DType(name, np.dtype(code), False) for name, code in carried.items()})
    return table


DTYPES: Final = _table()
"""Canonical name -> DType."""
