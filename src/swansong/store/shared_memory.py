"""Staging memory that another process can map: anonymous files of `memfd_create`, passed by descriptor.

Not of /dev/shm, whose size limit kills with SIGBUS whoever touches a page over it. The pages are reserved
before anything is mapped, so too little memory is an error here. A forked child inherits neither the mapping
nor the descriptor: it may outlive this process, and would keep the memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FAILED: Final = ctypes.c_void_p(-1).value
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Allocates such memory, and knows of an array which block it lies in."""

    def __init__(self) -> None:
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """Zeroed memory of `size` bytes, at least 1, freed with its last array. Raises OSError."""
        block = Block(size)
        self._blocks.add(block)
        return np.asarray(block)

    def block_of(self, array: NDArray[np.generic]) -> Block | None:
        """The block that `array`, which is not empty, lies in."""
        return next((block for block in list(self._blocks) if block.offset_of(array) is not None), None)

    def forget(self) -> None:
        """In a forked child: let go of the descriptors. The arrays must not be touched any more."""
        for block in list(self._blocks):
            block.forget()
        self._blocks.clear()


class Block:
    """One such memory, mapped here."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("swansong-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(self.descriptor, 0, size)
            except OSError as error:
                # "No space left on device" would send its reader to look at a disk.
                reason = f"no memory for {size:,} bytes to copy the state to: {error.strerror}"
                raise OSError(errno.ENOMEM, reason) from error
            # Nobody can cut it short under the other's mapping, which would be a SIGBUS there.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._address = _map(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._end = weakref.finalize(self, _release, self.descriptor, self._address, size)
        self._end.atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For NumPy, whose arrays keep this object alive."""
        return {"version": 3, "shape": (self.size,), "typestr": "|u1", "data": (self._address, False)}

    def offset_of(self, array: NDArray[np.generic]) -> int | None:
        """Where in the block `array` begins, in bytes; None: elsewhere."""
        offset = int(array.__array_interface__["data"][0]) - self._address
        return offset if offset >= 0 and offset + array.nbytes <= self.size else None

    def forget(self) -> None:
        """See SharedMemory.forget."""
        if self._end.detach() is not None:
            os.close(self.descriptor)


def mapped_for_reading(descriptor: int, size: int) -> NDArray[np.uint8]:
    """Another process's block, read-only, until the last array that shows it is gone. Raises OSError."""
    return np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)


def _map(descriptor: int, size: int) -> int:
    # Not by `mmap.mmap`: that keeps a descriptor of its own, which a forked child could not close.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"staging memory cannot be mapped: {os.strerror(code)}")
    libc.madvise(address, size, mmap.MADV_DONTFORK)
    return int(address)


def _release(descriptor: int, address: int, size: int) -> None:
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.munmap(address, size)
    os.close(descriptor)
