"""TLS as a change of bytes: no socket, so that it never blocks and reads no further than it was given."""

from __future__ import annotations

import ssl
from typing import Final

from swansong.errors import ConfigError, ProtocolError

_CHUNK: Final = 1 << 16


class Tls:
    """One end of TLS over one connection."""

    __slots__ = ("_incoming", "_object", "_outgoing", "_ready", "_waiting")

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
        self._ready = False

    def encrypt(self, data: bytes) -> bytes:
        """What to send for `data`, and for whatever else TLS has to say. ProtocolError if TLS fails."""
        self._waiting += data
        try:
            self._advance()
        except ssl.SSLError as error:
            raise _failed(error) from None
        return self._outgoing.read()

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
        return self._outgoing.read()

    def _advance(self) -> None:
        if not self._ready:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                return
            self._ready = True
        if self._waiting:
            self._object.write(bytes(self._waiting))
            self._waiting.clear()


def _failed(error: ssl.SSLError) -> ProtocolError:
    return ProtocolError(f"TLS: {error}")
