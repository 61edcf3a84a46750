"""Keys, and the native container's encryption.

From the user's key (16, 24 or 32 bytes) and a random 16-byte salt, HKDF-SHA256 derives one 32-byte key per
file and purpose. A sealed file is a sequence of pieces, each AES-256-GCM:

    stored piece = ciphertext of up to 16 MiB - 16 plain bytes, then the 16-byte tag
    nonce        = piece number (8 bytes, big-endian), 0 or 1 for "last piece" (4 bytes, big-endian)
    associated   = salt of the file, nonce

A nonce never repeats under one key: a file has its own key, and a piece is written once. Moving, dropping,
repeating or truncating pieces fails authentication. Keys are never shown, logged or stored.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from swansong.errors import ConfigError, DamagedError, MalformedError
from swansong.store.pieces import PIECE, piece_count
from swansong.store.source import Source, check_range

SALT: Final = 16
"""Bytes of a salt."""
TAG: Final = 16
"""Bytes of an authentication tag."""
KEY_SIZES: Final = (16, 24, 32)
"""Bytes that a user's key may have."""


class Key:
    """A user's key. Its bytes leave this object only as derived keys, to MindSpore's own cipher, or privately
    to a process that this one has started.
    """

    __slots__ = ("_material",)

    def __init__(self, material: bytes) -> None:
        """Wrap a key of 16, 24 or 32 bytes; ConfigError otherwise."""
        if not isinstance(material, bytes):
            raise ConfigError(f"key: wanted bytes, got {type(material).__name__}")
        if len(material) not in KEY_SIZES:
            raise ConfigError(f"key: wanted 16, 24 or 32 bytes, got {len(material)}")
        self._material = material

    def __repr__(self) -> str:
        return f"Key(<{len(self._material)} bytes>)"

    def __reduce__(self) -> str:
        raise TypeError("a Key is not copied out of the process")

    @property
    def material(self) -> bytes:
        """The raw bytes, for MindSpore's container, which uses them directly."""
        return self._material

    def derive(self, salt: bytes, purpose: str) -> bytes:
        """A 32-byte key for one salt and purpose (HKDF-SHA256, RFC 5869)."""
        hkdf = HKDF(SHA256(), length=32, salt=salt, info=b"swansong/1 " + purpose.encode())
        return hkdf.derive(self._material)

    def check_value(self, salt: bytes) -> str:
        """16 hexadecimal digits that tell a wrong key from damage, and nothing else."""
        return self.derive(salt, "key check")[:8].hex()


def new_salt() -> bytes:
    """A fresh random salt."""
    return os.urandom(SALT)


def message_mac(key: bytes, data: bytes) -> str:
    """HMAC-SHA256 in hexadecimal."""
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def same_mac(want: str, got: str) -> bool:
    """Compare two authentication codes in constant time. Any text may be compared."""
    return hmac.compare_digest(want.encode(errors="surrogatepass"), got.encode(errors="surrogatepass"))


def seal_message(key: bytes, data: bytes, associated: bytes) -> bytes:
    """Encrypt a small message: 12-byte random nonce, ciphertext, tag."""
    nonce = os.urandom(12)
    return nonce + AESGCM(key).encrypt(nonce, data, associated)


def open_message(key: bytes, sealed: bytes, associated: bytes) -> bytes | None:
    """The reverse of `seal_message`; None if it does not authenticate."""
    if len(sealed) < 12 + TAG:
        return None
    try:
        return AESGCM(key).decrypt(sealed[:12], sealed[12:], associated)
    except InvalidTag:
        return None


def _nonce(index: int, last: bool) -> bytes:
    return index.to_bytes(8, "big") + int(last).to_bytes(4, "big")


class PieceMac:
    """GMAC over stored pieces, for files whose own encryption does not bind their blocks together."""

    def __init__(self, key: Key, salt: bytes) -> None:
        self._cipher = AESGCM(key.derive(salt, "piece mac"))

    def __call__(self, index: int, last: bool, stored: NDArray[np.uint8]) -> str:
        """32 hexadecimal digits that vouch for one stored piece at its place."""
        return self._cipher.encrypt(_nonce(index, last), b"", stored.data).hex()


class SealedEncoding:
    """The native container's encryption, as the writer applies it. See the module's text."""

    scheme = "sealed"
    plain_piece = PIECE - TAG

    def __init__(self, key: Key, salt: bytes) -> None:
        self._cipher = AESGCM(key.derive(salt, "file"))
        self._salt = salt

    def stored_size(self, plain_size: int) -> int:
        """See Encoding."""
        return plain_size + TAG * -(-plain_size // self.plain_piece)

    def encode(self, index: int, last: bool, plain: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """See Encoding."""
        nonce = _nonce(index, last)
        stored = len(plain) + TAG
        self._cipher.encrypt_into(nonce, plain.data, self._salt + nonce, out[:stored].data)
        return stored


class Unsealed:
    """A PieceSource of plain bytes over a Source of sealed ones.

    For `read_into`, keeps one decrypted piece, so reads in file order decrypt each piece once.
    """

    piece = PIECE - TAG

    def __init__(self, stored: Source, key: Key, salt: bytes) -> None:
        """Raises MalformedError if no sealed file has that size."""
        self._stored = stored
        self._cipher = AESGCM(key.derive(salt, "file"))
        self._salt = salt
        self.path = stored.path
        self._count = piece_count(stored.size)
        if 0 < stored.size - (self._count - 1) * PIECE <= TAG:
            raise MalformedError(
                f"{self.path}: {stored.size} bytes is not the size of a sealed file; it was cut short",
                path=self.path,
                file=self.path,
                offset=stored.size,
            )
        self.size = stored.size - TAG * self._count
        self._guard = threading.Lock()
        self._cached = -1
        self._buffer = self._plain = np.empty(0, np.uint8)

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See Source."""
        check_range(self, offset, len(out))
        step = PIECE - TAG
        done = 0
        with self._guard:
            while done < len(out):
                index, skip = divmod(offset + done, step)
                if index != self._cached:
                    self._cached = -1  # the buffer is about to be overwritten
                    if not len(self._buffer):
                        self._buffer = np.empty(min(PIECE, self._stored.size), np.uint8)
                    self._plain, self._cached = self.read_piece(index, self._buffer), index
                take = min(len(self._plain) - skip, len(out) - done)
                np.copyto(out[done : done + take], self._plain[skip : skip + take])
                done += take

    def read_piece(self, index: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See PieceSource. Decrypts in place."""
        start = index * PIECE
        stored = buffer[: min(PIECE, self._stored.size - start)]
        self._stored.read_into(start, stored)
        plain = stored[: len(stored) - TAG]
        nonce = _nonce(index, index == self._count - 1)
        try:
            self._cipher.decrypt_into(nonce, stored.data, self._salt + nonce, plain.data)
        except InvalidTag:
            raise DamagedError(
                f"{self.path}: the piece at byte {start} does not authenticate; the file was changed, cut or "
                "put together from others",
                path=self.path,
                file=self.path,
                offset=start,
            ) from None
        return plain

    def check(self, index: int, buffer: NDArray[np.uint8] | None = None) -> int:
        """Read one piece, by way of `buffer` if given, and check that it authenticates; return its stored
        length. Errors as `read_into`.
        """
        given = np.empty(min(PIECE, self._stored.size), np.uint8) if buffer is None else buffer
        return len(self.read_piece(index, given)) + TAG
