"""Running a controller: the process that `persist.launch` starts, and `swansong controller`."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from swansong.engine.address import resolve
from swansong.engine.controller import ControllerServer
from swansong.engine.processes import open_process
from swansong.engine.recorder import RecorderOptions
from swansong.engine.recorders import HostRecorders
from swansong.engine.storekeeper import StoreCalls
from swansong.engine.tls import TlsFiles
from swansong.engine.token import job_token
from swansong.errors import AddressInUseError, SwansongError
from swansong.persist import job
from swansong.persist.committer import Committer
from swansong.persist.job import SeriesFacts
from swansong.persist.launch import Configuration
from swansong.persist.records import RecordPlaces
from swansong.protocol.handshake import Token
from swansong.protocol.options import ProtocolOptions
from swansong.store.crypt import Key
from swansong.store.files import Files

_MOST: Final = 1 << 20
"""Bytes of a configuration."""
ALONE_S: Final = 2.0
"""How long a controller waits for anybody once the process that started it has ended."""
_LEARN_S: Final = 2.0
"""How long what rank 0 has told the others may take to be seen here."""
_LOOK_S: Final = 0.25


def main() -> None:
    """Serve the job that standard input tells of until it is over. Ends quietly if another has the port."""
    # Whoever ends a job ends its ranks, and this process goes when they are gone; until then it is needed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configuration = msgspec.json.decode(sys.stdin.buffer.read(_MOST), type=Configuration)
    token = job_token(Path(configuration.directory), os.environ, create=False)
    with suppress(AddressInUseError):
        serve(configuration, token)
        forget(configuration)


def serve(
    configuration: Configuration, token: Token, ready: Callable[[ControllerServer], object] | None = None
) -> str:
    """Run a controller until it has closed; return why it did. What it has to say goes to standard error.

    `ready` is called once it listens; it may keep the server, to stop it. Raises AddressInUseError,
    ConfigError.
    """
    tls = TlsFiles(**configuration.tls).server() if configuration.tls is not None else None
    with (
        ControllerServer(
            resolve(configuration.host, configuration.port),
            world_size=configuration.world_size,
            token=token,
            incarnation=bytes.fromhex(configuration.incarnation),
            store=_Store(configuration).calls,
            options=ProtocolOptions(**configuration.options),
            tls=tls,
            note=_note,
        ) as server,
        _watch_starter(server, configuration.starter),
    ):
        _note(f"listens on {configuration.host}:{server.port}")
        if ready is not None:
            ready(server)
        reason = server.run()
        _note(f"ends: {reason}")
    return reason


def forget(configuration: Configuration) -> None:
    """The job is over: remove what rank 0 has told, and what killed ranks of this host have recorded."""
    _Store(configuration).sweep(ProtocolOptions(**configuration.options).exit_grace_s)
    job.forget(Path(configuration.directory), bytes.fromhex(configuration.incarnation), Files())


class _Store:
    """The store's side of a controller, made when it is needed.

    A controller that was there before its job knows no series. Once there is something to do, rank 0 has told
    of it.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    @property
    def calls(self) -> StoreCalls:
        """What the engine needs. All raise what `job.learn` raises, too."""
        return StoreCalls(
            prepare=lambda incident, step: self._committer.prepare(incident, step),
            commit=lambda order: self._committer.commit(order),
            discard=lambda incident: self._committer.discard(incident),
            report=lambda report: self._committer.report(report),
        )

    def sweep(self, timeout_s: float) -> None:
        """Remove what ranks of this host that were killed have recorded; nobody needs it any more."""
        with suppress(SwansongError, OSError):
            self._recorders.sweep(timeout_s)

    @cached_property
    def _facts(self) -> tuple[SeriesFacts, str]:
        """The series, and what starts the job again."""
        known = self._configuration
        if known.series is not None:
            return known.series, known.resume_command
        facts = job.learn(Path(known.directory), bytes.fromhex(known.incarnation), timeout_s=_LEARN_S)
        return facts.series, facts.resume_command

    @property
    def _recorders(self) -> HostRecorders:
        known = self._configuration
        options = RecorderOptions(directory=Path(known.recorders))
        incarnation = bytes.fromhex(known.incarnation)
        return RecordPlaces.of(options, Path(known.directory), self._facts[0].name, incarnation).here

    @cached_property
    def _committer(self) -> Committer:
        known = self._configuration
        series, resume_command = self._facts
        return Committer(
            series.series(Path(known.directory), Files()),
            self._recorders,
            world_size=known.world_size,
            key=Key(bytes.fromhex(known.key)) if known.key is not None else None,
            resume_command=resume_command,
            rank_files=series.rank_files,
        )


@contextmanager
def _watch_starter(server: ControllerServer, starter: tuple[int, int] | None) -> Iterator[None]:
    """Stop the server if nobody comes: it may have been slow, and its job be over by now."""
    if starter is None:
        yield
        return
    over = threading.Event()
    alive = open_process(*starter)

    def watch() -> None:
        alone_s = 0.0
        while server.connections == 0 and alone_s < ALONE_S and not over.wait(_LOOK_S):
            if alive is None or select.select([alive], [], [], 0.0)[0]:
                alone_s += _LOOK_S
        if server.connections == 0 and not over.is_set():
            server.stop("whoever started it has ended, and nobody came")

    watcher = threading.Thread(target=watch, name="swansong-starter", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        if alive is not None:
            os.close(alive)


def _note(text: str) -> None:
    with suppress(OSError):  # the log may be on the very disk that is full
        sys.stderr.write(f"controller {os.getpid()}: {text}\n")
        sys.stderr.flush()
