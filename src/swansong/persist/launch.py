"""Finding the controller, and starting one on its host if nobody listens there."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from swansong.engine.address import Address
from swansong.engine.recorder import RecorderOptions
from swansong.engine.tls import ClientTls
from swansong.engine.transport import Connection, connect
from swansong.errors import ProtocolError, SelfConnectionError, UnreachableError
from swansong.persist.job import SeriesFacts
from swansong.protocol.handshake import Identity, Role, Token
from swansong.store.isolated import isolated_python

RESTART_S: Final = 1.0
"""No process starts controllers more often than this."""
TURN_S: Final = 1.0
"""How much longer each further rank leaves it to the ranks before it to start one."""
LAST_TURN_S: Final = 5.0
"""The most that any rank leaves it to others."""
DIAL_S: Final = 1.0
"""How long one try to connect may take."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller is told; its process on standard input, as JSON: anybody can read command lines.

    The token is not in it: such a process looks for it where every rank does.
    """

    directory: str
    host: str
    port: int
    world_size: int
    incarnation: str
    """Hexadecimal."""
    series: SeriesFacts | None
    """None: what rank 0 tells the others, `resume_command` too; see `persist.job`."""
    key: str | None
    """The encryption key, hexadecimal."""
    options: dict[str, Any]
    """Fields of ProtocolOptions."""
    resume_command: str
    starter: tuple[int, int] | None
    """Process that starts it, on the same host: its id and its start time. None: it waits, whoever did."""
    recorders: str = str(RecorderOptions().directory)
    """Where flight recorders lie on its host."""
    tls: dict[str, str | None] | None = None
    """Fields of TlsFiles, with absolute paths. None: no TLS."""


class Launcher:
    """Starts controllers, each a process in a session of its own, so that no rank's end reaches it."""

    def __init__(self, configuration: Configuration, log: Path) -> None:
        """Their standard error is appended to `log`, mode 0600."""
        self._configuration, self._log = configuration, log
        self._started_at = -RESTART_S
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start one, unless one was started a moment ago or is there still. Raises OSError."""
        now = time.monotonic()
        if now < self._started_at + RESTART_S or not self.wait(0.0):
            return False
        self._started_at = now
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(self._log, flags, 0o600)
        try:
            process = subprocess.Popen(
                isolated_python("swansong.persist.controller"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._process = process
        if process.stdin is not None:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(msgspec.json.encode(self._configuration))
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the one that was started last, if any; False: it is still there."""
        if self._process is None:
            return True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None


class Dialer:
    """Connects a rank to its controller. Called by the processor's thread alone."""

    def __init__(
        self,
        address: Address,
        token: Token,
        incarnation: bytes,
        rank: int,
        launcher: Launcher | None,
        say: Callable[[str], object],
        tls: ClientTls | None = None,
    ) -> None:
        """`say` is told, once, of a controller that is not ours or not what it should be, or not there while
        this rank cannot start one: it has no `launcher`."""
        self._say, self._said = say, False
        self._address, self._token, self._incarnation, self._rank = address, token, incarnation, rank
        self._tls = tls
        self._local, self._launcher = is_local(address), launcher
        self._generation = -1
        """The highest seen."""
        self._refused_since: float | None = None

    def __call__(self) -> Connection:
        """Connect once. Raises UnreachableError, ProtocolError; starts a controller if it is time to."""
        me = Identity(
            role=Role.RANK, rank=self._rank, incarnation=self._incarnation, generation=self._generation
        )
        try:
            connection = connect(self._address, self._token, me, timeout_s=DIAL_S, tls=self._tls)
        except UnreachableError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
                self._refused()
            raise
        except SelfConnectionError:
            self._refused()
            raise
        except ProtocolError as error:
            self._complain(str(error))
            raise
        self._refused_since = None
        self._generation = max(self._generation, connection.peer.generation)
        return connection

    def _refused(self) -> None:
        """Nobody listens: start a controller, unless it is another rank's turn."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
        turn = min(TURN_S * self._rank, LAST_TURN_S)
        if not self._local or now < self._refused_since + turn:
            return
        if self._launcher is None:
            self._complain("nobody listens there, and this rank cannot start a controller (see ssl_context)")
            return
        with suppress(OSError):  # tried again, until the machine gives up
            self._launcher.start()

    def _complain(self, what: str) -> None:
        if not self._said:
            self._said = True
            self._say(f"not protected yet: {self._address}: {what}")


def is_local(address: Address) -> bool:
    """True if this machine has one of the socket addresses of `address`."""
    for family, where in address.endpoints:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((where[0], 0, *where[2:]))
            return True
    return False
