"""A controller to be measured: the process that `persist.launch` starts."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swansong.engine.address import Address, resolve
from swansong.engine.processes import start_time
from swansong.engine.tls import ClientTls, TlsFiles
from swansong.engine.token import job_token
from swansong.persist import places
from swansong.persist.job import SeriesFacts
from swansong.persist.launch import Configuration, Launcher
from swansong.protocol.handshake import INCARNATION, Token
from swansong.store.files import Files
from swansong.store.series import Series

HOST = "127.0.0.1"
PATIENCE_S = 60.0
"""How long anything may take before a benchmark gives up."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A controller that listens, and what its ranks have to know."""

    directory: Path
    """Of its checkpoints, where its token is."""
    pid: int
    """Of the controller."""
    address: Address
    token: Token
    incarnation: bytes
    tls: ClientTls | None
    """For the ranks' end."""


@contextmanager
def controller(world_size: int, *, secure: bool = False) -> Iterator[Job]:
    """Start one, under TLS 1.3 if `secure`; it is killed at the end. Raises TimeoutError."""
    with tempfile.TemporaryDirectory(prefix="swansong-bench-") as place:
        directory, incarnation = Path(place), secrets.token_bytes(INCARNATION)
        token = job_token(directory, {}, create=True)
        tls = _certified(directory / "controller.pem") if secure else None
        configuration = Configuration(
            directory=place,
            host=HOST,
            port=0,
            world_size=world_size,
            incarnation=incarnation.hex(),
            series=SeriesFacts.of(Series.fresh(directory, "bench", Files())),
            key=None,
            options={},
            resume_command="",
            starter=(os.getpid(), start_time(os.getpid())),
            tls={"certificate": str(tls.certificate)} if tls is not None else None,
        )
        log = places.controller_log(directory)
        launcher = Launcher(configuration, log)
        launcher.start()
        pid, port = _until(
            lambda: re.search(r"controller (\d+): listens on .*:(\d+)\n", log.read_text())
        ).groups()
        try:
            address = resolve(HOST, int(port))
            yield Job(
                directory, int(pid), address, token, incarnation, tls.client() if tls is not None else None
            )
        finally:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
            launcher.wait(PATIENCE_S)


def _until(what: Callable[[], T | None]) -> T:
    """Wait until there is something, and return it."""
    ends = time.monotonic() + PATIENCE_S
    while (value := what()) is None:
        if time.monotonic() >= ends:
            raise TimeoutError(f"the controller did not listen in {PATIENCE_S:g} s")
        time.sleep(0.002)
    return value


def _certified(path: Path) -> TlsFiles:
    """Make a key and a certificate for HOST, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "swansong benchmark")])
    begins = datetime.datetime(2020, 1, 1)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=36500))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return TlsFiles(certificate=path, authority=path)
