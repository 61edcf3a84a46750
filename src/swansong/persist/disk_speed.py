"""Saying at the start of a job that its state could not be written in time, should it come to that.

A launcher ends a job some seconds after a fault. Whether the state is on disk by then depends on how much one
host has to write and how fast its disk is: the first is known once the world is complete, the second is
measured, on rank 0's host, and taken to be the same elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from swansong.errors import SaveError
from swansong.policy import cut
from swansong.policy.cut import Held, Report
from swansong.protocol import messages as m
from swansong.protocol.options import ProtocolOptions
from swansong.state.components import Component, WorldMap
from swansong.store.checkpoint import new_id, short
from swansong.store.crypt import Key
from swansong.store.layout import Layout, Segment
from swansong.store.saving import native_protection
from swansong.store.workspace import Workspace
from swansong.store.writer import Writer

SLOW: Final = 50_000_000
"""Bytes a second. What even a disk as slow as this could write in time is not worth measuring."""
SIZES: Final = (4 << 20, 16 << 20, 64 << 20)
"""Bytes of the files that are written to measure, one after another until one took `LONG_ENOUGH_S`."""
LONG_ENOUGH_S: Final = 0.25

_JOIN_S: Final = 2.0
_NAME: Final = "speed"


def bytes_of_a_host(world: Sequence[m.Member]) -> int:
    """The most that one host has to write if all ranks are there to save. Pure."""
    components = {
        member.rank: tuple(Component(c.key, c.label, c.nbytes) for c in member.components) for member in world
    }
    reports = {
        rank: Report(rank, {component.key: Held(0) for component in held})
        for rank, held in components.items()
    }
    whole = WorldMap(components)
    decision = cut.choose(whole, reports)
    hosts = {member.rank: member.host for member in world}
    load: Counter[str] = Counter()
    if isinstance(decision, cut.Cut):
        for key, rank in decision.savers.items():
            load[hosts[rank]] += whole.components[key].nbytes
    return max(load.values(), default=0)


def too_slow(nbytes: int, bytes_per_s: float, options: ProtocolOptions) -> str | None:
    """What to warn of if a host cannot write `nbytes` within the budget; None if it can, or if there is none.

    Pure.
    """
    left_s = options.writing_s
    needed_s = nbytes / bytes_per_s
    if left_s is None or needed_s <= left_s:
        return None
    return (
        f"the state would not be saved in time at a fault: one host has {nbytes:,} bytes to write, which "
        f"takes {needed_s:,.1f} s at the {bytes_per_s / 1e6:,.0f} MB/s that were measured, and of the budget "
        f"of {options.budget_s:g} s only {left_s:,.1f} s are left for it. Use a faster disk, spread the "
        "state over more hosts, let the launcher wait longer (and raise budget_s), or count on periodic "
        "checkpoints"
    )


def measure(space: Workspace, key: Key | None) -> float:
    """How many bytes a second a checkpoint is written with, durably, encrypted if there is a key.

    Takes up to about a second and 84 MiB of disk, which are free again afterwards. Raises SaveError, OSError.
    """
    chunk = np.random.default_rng().bytes(SIZES[0])
    writer = Writer(space.files)
    size, took_s = 0, 0.0
    try:
        for size in SIZES:
            layout = Layout.of([Segment(chunk)] * (size // len(chunk)))
            with space.reserve(_NAME, short(new_id())) as place:
                began = time.monotonic()
                writer.write(place, layout, native_protection(key).encoding)
                took_s = time.monotonic() - began
            if took_s >= LONG_ENOUGH_S:
                break
    finally:
        writer.close()
    return size / max(took_s, 1e-9)


class SpeedCheck:
    """Measures once, beside the training loop, and warns if need be."""

    def __init__(
        self, options: ProtocolOptions, measure: Callable[[], float], say: Callable[[str], object]
    ) -> None:
        """`measure` returns bytes a second, and is called in a thread of its own, as is `say`, for people."""
        self._options, self._measure, self._say = options, measure, say
        self._over = options.writing_s is None
        self._thread: threading.Thread | None = None

    def look(self, world: Sequence[m.Member]) -> None:
        """Begin, once the world is complete (until then it is empty). Does not wait."""
        if self._over or not world:
            return
        self._over = True
        nbytes = bytes_of_a_host(world)
        if too_slow(nbytes, SLOW, self._options) is not None:
            self._thread = threading.Thread(
                target=self._check, args=(nbytes,), name="swansong-speed", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Wait a moment for the end of what was begun; a disk may hang."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _check(self, nbytes: int) -> None:
        try:
            warning = too_slow(nbytes, self._measure(), self._options)
        except (SaveError, OSError) as error:
            warning = f"whether {nbytes:,} bytes can be saved in time could not be measured: {error}"
        if warning is not None:
            self._say(warning)
