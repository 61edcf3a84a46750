"""The controller's process: what `persist.launch` starts. Its configuration comes on standard input."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from swansong.engine.address import resolve
from swansong.engine.controller import ControllerServer
from swansong.engine.processes import open_process
from swansong.engine.token import job_token
from swansong.errors import AddressInUseError
from swansong.persist import job
from swansong.persist.committer import Committer
from swansong.persist.launch import Configuration
from swansong.protocol.options import ProtocolOptions
from swansong.store.crypt import Key
from swansong.store.files import Files

_MOST: Final = 1 << 20
"""Bytes of a configuration."""
ALONE_S: Final = 2.0
"""How long a controller waits for anybody once the process that started it has ended."""
_LOOK_S: Final = 0.25


def main() -> None:
    """Serve until the job is over. Ends quietly if another controller has the port."""
    # Whoever ends a job ends its ranks, and this process goes when they are gone; until then it is needed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    serve(msgspec.json.decode(sys.stdin.buffer.read(_MOST), type=Configuration))


def serve(configuration: Configuration) -> None:
    """Run a controller; return when it has closed, or at once if its address is in use."""
    directory, files = Path(configuration.directory), Files()
    incarnation = bytes.fromhex(configuration.incarnation)
    committer = Committer(
        configuration.series.series(directory, files),
        world_size=configuration.world_size,
        key=Key(bytes.fromhex(configuration.key)) if configuration.key is not None else None,
        resume_command=configuration.resume_command,
    )
    try:
        server = ControllerServer(
            resolve(configuration.host, configuration.port),
            world_size=configuration.world_size,
            token=job_token(directory, os.environ, create=False),
            incarnation=incarnation,
            store=committer.calls,
            options=ProtocolOptions(**configuration.options),
            note=_note,
        )
    except AddressInUseError:
        return
    with server, _watch_starter(server, *configuration.starter):
        _note(f"listens on {configuration.host}:{server.port}")
        _note(f"ends: {server.run()}")
    job.forget(directory, incarnation, files)


@contextmanager
def _watch_starter(server: ControllerServer, pid: int, started: int) -> Iterator[None]:
    """Stop the server if nobody comes: it may have been slow, and its job be over by now."""
    over = threading.Event()
    alive = open_process(pid, started)

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
    sys.stderr.write(f"controller {os.getpid()}: {text}\n")
    sys.stderr.flush()
