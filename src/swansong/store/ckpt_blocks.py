"""The blocks of a `.ckpt` file that MindSpore encrypted, as their headers describe them.

The plain bytes of the whole file are cut into blocks of at most 64 MiB. Numbers are little-endian:

    magic       uint32    0x7F3A5ED8 for AES-GCM, 0x7F3A5ED9 for AES-CBC (0x7F3A5EDA, SM4-CBC, is not read)
    tag         16 bytes  AES-GCM only
    block_len   int32     bytes of the four fields that follow
    iv_len      int32     16
    iv          16 bytes  random; AES-GCM takes the first 12 as its nonce
    cipher_len  int32     AES-GCM: the plain length; AES-CBC: that and the padding (PKCS#7)
    ciphertext            no associated data

Source: MindSpore's core/utils/crypto.cc.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from swansong.errors import ConfigError, LoadError, MalformedError, NotSupportedError
from swansong.store.source import Source, read

MAX_BLOCK: Final = 64 * 1024 * 1024
"""Most plain bytes in a block; MindSpore's own choice."""
AES_BLOCK: Final = 16
"""Bytes that AES works on."""
IV: Final = 16
"""Bytes of an initial vector."""
NONCE: Final = 12
"""Bytes of it that AES-GCM uses."""

_COUNTED: Final = 4 + IV + 4  # what block_len counts besides the ciphertext
_SM4_MAGIC: Final = 0x7F3A5EDA


@dataclass(frozen=True, slots=True)
class Form:
    """How one mode lays out a block."""

    mode: str
    magic: int
    padded: bool
    """True if ciphertext is padded to whole AES blocks, always by 1 to 16 bytes."""
    _header: struct.Struct

    @property
    def header_size(self) -> int:
        """Bytes before the ciphertext."""
        return self._header.size

    def cipher_size(self, plain_size: int) -> int:
        """Bytes of ciphertext for so many plain ones."""
        return (plain_size // AES_BLOCK + 1) * AES_BLOCK if self.padded else plain_size

    def put_header(self, out: NDArray[np.uint8], tag: bytes, iv: bytes, cipher_size: int) -> None:
        """Write a block's header to the beginning of `out`."""
        self._header.pack_into(out.data, 0, self.magic, tag, _COUNTED + cipher_size, IV, iv, cipher_size)

    def read_block(self, stored: Source, offset: int) -> Block:
        """Read the header at `offset`. Raises MalformedError if it cannot be true."""
        if offset + self.header_size > stored.size:
            raise malformed(stored, offset, "the header of an encrypted block is cut short")
        return self.parse(read(stored, offset, self.header_size), stored, offset)

    def parse(self, header: bytes, stored: Source, offset: int) -> Block:
        """Understand the header that was read at `offset`. Raises MalformedError if it cannot be true."""
        start = offset + self.header_size
        magic, tag, counted, iv_size, iv, cipher_size = self._header.unpack(header)
        if magic != self.magic:
            raise malformed(stored, offset, f"no {self.mode} block begins where the last one ends")
        if iv_size != IV or counted != _COUNTED + cipher_size:
            lengths = f"block {counted}, iv {iv_size}, ciphertext {cipher_size}"
            raise malformed(stored, offset, f"lengths that contradict each other: {lengths}")
        if not 0 < cipher_size <= self.cipher_size(MAX_BLOCK) or (self.padded and cipher_size % AES_BLOCK):
            raise malformed(stored, offset, f"no block has {cipher_size} bytes of ciphertext")
        if start + cipher_size > stored.size:
            left = stored.size - start
            raise malformed(
                stored, offset, f"{cipher_size} bytes of ciphertext, but {left} are left; cut short"
            )
        return Block(offset, tag, iv, start, start + cipher_size)


GCM_FORM: Final = Form("AES-GCM", 0x7F3A5ED8, False, struct.Struct("<I16sii16si"))
CBC_FORM: Final = Form("AES-CBC", 0x7F3A5ED9, True, struct.Struct("<I0sii16si"))

_MODES: Final = {form.magic: form.mode for form in (GCM_FORM, CBC_FORM)} | {_SM4_MAGIC: "SM4-CBC"}


@dataclass(frozen=True, slots=True)
class Block:
    """A block at `offset` of the stored file, with its ciphertext at [start, stop)."""

    offset: int
    tag: bytes
    iv: bytes
    start: int
    stop: int


def form_of(mode: str) -> Form:
    """The form of "AES-GCM" or "AES-CBC". Raises ConfigError for anything else."""
    for form in (GCM_FORM, CBC_FORM):
        if form.mode == mode:
            return form
    raise ConfigError(f"encryption mode: wanted 'AES-GCM' or 'AES-CBC', got {mode!r}")


def mode_of(source: Source) -> str | None:
    """The mode in which MindSpore encrypted the file, by its first bytes ("SM4-CBC" too), or None."""
    return _MODES.get(int.from_bytes(read(source, 0, 4), "little")) if source.size >= 4 else None


def looks_encrypted(source: Source) -> bool:
    """True if the file begins as MindSpore's encrypted files do, in any of its modes."""
    return mode_of(source) is not None


def require_mode(source: Source, form: Form) -> None:
    """Raise LoadError unless the file begins as one encrypted in that mode; NotSupportedError for SM4-CBC."""
    path, found = source.path, mode_of(source)
    if found is None:
        raise LoadError(f"{path}: a key was given, but MindSpore did not encrypt this file", path=path)
    if found == _MODES[_SM4_MAGIC]:
        raise NotSupportedError(
            f"{path}: encrypted with SM4-CBC, which is not read; decrypt it with MindSpore"
        )
    if found != form.mode:
        raise LoadError(f"{path}: encrypted with {found}, not with {form.mode}; give that mode", path=path)


def malformed(stored: Source, offset: int, what: str) -> MalformedError:
    """An error about the block at `offset`, to be raised by the caller."""
    path = stored.path
    return MalformedError(f"{path}: byte {offset}: {what}", path=path, file=path, offset=offset)
