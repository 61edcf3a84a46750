"""Starting controllers, and finding them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from array_job import PATIENCE_S, free_port, running, until
from certificates import Authority
from engine_support import TOKEN, serve
from swansong.engine.address import resolve
from swansong.engine.processes import start_time
from swansong.engine.tls import TlsFiles
from swansong.engine.token import job_token
from swansong.engine.transport import Connection
from swansong.errors import ProtocolError, UnreachableError, WrongJobError
from swansong.persist import places
from swansong.persist.job import SeriesFacts
from swansong.persist.launch import Configuration, Dialer, Launcher, is_local
from swansong.protocol.handshake import Token
from swansong.store.files import Files
from swansong.store.series import Series

START = bytes(range(16))
OPTIONS = {"register_timeout_s": 2.0}
"""A controller that nobody registers with ends by itself."""


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    job_token(tmp_path, {}, create=True)
    return Configuration(
        directory=str(tmp_path),
        host="127.0.0.1",
        port=free_port(),
        world_size=2,
        incarnation=START.hex(),
        series=SeriesFacts.of(Series.fresh(tmp_path, "model", Files())),
        key="00" * 32,
        options=OPTIONS,
        resume_command="",
        starter=(os.getpid(), start_time(os.getpid())),
    )


@pytest.fixture
def launchers(configuration: Configuration) -> Iterator[tuple[Launcher, Launcher]]:
    """Of two ranks."""
    log = places.controller_log(Path(configuration.directory))
    both = Launcher(configuration, log), Launcher(configuration, log)
    yield both
    assert all(launcher.wait(PATIENCE_S) for launcher in both)


def lines(configuration: Configuration) -> list[str]:
    log = places.controller_log(Path(configuration.directory))
    return log.read_text().splitlines() if log.exists() else []


def dialer(configuration: Configuration, launcher: Launcher, rank: int = 0) -> Dialer:
    token = job_token(Path(configuration.directory), {}, create=False)
    return Dialer(resolve(configuration.host, configuration.port), token, START, rank, launcher, print)


def test_of_two_that_are_started_one_serves_and_the_other_ends_quietly(
    configuration: Configuration, launchers: tuple[Launcher, Launcher]
) -> None:
    assert all(launcher.start() for launcher in launchers)
    until(lambda: any(launcher.wait(0.0) for launcher in launchers))

    assert len([line for line in lines(configuration) if "listens" in line]) == 1
    assert not any("Traceback" in line for line in lines(configuration))


def test_none_is_started_more_often_than_once_a_second(
    launchers: tuple[Launcher, Launcher],
) -> None:
    assert [launchers[0].start() for _ in range(3)] == [True, False, False]


def test_who_finds_nobody_starts_one_and_finds_it_then(
    configuration: Configuration, launchers: tuple[Launcher, Launcher]
) -> None:
    dial = dialer(configuration, launchers[0])
    with pytest.raises(UnreachableError):
        dial()

    def found() -> Connection | None:
        try:
            return dial()
        except UnreachableError:
            return None

    with until(found) as connection:
        assert connection.peer.incarnation == START


def test_other_ranks_leave_it_to_rank_0_at_first(
    configuration: Configuration, launchers: tuple[Launcher, Launcher]
) -> None:
    with pytest.raises(UnreachableError):
        dialer(configuration, launchers[1], rank=1)()
    assert lines(configuration) == []
    assert launchers[1].wait(0.0), "nothing was started"


def test_the_command_line_of_a_controller_shows_no_secret(
    configuration: Configuration, launchers: tuple[Launcher, Launcher]
) -> None:
    launchers[0].start()
    (line,) = until(lambda: lines(configuration))
    pid = int(line.split()[1].rstrip(":"))
    command = Path(f"/proc/{pid}/cmdline").read_text()
    token = (Path(configuration.directory) / ".swansong-token").read_text().strip()

    assert running(pid)
    assert "swansong.persist.controller" in command
    assert token not in command
    assert "00" * 32 not in command


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_only_an_address_of_this_machine_is_local(host: str, local: bool) -> None:
    assert is_local(resolve(host, 2000)) is local


def test_who_finds_another_job_s_controller_is_told_once(
    configuration: Configuration, launchers: tuple[Launcher, Launcher]
) -> None:
    said: list[str] = []
    with serve(1) as served:
        dial = Dialer(served.address, Token(bytes(32)), START, 0, launchers[0], said.append)
        for _ in range(2):
            with pytest.raises(WrongJobError):
                dial()
    assert len(said) == 1
    assert said[0].startswith(f"not protected yet: {served.address}: ")


def test_who_does_not_trust_the_controller_is_told_why(
    configuration: Configuration, launchers: tuple[Launcher, Launcher], tmp_path: Path
) -> None:
    said: list[str] = []
    files = TlsFiles(**Authority(tmp_path).files("node", "127.0.0.1"))
    other = TlsFiles(authority=Authority(tmp_path, "other").file).client()
    with serve(1, tls=files.server()) as served:
        dial = Dialer(served.address, TOKEN, START, 0, launchers[0], said.append, other)
        with pytest.raises(ProtocolError):
            dial()
    (text,) = said
    assert text.startswith(f"not protected yet: {served.address}: TLS: certificate verify failed: ")
    assert launchers[0].wait(0.0), "nothing was started"


def test_who_cannot_start_a_controller_says_that_there_is_none(configuration: Configuration) -> None:
    said: list[str] = []
    address = resolve(configuration.host, configuration.port)
    dial = Dialer(address, TOKEN, START, 0, None, said.append)
    for _ in range(2):
        with pytest.raises(UnreachableError):
            dial()
    (text,) = said
    assert text.startswith(f"not protected yet: {address}: nobody listens there, and this rank cannot start")


def test_one_that_is_started_with_tls_is_found_with_tls(configuration: Configuration, tmp_path: Path) -> None:
    files = TlsFiles(**Authority(tmp_path).files("node", "127.0.0.1"))
    secure = structs.replace(configuration, tls=files.portable())
    launcher = Launcher(secure, places.controller_log(tmp_path))
    token, said = job_token(tmp_path, {}, create=False), list[str]()
    address = resolve(configuration.host, configuration.port)
    dial = Dialer(address, token, START, 0, launcher, said.append, files.client())

    def found() -> Connection | None:
        try:
            return dial()
        except UnreachableError:
            return None

    with until(found) as connection:
        assert connection.peer.incarnation == START
    assert launcher.wait(PATIENCE_S)
    assert said == []


def test_one_that_comes_when_its_job_is_over_does_not_stay(
    configuration: Configuration, launchers: tuple[Launcher, Launcher]
) -> None:
    gone = structs.replace(configuration, starter=(2**22 + 1, 0), options={})
    launcher = Launcher(gone, places.controller_log(Path(configuration.directory)))
    launcher.start()
    assert launcher.wait(PATIENCE_S)
    assert "nobody came" in lines(configuration)[-1]
