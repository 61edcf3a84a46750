"""MindSpore's encryption of `.ckpt` files: AES-GCM or AES-CBC, block by block (see ckpt_blocks).

The user's key is the AES key, as it is. AES-GCM proves each block, but not that the blocks are all there, in
order and of one file. **AES-CBC proves nothing**: changed bytes decrypt to other bytes. Both gaps are closed
by the manifest, for files that have one.

All heavy calls release the interpreter lock and work on memory in place.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC, GCM
from numpy.typing import NDArray

from swansong.errors import DamagedError, LoadError, MalformedError, WrongKeyError
from swansong.store.ckpt_blocks import (
    AES_BLOCK,
    GCM_FORM,
    IV,
    NONCE,
    Block,
    form_of,
    looks_encrypted,
    malformed,
    require_mode,
)
from swansong.store.crypt import Key
from swansong.store.pieces import PIECE
from swansong.store.source import Source, check_range, read

__all__ = ["MAX_BLOCKS", "MindSporeDecrypted", "MindSporeEncoding", "looks_encrypted"]

MAX_BLOCKS: Final = 1 << 18
"""Most blocks read of one file: 4 TiB in pieces of ours."""

_FIRST_BYTE: Final = b"\x0a"  # what every .ckpt file begins with


class MindSporeEncoding:
    """The Encoding that `mindspore.load_checkpoint(..., dec_key=key, dec_mode=mode)` reverses.

    A stored piece is one block of exactly PIECE bytes (the last one: fewer).
    """

    plain_piece = PIECE - GCM_FORM.header_size
    """Plain bytes of a piece in either mode: a block of AES-CBC has no tag, but 16 bytes of padding."""

    def __init__(
        self, key: bytes, mode: str = "AES-GCM", *, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        """`key` has 16, 24 or 32 bytes, `random(n)` makes initial vectors. Raises ConfigError."""
        self._form = form_of(mode)
        self._key = Key(key)
        self._random = random

    def __repr__(self) -> str:
        return f"MindSporeEncoding({self._key!r}, {self._form.mode!r})"

    @property
    def scheme(self) -> str:
        """See Encoding."""
        return f"mindspore-{self._form.mode}"

    def stored_size(self, plain_size: int) -> int:
        """See Encoding."""
        full, rest = divmod(plain_size, self.plain_piece)
        return full * PIECE + (self._form.header_size + self._form.cipher_size(rest) if rest else 0)

    def encode(self, index: int, last: bool, plain: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """See Encoding. `out` needs room for the stored length only."""
        form, iv = self._form, self._random(IV)
        cipher_size = form.cipher_size(len(plain))
        ciphertext = out[form.header_size : form.header_size + cipher_size]
        tag = self._cbc(iv, plain, ciphertext) if form.padded else self._gcm(iv, plain, ciphertext)
        form.put_header(out, tag, iv, cipher_size)
        return form.header_size + cipher_size

    def _gcm(self, iv: bytes, plain: NDArray[np.uint8], out: NDArray[np.uint8]) -> bytes:
        # Not AESGCM.encrypt_into: it puts the tag behind the ciphertext, where a full piece has no room.
        encryptor = Cipher(AES(self._key.material), GCM(iv[:NONCE])).encryptor()
        encryptor.update_into(plain.data, out.data)
        encryptor.finalize()
        return encryptor.tag

    def _cbc(self, iv: bytes, plain: NDArray[np.uint8], out: NDArray[np.uint8]) -> bytes:
        encryptor = Cipher(AES(self._key.material), CBC(iv)).encryptor()
        whole = len(plain) - len(plain) % AES_BLOCK
        encryptor.update_into(plain[:whole].data, out.data)
        padding = AES_BLOCK - (len(plain) - whole)
        end = encryptor.update(plain[whole:].tobytes() + bytes([padding] * padding))
        out[whole:] = np.frombuffer(end, np.uint8)
        return b""


class MindSporeDecrypted:
    """A PieceSource of plain bytes over a Source of stored ones, in blocks of any size up to 64 MiB.

    Keeps the block decrypted last, so that reading in file order decrypts each block once. Memory: up to
    three blocks per reading thread. Thread-safe if `stored` is.

    With AES-CBC, damage shows only where it hits a header or a padding.
    """

    def __init__(self, stored: Source, key: bytes, mode: str = "AES-GCM") -> None:
        """Try the key on the first block, and find out where the others lie.

        Raises ConfigError for a key or mode that cannot be one; LoadError if the file is not encrypted, or in
        another mode; NotSupportedError for SM4-CBC; WrongKeyError if the first block does not decrypt;
        MalformedError and DamagedError, as does `read_into`, for any block that is not what it should be.
        """
        self._form = form_of(mode)
        self._key = Key(key)
        self._stored = stored
        self.path = stored.path
        require_mode(stored, self._form)
        first = self._form.read_block(stored, 0)
        plain = self._decrypted(0, first.stop)
        if self._form.padded and plain[:1].tobytes() != _FIRST_BYTE:
            raise self._does_not_decrypt(0)
        self._cached = 0, plain
        even = self._even_blocks(first, len(plain))
        self._offsets, self._starts = even or self._any_blocks()
        """Where each block begins in the stored and in the plain bytes; then, where the last one ends."""
        self.size = self._starts[-1]
        self.piece = len(plain) if even else 0
        """Plain bytes of every block but the last; 0 if they differ."""

    def __repr__(self) -> str:
        return f"MindSporeDecrypted({self.path!r}, {self._key!r}, {self._form.mode!r})"

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See Source."""
        check_range(self, offset, len(out))
        index = bisect_right(self._starts, offset) - 1
        done = 0
        while done < len(out):
            start, stop = self._starts[index : index + 2]
            skip = offset + done - start
            take = min(stop - start - skip, len(out) - done)
            target = out[done : done + take]
            if take == stop - start and not self._form.padded:
                self._decrypt_into(self._offsets[index], self._offsets[index + 1], target)
            else:
                np.copyto(target, self._plain(index)[skip : skip + take])
            done += take
            index += 1

    def read_piece(self, index: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """See PieceSource; for blocks that all are alike, and no larger than PIECE."""
        target = buffer[: self._starts[index + 1] - self._starts[index]]
        self.read_into(self._starts[index], target)
        return target

    def _even_blocks(self, first: Block, plain_size: int) -> tuple[list[int], list[int]] | None:
        """Offsets and starts if all blocks but the last are as long as the first; None if not.

        So are all files that we or MindSpore wrote. Only the last header is read now, the others with their
        blocks: opening a large file to read one tensor must not touch all of it. A block in between that is
        not like the first is an error when it is read.
        """
        count = -(-self._stored.size // first.stop)
        try:
            last = self._form.read_block(self._stored, (count - 1) * first.stop)
        except MalformedError:
            return None
        if last.stop != self._stored.size or count > MAX_BLOCKS:
            return None
        offsets = [index * first.stop for index in range(count)]
        starts = [index * plain_size for index in range(count)]
        return [*offsets, last.stop], [*starts, starts[-1] + self._plain_size(last)]

    def _any_blocks(self) -> tuple[list[int], list[int]]:
        """Offsets and starts, from header to header."""
        offsets, starts = [0], [0]
        while offsets[-1] < self._stored.size:
            block = self._form.read_block(self._stored, offsets[-1])
            if len(offsets) > MAX_BLOCKS:
                raise malformed(self._stored, block.offset, f"more than {MAX_BLOCKS} encrypted blocks")
            offsets.append(block.stop)
            starts.append(starts[-1] + self._plain_size(block))
        return offsets, starts

    def _plain(self, index: int) -> NDArray[np.uint8]:
        # One pair, replaced as a whole: another thread sees the old one or the new one.
        cached, plain = self._cached
        if cached != index:
            offset = self._offsets[index]
            plain = self._decrypted(offset, self._offsets[index + 1])
            if len(plain) != self._starts[index + 1] - self._starts[index]:
                raise self._does_not_decrypt(offset)
            self._cached = index, plain
        return plain

    def _decrypted(self, offset: int, stop: int) -> NDArray[np.uint8]:
        """The plain bytes of the block that is stored at [offset, stop)."""
        size = stop - offset - self._form.header_size
        out = np.empty(size + AES_BLOCK, np.uint8)  # for AES-CBC, update_into asks for more than it fills
        block = self._decrypt_into(offset, stop, out)
        return out[: size - self._padding(block, out[:size][-AES_BLOCK:].tobytes())]

    def _decrypt_into(self, offset: int, stop: int, out: NDArray[np.uint8]) -> Block:
        # Header and ciphertext in one read: a piece of ours, verified as a whole, is then read only once.
        stored = np.empty(stop - offset, np.uint8)
        self._stored.read_into(offset, stored)
        header, ciphertext = np.split(stored, [self._form.header_size])
        block = self._form.parse(header.tobytes(), self._stored, offset)
        if block.stop != stop:
            raise malformed(self._stored, offset, f"this encrypted block should end at byte {stop}")
        decryptor = self._cipher(block.iv, block.tag).decryptor()
        decryptor.update_into(ciphertext.data, out.data)
        try:
            decryptor.finalize()
        except InvalidTag:
            raise self._does_not_decrypt(offset) from None
        return block

    def _plain_size(self, block: Block) -> int:
        """Plain bytes of a block, from its header and, if it is padded, its end."""
        size = block.stop - block.start
        if not self._form.padded:
            return size
        # An AES block is decrypted with the ciphertext before it, the first one with the initial vector.
        start = max(block.start, block.stop - 2 * AES_BLOCK)
        chain = block.iv + read(self._stored, start, block.stop - start)
        decryptor = self._cipher(chain[-2 * AES_BLOCK : -AES_BLOCK]).decryptor()
        return size - self._padding(block, decryptor.update(chain[-AES_BLOCK:]))

    def _padding(self, block: Block, end: bytes) -> int:
        """Bytes of padding of a block whose last AES block is `end`, decrypted."""
        if not self._form.padded:
            return 0
        count = end[-1]
        possible = 1 <= count <= AES_BLOCK and count < block.stop - block.start
        if not possible or end[-count:] != bytes([count] * count):
            raise self._does_not_decrypt(block.offset)
        return count

    def _cipher(self, iv: bytes, tag: bytes = b"") -> Cipher[CBC] | Cipher[GCM]:
        algorithm = AES(self._key.material)
        return Cipher(algorithm, CBC(iv)) if self._form.padded else Cipher(algorithm, GCM(iv[:NONCE], tag))

    def _does_not_decrypt(self, offset: int) -> LoadError:
        if offset == 0:
            return WrongKeyError(
                f"{self.path}: the first encrypted block does not decrypt: the key is wrong, or the file is "
                "damaged there; only a manifest can tell which",
                path=self.path,
            )
        return DamagedError(
            f"{self.path}: the encrypted block at byte {offset} does not decrypt, though the first one "
            "does; the file is damaged",
            path=self.path,
            file=self.path,
            offset=offset,
        )
