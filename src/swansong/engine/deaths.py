"""Tells when a rank's process on this host ends, at once, whatever still keeps its connection open."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from swansong.engine.processes import host_name, open_process
from swansong.protocol.messages import Member


class Deaths:
    """Processes that are watched, one per rank, with a pidfd (pidfd_open(2)) in somebody's selector."""

    def __init__(self, selector: selectors.BaseSelector, died: Callable[[int], None]) -> None:
        """`died(rank)` is called once for each process that ends."""
        self._selector, self._died = selector, died
        self._host = host_name()
        self._descriptors: dict[int, int] = {}

    def watch(self, member: Member) -> bool:
        """Watch the process of a rank, if it is on this host; False if it should be, and is not there.

        OSError if the kernel cannot watch it: out of descriptors.
        """
        if member.host != self._host or member.rank in self._descriptors:
            return True
        descriptor = open_process(member.pid, member.start_time)
        if descriptor is None:
            return False
        self._descriptors[member.rank] = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, lambda _: self._ended(member.rank))
        return True

    def close(self) -> None:
        """Watch nobody any more."""
        for rank in list(self._descriptors):
            self._forget(rank)

    def _ended(self, rank: int) -> None:
        self._forget(rank)
        self._died(rank)

    def _forget(self, rank: int) -> None:
        descriptor = self._descriptors.pop(rank)
        self._selector.unregister(descriptor)
        os.close(descriptor)
