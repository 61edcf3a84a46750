"""One rank's live state, as the processor's thread sees it: clocks, boundary records, and saving them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swansong.engine.clock import Clock, Gate, GateState, Reading, held
from swansong.engine.processor import StateMovedError
from swansong.engine.recorders import HostRecorders
from swansong.engine.samples import sampled_digest
from swansong.engine.watchdog import Watchdog
from swansong.errors import ClockNotReadableError, SaveError
from swansong.persist import places
from swansong.persist.committer import GENERATION
from swansong.persist.loading import structures
from swansong.persist.rank_files import RankFiles
from swansong.persist.records import Records, as_objects, recorded_on
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, Fault, FaultKind
from swansong.state.tree import Flat
from swansong.store import parts
from swansong.store.checkpoint import Content
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.parts import PartId
from swansong.store.writer import Writer

_STACK: Final = 8000
"""Characters of a stack that are reported: its end."""


@dataclass(frozen=True, slots=True)
class LiveComponent:
    """A component that this rank holds."""

    label: str
    """For people."""
    clock: Clock
    """Its `key` is the component's."""
    show: Callable[[], Flat]
    """Shows the tensors in place, and the structure that they stand in (None: just their names); called in
    other threads than the one that trains, too."""
    behind: Callable[[], bool] | None = None
    """True: it may lack something of its step that other ranks have, so theirs are preferred. Likewise."""

    @property
    def nbytes(self) -> int:
        """Bytes that saving it writes."""
        return sum(tensor.nbytes for tensor in self.show().tensors.values())


class LiveRank:
    """The `Rank` of `engine.processor` for a training loop in this process."""

    def __init__(
        self,
        rank: int,
        components: tuple[LiveComponent, ...],
        records: Records,
        gate: Gate,
        watchdog: Watchdog,
        host: HostRecorders,
        *,
        directory: Path,
        stem: str,
        key: Key | None,
        rank_files: RankFiles | None = None,
        on_outcome: Callable[[m.Release], None],
        on_depart: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`host` has the records of this host's ranks. The callables are called in the processor's thread:
        `say` is for people.
        """
        self._rank, self._components, self._records, self._host = rank, components, records, host
        self._gate, self._watchdog = gate, watchdog
        self._directory, self._stem, self._key, self._rank_files = directory, stem, key, rank_files
        self._on_outcome, self._on_depart, self._say = on_outcome, on_depart, say
        self._main = threading.get_ident()
        self._digests: dict[str, tuple[Reading, str]] = {}
        self._stack: str | None = None
        """Of the main thread, since the gate was closed."""
        self.ended = ""
        """How the main thread's training ended, in words, once it has: nothing moves any more."""

    # -- the gate -------------------------------------------------------------------------------------

    def close_gate(self) -> None:
        """See Rank."""
        self._gate.close()
        self._watchdog.hold(time.monotonic())

    def open_gate(self) -> None:
        """See Rank."""
        self._stack = None
        self._watchdog.go_on(time.monotonic())
        self._gate.open()

    # -- where it stands ------------------------------------------------------------------------------

    def read_state(self) -> m.StateRead:
        """See Rank."""
        state: dict[str, Held] = {}
        for component in self._components:
            with suppress(ClockNotReadableError):  # it is said again, and again, until it is
                state[component.clock.key] = self._held(component)
        at_boundary = len(state) == len(self._components) and all(
            held.step == self._records.reached for held in state.values()
        )
        return m.StateRead(
            held=state,
            settled=at_boundary or (bool(self.ended) and len(state) == len(self._components)),
            boundary=self._records.last_step,
            main=self._doing(),
            stack=self._main_stack(),
        )

    def watch(self, now: float) -> Fault | None:
        """See Rank."""
        what = self._watchdog.stalled(now)
        if what is None or self.ended:
            return None
        self._watchdog.acknowledge()
        return self.fault(FaultKind.STALLED, what)

    def fault(self, kind: FaultKind, what: str, *, trace: str = "") -> Fault:
        """A fault of this rank, now."""
        step = self._records.reached
        return Fault(kind=kind, rank=self._rank, what=what[:1000], traceback=trace[-_STACK:], step=step)

    def _held(self, component: LiveComponent) -> Held:
        def values() -> str:
            if component.behind is not None and component.behind():
                return ""  # who cannot say its values counts only where nobody can: see policy.cut
            reading = component.clock.read()
            known = self._digests.get(component.clock.key)
            if known is None or known[0] != reading:
                digest = sampled_digest(component.show().tensors)
                known = self._digests[component.clock.key] = reading, digest
            return known[1]

        return held(component.clock, values)

    def _doing(self) -> str:
        if self.ended:
            return self.ended
        if self._gate.state() is GateState.PARKED:
            return "waits at the gate"
        if phases := self._watchdog.phases:
            return f"in phase {phases[-1]}"
        return f"in step {self._records.reached + 1}"

    def _main_stack(self) -> str:
        if self._stack is None:
            frame = sys._current_frames().get(self._main)
            lines = traceback.format_stack(frame) if frame is not None else []
            self._stack = "".join(lines)[-_STACK:]
        return self._stack

    # -- saving ---------------------------------------------------------------------------------------

    def save(self, order: m.StartSave, progress: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """See Rank."""
        chosen = [component for component in self._components if component.clock.key in order.keys]
        if len(chosen) != len(order.keys):
            raise SaveError(f"rank {self._rank} holds {len(chosen)} of {len(order.keys)} components")

        def confirm() -> None:
            for component in chosen:
                if component.clock.read().step != order.step:
                    raise StateMovedError(f"{component.label} is not at step {order.step} any more")

        confirm()
        as_files = self._rank_files if chosen else None
        writer = Writer(Counted(progress, stopped))
        try:
            parts.write_part(
                places.staging(self._directory, self._stem, order.incident),
                places.checkpoint_id(order.incident),
                writer,
                self._content(chosen, order.step),
                PartId(GENERATION, order.attempt, self._rank),
                key=self._key,
                container="directory" if as_files is None else "ckpt",
                mode="AES-GCM" if as_files is None else as_files.mode,
                confirm=confirm,
            )
        finally:
            writer.close()

    def _content(self, components: list[LiveComponent], step: int) -> Content:
        shown = {component.clock.key: component.show() for component in components}
        records = recorded_on(self._host, step)
        own = self._records.best(step)
        if own is not None:
            records[self._rank] = own
        as_files = self._rank_files
        content = Content(
            tensors={name: tensor for flat in shown.values() for name, tensor in flat.tensors.items()},
            aliases={alias: name for flat in shown.values() for alias, name in flat.aliases.items()},
            components={key: list(flat.tensors) for key, flat in shown.items()},
            skeleton=structures({key: flat.skeleton for key, flat in shown.items()}),
            objects=as_objects(records, step, tensors=as_files is None),
        )
        if as_files is None or not components:
            return content
        return as_files.whole(content, records, step, self._rank)

    # -- how it ends ----------------------------------------------------------------------------------

    def wake(self, release: m.Release) -> None:
        """See Rank."""
        if release.action is Action.STOP:
            self._gate.interrupt(release)
            self._on_outcome(release)
        elif release.path:
            self._say(f"an incident ({release.cause.value}) was saved in {release.path}; training goes on")
        elif release.reason:
            self._say(f"an incident ({release.cause.value}) was not saved: {release.reason}")

    def depart(self) -> None:
        """See Rank."""
        self._on_depart()

    def unprotected(self, reason: str) -> None:
        """See Rank."""
        self._say(f"training is not protected any more, only periodic checkpoints are left: {reason}")


class Counted(Files):
    """Files that tell how much was written, and stop when it is not wanted any more."""

    def __init__(self, progress: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        """`progress` takes bytes in total, from any thread; `stopped` is asked before each write."""
        self._progress, self._stopped = progress, stopped
        self._written = 0
        self._lock = threading.Lock()

    def write(self, descriptor: int, data: NDArray[np.uint8], offset: int) -> None:
        """See Files. Raises SaveError if stopped."""
        if self._stopped():
            raise SaveError("not wanted any more")
        super().write(descriptor, data, offset)
        with self._lock:
            self._written += len(data)
            self._progress(self._written)
