"""A tensor in host memory, as adapters hand it over: a type, a shape, and where the elements lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from swansong.errors import UnrepresentableError
from swansong.state.dtypes import DTYPES, DType


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor's elements in place: nothing is copied until a writer gathers them.

    `array` has the tensor's shape and the carrier type of `dtype` (uint16 for bfloat16, say); it may have
    any strides. Whoever keeps a HostTensor sees later changes of the memory that it shows.
    """

    dtype: DType
    array: NDArray[np.generic]

    @classmethod
    def of(cls, array: NDArray[np.generic], *, dtype: str | None = None, name: str = "tensor") -> Self:
        """Show a NumPy array as a tensor.

        `dtype` names the logical type when NumPy has none (array then holds the bits: uint16 for
        "bfloat16"). Raises UnrepresentableError for element types without a fixed binary form.
        """
        wanted = DTYPES.get(array.dtype.name if dtype is None else dtype)
        if wanted is None:
            raise UnrepresentableError(
                f"{name}: elements of type {array.dtype if dtype is None else dtype} cannot be stored; "
                f"wanted one of {', '.join(DTYPES)}"
            )
        if array.dtype.itemsize != wanted.itemsize:
            raise UnrepresentableError(
                f"{name}: {wanted.name} has {wanted.itemsize} bytes per element, "
                f"the array given has {array.dtype.itemsize}"
            )
        if array.dtype.byteorder == ">":
            array = array.byteswap()
        if array.dtype != wanted.carrier:
            array = array.view(wanted.carrier)
        return cls(wanted, array)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.array.shape

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.array.shape) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the elements lie in row-major order without gaps."""
        return bool(self.array.flags.c_contiguous)

    def bytes_view(self) -> NDArray[np.uint8]:
        """The elements as a flat uint8 view of the same memory. Only for contiguous tensors."""
        return self.array.reshape(-1).view(np.uint8)
