"""TLS 1.3 underneath a connection: who has to show what, and the change of bytes.

The change of bytes knows no socket, so that it never blocks and reads no further than it was given.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swansong.errors import ConfigError, ProtocolError

_CHUNK: Final = 1 << 14
_MEANINGS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the controller wants a certificate of whoever connects: ",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end does not trust the authority that signed our certificate: ",
    "WRONG_VERSION_NUMBER": "the other end speaks no TLS: ",
}
"""What OpenSSL's reasons come from here."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a rank or an operator connects with."""

    context: ssl.SSLContext
    """For the client's end, TLS 1.3."""
    server_name: str | None = None
    """Whom the controller's certificate must be for; None: the host that is connected to."""

    @classmethod
    def of(cls, tls: ClientTls | ssl.SSLContext) -> ClientTls:
        """A context alone will do, where the host's name is the certificate's."""
        return tls if isinstance(tls, ClientTls) else cls(tls)

    def begin(self, host: str) -> Tls:
        """The end of one connection to `host`. Raises ConfigError for a context that will not do."""
        return Tls(self.context, server=False, host=self.server_name or host)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """TLS as files, which a rank can pass on to the controller that it starts; PEM, all of them.

    Whoever connects checks that the controller's certificate is signed by `authority` and is for the
    controller's host. If the controller has an `authority`, whoever connects must show a certificate that is
    signed by it, too. Certificates only decide who may talk; who is which rank is the token's matter.
    """

    authority: str | Path | None = None
    """Certificates that may sign others'. None: this machine's own list; nobody who connects is checked."""
    certificate: str | Path | None = None
    """Of this process, with those between it and the authority. A controller needs one."""
    key: str | Path | None = None
    """The private key, without a passphrase; None: in the file of the certificate."""
    server_name: str | None = None
    """Whom the controller's certificate must be for; None: the host that is connected to."""

    def client(self) -> ClientTls:
        """What to connect with. Raises ConfigError for files that cannot be used."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        if self.authority is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        self._load(context)
        return ClientTls(context, self.server_name)

    def server(self) -> ssl.SSLContext:
        """What a controller listens with. Raises ConfigError for files that cannot be used, or none."""
        if self.certificate is None:
            raise ConfigError("tls: a controller needs a certificate, got none")
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody resumes a session
        if self.authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def portable(self) -> dict[str, str | None]:
        """The fields of the same files for another process, wherever that works."""
        return {
            "authority": _absolute(self.authority),
            "certificate": _absolute(self.certificate),
            "key": _absolute(self.key),
            "server_name": self.server_name,
        }

    def _load(self, context: ssl.SSLContext) -> None:
        if self.certificate is None and self.key is not None:
            raise ConfigError(f"tls: key {self.key}: wanted its certificate, too")
        if self.authority is not None:
            try:
                context.load_verify_locations(self.authority)
            except OSError as error:
                raise _unusable(f"authority {self.authority}", error) from error
        if self.certificate is not None:
            what = f"certificate {self.certificate}" + (f", key {self.key}" if self.key is not None else "")
            try:
                context.load_cert_chain(self.certificate, self.key, _no_passphrase)
            except OSError as error:
                raise _unusable(what, error) from error


def client_tls(tls: TlsFiles | ssl.SSLContext | None) -> ClientTls | None:
    """What to connect with, by what a user has given. Raises ConfigError for what cannot be used."""
    if tls is None:
        return None
    if not isinstance(tls, TlsFiles | ssl.SSLContext):
        raise ConfigError(f"tls: wanted TlsFiles or an ssl.SSLContext, got {type(tls).__name__}")
    client = tls.client() if isinstance(tls, TlsFiles) else ClientTls(tls)
    client.begin("localhost")  # to refuse a context that will not do before anybody connects
    return client


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _no_passphrase() -> str:
    raise ConfigError("tls: the private key has a passphrase, wanted one without; nobody is there to ask")


def _unusable(what: str, error: OSError) -> ConfigError:
    if not isinstance(error, ssl.SSLError):
        return ConfigError(f"tls: {what}: cannot be read: {error.strerror}")
    reason = "the key is another certificate's" if error.reason == "KEY_VALUES_MISMATCH" else "wanted PEM"
    return ConfigError(f"tls: {what}: cannot be used: {reason} ({error.reason or error})")


class Tls:
    """One end of TLS over one connection."""

    __slots__ = ("_incoming", "_object", "_outgoing", "_ready", "_sealed", "_waiting")

    def __init__(self, context: ssl.SSLContext, *, server: bool, host: str | None = None) -> None:
        """`host` is whose certificate a client wants to see. ConfigError for a context that will not do."""
        if context.minimum_version < ssl.TLSVersion.TLSv1_3:
            raise ConfigError(
                "ssl_context: wanted TLS 1.3 and nothing below; set its minimum_version to TLSVersion.TLSv1_3"
            )
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            self._object = context.wrap_bio(
                self._incoming, self._outgoing, server_side=server, server_hostname=None if server else host
            )
        except (ssl.SSLError, ValueError) as error:
            side = "server" if server else "client"
            raise ConfigError(f"ssl_context: cannot be used for the {side}'s end: {error}") from error
        self._waiting = bytearray()
        """What is to be sent once the TLS handshake is done."""
        self._sealed = bytearray()
        """What of that was sealed and is to be sent."""
        self._ready = False

    def encrypt(self, data: bytes) -> bytes:
        """What to send for `data`, and for whatever else TLS has to say. ProtocolError if TLS fails."""
        self._waiting += data
        try:
            self._advance()
        except ssl.SSLError as error:
            raise _failed(error) from None
        sealed, self._sealed = self._sealed, bytearray()
        return bytes(sealed) + self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """What `data` that came says; `encrypt(b"")` then gives the answer. ProtocolError if TLS fails."""
        self._incoming.write(data)
        plain = bytearray()
        try:
            self._advance()
            while self._ready and (chunk := self._object.read(_CHUNK)):
                plain += chunk
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise _failed(error) from None
        return bytes(plain)

    def last_words(self) -> bytes:
        """What is left to be sent after a failure: the alert that tells the other end why."""
        return bytes(self._sealed) + self._outgoing.read()

    def _advance(self) -> None:
        if not self._ready:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                return
            self._ready = True
        if self._waiting:
            # Piece by piece: OpenSSL's buffer keeps the size that it once had, for each connection.
            waiting, self._waiting = memoryview(self._waiting), bytearray()
            for at in range(0, len(waiting), _CHUNK):
                self._object.write(waiting[at : at + _CHUNK])
                self._sealed += self._outgoing.read()


def _failed(error: ssl.SSLError) -> ProtocolError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProtocolError(f"TLS: certificate verify failed: {error.verify_message}")
    return ProtocolError(f"TLS: {_MEANINGS.get(error.reason or '', '')}{error}")
