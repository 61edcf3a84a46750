"""What stands beside a training loop so that its state survives: gate, processor, signals, controller."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import ssl
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from swansong.engine.address import Address
from swansong.engine.clock import Gate, interrupted_by
from swansong.engine.processes import host_name, start_time
from swansong.engine.processor import LOOK_S, ProcessorThread
from swansong.engine.recorder import Recorder
from swansong.engine.signals import SignalWatch, reraise_sigterm
from swansong.engine.tls import TlsFiles, client_tls
from swansong.engine.watchdog import StallOptions, Watchdog
from swansong.errors import SwansongError, SwansongWarning
from swansong.persist import disk_speed, places
from swansong.persist.disk_speed import SpeedCheck
from swansong.persist.job import SeriesFacts
from swansong.persist.launch import Configuration, Dialer, Launcher
from swansong.persist.rank import LiveComponent, LiveRank
from swansong.persist.records import RecordPlaces, Records
from swansong.protocol import messages as m
from swansong.protocol.handshake import Token
from swansong.protocol.messages import FaultKind
from swansong.protocol.options import ProtocolOptions
from swansong.protocol.processor import Processor
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.workspace import Workspace

EXIT_STUCK: Final = 75
"""Exit code of a process whose main thread did not end after an incident (EX_TEMPFAIL of sysexits.h)."""

_POLL_S: Final = 0.2
_ATTEND_S: Final = 0.05
"""How often the training loop looks up at most: some microseconds, which very short steps would feel."""
_CONTROLLER_EXIT_S: Final = 5.0
"""How long the end of training waits for a controller that this process started, so that none is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a rank's protection is made of."""

    address: Address
    """Of the controller."""
    token: Token
    incarnation: bytes
    rank: int
    world_size: int
    directory: Path
    """Of the checkpoints, absolute."""
    series: SeriesFacts
    key: Key | None
    options: ProtocolOptions
    stall: StallOptions
    resume_command: str
    """What starts the job again, for reports."""
    records: RecordPlaces
    tls: TlsFiles | ssl.SSLContext | None = None
    """None: no TLS. With a context, or without a certificate, this rank starts no controller."""


class Protection:
    """Protects a training loop from `start` to `close`. All methods are for the main thread."""

    def __init__(
        self,
        settings: Settings,
        components: tuple[LiveComponent, ...],
        records: Records,
        recorder: Recorder | None,
    ) -> None:
        """`components` are those that this rank holds; `records` are the boundaries that the loop reaches,
        written to `recorder` if there is one.
        """
        self._settings, self._recorder = settings, recorder
        self._swept, self._attend_at = False, 0.0
        self.gate: Final = Gate(lease_s=settings.options.gate_lease_s)
        self.watchdog: Final = Watchdog(settings.stall, time.monotonic())
        self._release: m.Release | None = None
        self._over, self._left = threading.Event(), threading.Event()
        """The outcome is known, or this rank may go; the main thread has left the training loop."""
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._rank = LiveRank(
            settings.rank,
            components,
            records,
            self.gate,
            self.watchdog,
            settings.records.here,
            directory=settings.directory,
            stem=settings.series.stem,
            key=settings.key,
            rank_files=settings.series.rank_files,
            on_outcome=self._take_outcome,
            on_depart=self._over.set,
            say=self._notices.put,
        )
        self._launcher = _launcher(settings)
        self._thread = ProcessorThread(
            Processor(
                _member(settings.rank, components), settings.world_size, settings.options, time.monotonic()
            ),
            self._rank,
            Dialer(
                settings.address,
                settings.token,
                settings.incarnation,
                settings.rank,
                self._launcher,
                self._notices.put,
                client_tls(settings.tls),
            ),
            look_s=min(LOOK_S, settings.stall.floor_s / 4),  # or it would seem to be stopped itself
        )
        self._signals = SignalWatch(self._terminated)
        self._speed = SpeedCheck(settings.options, _speed_measured(settings), self._notices.put)

    def start(self) -> None:
        """Begin: find or start the controller, register, watch. Does not wait for it."""
        self._signals.__enter__()
        self._thread.start()

    @property
    def protected(self) -> bool:
        """True if the world is complete and a controller watches over it now."""
        return self._thread.protected

    @property
    def release(self) -> m.Release | None:
        """How the incident ended that ends the job; None: there was none."""
        return self._release

    def attend(self) -> None:
        """Say what there is to be said, and see to the signals, if it is time. At every boundary.

        Raises TrainingInterrupted once the job is to end, SwansongError if SIGTERM could not be served.
        """
        now = time.monotonic()
        if now < self._attend_at and self._release is None:
            return
        self._attend_at = now + _ATTEND_S
        self.say()
        if self._settings.rank == 0:
            self._speed.look(self._thread.world)
        self._signals.reassert()
        if not self._swept and self.protected:  # so the former controller is gone: it may have been reading
            self._swept = True
            self._settings.records.here.sweep_former()
        if self._release is not None:
            raise interrupted_by(self._release)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around a save by the main thread, which is no stall however long it takes."""
        with self.watchdog.phase("save"):
            yield

    def say(self) -> None:
        """Warn of what was noticed in other threads."""
        while not self._notices.empty():
            warnings.warn(self._notices.get_nowait(), SwansongWarning, stacklevel=4)

    # -- endings --------------------------------------------------------------------------------------

    def raised(self, error: BaseException) -> m.Release | None:
        """Training ended with an exception: have the state saved, and return how that went."""
        self._rank.ended = f"ended by {type(error).__name__}"
        what = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return self._await_outcome(self._rank.fault(FaultKind.RAISED, what, trace=trace))

    def stop(self, what: str) -> m.Release | None:
        """Have the job saved and ended, and return how that went."""
        return self._await_outcome(self._rank.fault(FaultKind.REQUESTED, what))

    def finished(self) -> m.Release | None:
        """Training has come to its end: wait until nobody needs this rank's state any more.

        Returns how an incident ended that came in between, if one did.
        """
        self._rank.ended = "has finished"
        self._thread.post(m.Finished())
        return self._wait()

    def close(self, *, orderly: bool) -> None:
        """End threads and put signals back; if `orderly`, wait for a controller that was started here.

        If SIGTERM has come, this does not return: the process ends as it would have by that.
        """
        try:
            self._thread.halt()
            joined = self._thread.join(2.0)
        finally:
            self._left.set()
            if self._recorder is not None:
                self._recorder.remove()
            self._signals.close()
            if self._signals.terminated:
                reraise_sigterm()
        self._speed.close()
        if orderly and self._launcher is not None and not self._launcher.wait(_CONTROLLER_EXIT_S):
            self._notices.put("the controller's process has not ended yet")
        if not joined:
            raise SwansongError("the processor's thread did not end")
        self.say()

    def _await_outcome(self, fault: m.Fault) -> m.Release | None:
        self._thread.post(m.LocalFault(fault))
        return self._wait()

    def _wait(self) -> m.Release | None:
        """Wait for the outcome; the machine's own deadlines bound that. If its thread has died: None."""
        while not self._over.wait(_POLL_S):
            if self._thread.join(0.0):
                break
        return self._release

    # -- in other threads -----------------------------------------------------------------------------

    def _take_outcome(self, release: m.Release) -> None:
        if self._recorder is not None:  # it has served; whoever ends this process may leave no time for that
            self._recorder.remove()
        self._release = release
        self._over.set()
        threading.Thread(target=self._end_stuck, args=(release,), name="swansong-exit", daemon=True).start()

    def _end_stuck(self, release: m.Release) -> None:
        """End the process if its main thread does not: it may wait for a peer that is gone, for ever."""
        if self._left.wait(self._settings.options.exit_grace_s):
            return
        if self._signals.terminated:
            reraise_sigterm()
        with suppress(OSError):  # standard error may be a file on a full disk, or closed
            os.write(
                2, f"swansong: rank {self._settings.rank} is stuck: {interrupted_by(release)}\n".encode()
            )
        os._exit(0 if release.cause is FaultKind.REQUESTED else EXIT_STUCK)

    def _terminated(self) -> None:
        name = signal.SIGTERM.name
        self._thread.post(m.LocalFault(self._rank.fault(FaultKind.SIGNALLED, f"{name} came")))


def whereabouts(release: m.Release | None, directory: Path) -> str:
    """What the exception that ended training is noted with, after its traceback."""
    more = f"\nswansong: what happened, and how to go on: swansong incident {shlex.quote(str(directory))}"
    if release is not None and release.path:
        return f"swansong: the state of step {release.step} is in {release.path}{more}"
    reason = release.reason if release is not None else "the processor's thread has failed"
    return f"swansong: nothing was saved: {reason}{more if release is not None and release.incident else ''}"


def _speed_measured(settings: Settings) -> Callable[[], float]:
    space = Workspace(settings.directory, Files())
    return lambda: disk_speed.measure(space, settings.key)


def _launcher(settings: Settings) -> Launcher | None:
    """What starts controllers like this rank; None if it lacks what a controller under TLS shows."""
    tls = settings.tls
    if tls is not None and (not isinstance(tls, TlsFiles) or tls.certificate is None):
        return None
    configuration = Configuration(
        directory=str(settings.directory),
        host=settings.address.host,
        port=settings.address.port,
        world_size=settings.world_size,
        incarnation=settings.incarnation.hex(),
        series=settings.series,
        key=settings.key.material.hex() if settings.key is not None else None,
        options=msgspec.to_builtins(settings.options),
        resume_command=settings.resume_command,
        starter=(os.getpid(), start_time(os.getpid())),
        recorders=str(settings.records.options.directory),
        tls=tls.portable() if tls is not None else None,
    )
    return Launcher(configuration, places.controller_log(settings.directory))


def _member(rank: int, components: tuple[LiveComponent, ...]) -> m.Member:
    return m.Member(
        rank=rank,
        host=host_name(),
        pid=os.getpid(),
        start_time=start_time(os.getpid()),
        components=tuple(
            m.ComponentEntry(key=part.clock.key, label=part.label, nbytes=part.nbytes) for part in components
        ),
    )
