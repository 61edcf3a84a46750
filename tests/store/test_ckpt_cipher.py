"""MindSpore's encryption by its bytes, with `cryptography`'s one-shot calls as judge."""

from __future__ import annotations

import re
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ckpt_files import Memory, stored_bytes
from swansong.errors import (
    ConfigError,
    DamagedError,
    LoadError,
    MalformedError,
    NotSupportedError,
    WrongKeyError,
)
from swansong.store.ckpt_cipher import MindSporeDecrypted, MindSporeEncoding, looks_encrypted
from swansong.store.pieces import PIECE
from swansong.store.source import read

KEY = b"0123456789abcdef"
MODES = ["AES-GCM", "AES-CBC"]
STEP = MindSporeEncoding.plain_piece


def plain_of(size: int) -> bytes:
    """Bytes that begin as a `.ckpt` does."""
    return b"\x0a" + np.random.default_rng(size).bytes(size - 1)


def blocks_of(plain: bytes, sizes: list[int], mode: str) -> bytes:
    """`plain` in encrypted blocks of those plain sizes, as another program might have cut it."""
    ends = np.cumsum(sizes)
    assert ends[-1] == len(plain)
    encoding = MindSporeEncoding(KEY, mode)
    return b"".join(
        stored_bytes(encoding, plain[end - size : end]) for end, size in zip(ends, sizes, strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, STEP - 1, STEP, STEP + 1])
def test_stored_size_is_foretold_and_decrypts_again(mode: str, size: int) -> None:
    encoding = MindSporeEncoding(KEY, mode)
    plain = plain_of(size)
    stored = stored_bytes(encoding, plain)
    assert len(stored) == encoding.stored_size(size)
    assert (len(stored) > PIECE) == (size > STEP)
    decrypted = MindSporeDecrypted(Memory(stored), KEY, mode)
    assert decrypted.size == size
    assert read(decrypted, 0, size) == plain


@pytest.mark.parametrize("mode", MODES)
def test_full_piece_is_exactly_a_piece(mode: str) -> None:
    out = np.empty(PIECE, np.uint8)
    assert MindSporeEncoding(KEY, mode).encode(0, False, np.zeros(STEP, np.uint8), out) == PIECE
    assert MindSporeEncoding(KEY, mode).stored_size(3 * STEP) == 3 * PIECE
    assert MindSporeEncoding(KEY, mode).stored_size(0) == 0


def test_block_is_laid_out_as_described() -> None:
    plain = plain_of(100)
    stored = stored_bytes(MindSporeEncoding(KEY), plain)
    magic, tag, block_len, iv_len, iv, cipher_len = struct.unpack("<I16sii16si", stored[:48])
    assert (magic, block_len, iv_len, cipher_len) == (0x7F3A5ED8, 24 + 100, 16, 100)
    assert AESGCM(KEY).decrypt(iv[:12], stored[48:] + tag, None) == plain


def test_every_piece_has_an_initial_vector_of_its_own() -> None:
    asked: list[int] = []

    def numbered(size: int) -> bytes:
        asked.append(size)
        return bytes([len(asked)] * size)

    stored = stored_bytes(MindSporeEncoding(KEY, random=numbered), plain_of(2 * STEP + 5))
    assert asked == [16, 16, 16]
    assert [stored[start + 28 : start + 44] for start in (0, PIECE, 2 * PIECE)] == [
        bytes([i] * 16) for i in (1, 2, 3)
    ]


@pytest.mark.parametrize("key", [b"", b"k" * 15, b"k" * 17, b"k" * 33, "k" * 16, None], ids=repr)
def test_keys_that_cannot_be_are_refused(key: bytes) -> None:
    with pytest.raises(ConfigError, match="key: wanted"):
        MindSporeEncoding(key)
    with pytest.raises(ConfigError, match="key: wanted"):
        MindSporeDecrypted(Memory(stored_bytes(MindSporeEncoding(KEY), b"\x0a")), key)


@pytest.mark.parametrize("mode", ["SM4-CBC", "aes-gcm", "", None], ids=repr)
def test_modes_that_cannot_be_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="wanted 'AES-GCM' or 'AES-CBC', got"):
        MindSporeEncoding(KEY, mode)


@pytest.mark.parametrize("mode", MODES)
def test_key_is_never_shown(mode: str) -> None:
    encoding = MindSporeEncoding(KEY, mode)
    stored = Memory(stored_bytes(encoding, plain_of(50)))
    with pytest.raises(WrongKeyError) as caught:
        MindSporeDecrypted(stored, KEY[::-1], mode)
    shown = repr(encoding) + repr(MindSporeDecrypted(stored, KEY, mode)) + repr(caught.value)
    assert mode in shown
    assert not re.search("0123456789|9876543210|30313233", shown)


@pytest.mark.parametrize("mode", MODES)
def test_wrong_key_is_told_when_the_file_is_opened(mode: str) -> None:
    stored = Memory(stored_bytes(MindSporeEncoding(KEY, mode, random=bytes), plain_of(1000)))
    for first in range(200):
        with pytest.raises(WrongKeyError, match="the key is wrong, or the file is damaged there"):
            MindSporeDecrypted(stored, bytes([first]) + KEY[1:15] + b"!", mode)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        pytest.param(b"", LoadError, "MindSpore did not encrypt this file", id="empty"),
        pytest.param(b"\xd8\x5e", LoadError, "MindSpore did not encrypt this file", id="two-bytes"),
        pytest.param(
            b"\x0a\x11\x0a\x01w" * 20, LoadError, "MindSpore did not encrypt this file", id="plain-ckpt"
        ),
        pytest.param(
            stored_bytes(MindSporeEncoding(KEY, "AES-CBC"), b"\x0a"), LoadError, "with AES-CBC, not", id="cbc"
        ),
        pytest.param(b"\xda\x5e\x3a\x7f" + bytes(60), NotSupportedError, "encrypted with SM4-CBC", id="sm4"),
    ],
)
def test_file_that_is_not_encrypted_that_way_is_told(
    data: bytes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MindSporeDecrypted(Memory(data), KEY, "AES-GCM")


@pytest.mark.parametrize(
    ("data", "encrypted"),
    [
        pytest.param(b"", False, id="empty"),
        pytest.param(b"\xd8\x5e\x3a", False, id="three-bytes"),
        pytest.param(b"\x0a\x11\x0a\x01w", False, id="plain"),
        pytest.param(b"\xd8\x5e\x3a\x7f", True, id="gcm"),
        pytest.param(b"\xd9\x5e\x3a\x7f", True, id="cbc"),
        pytest.param(b"\xda\x5e\x3a\x7f", True, id="sm4"),
    ],
)
def test_encrypted_files_are_known_by_their_magic(data: bytes, encrypted: bool) -> None:
    assert looks_encrypted(Memory(data)) is encrypted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([100], id="one"),
        pytest.param([64, 64, 64], id="even"),
        pytest.param([50, 50, 7], id="even-and-a-rest"),
        pytest.param([10, 90, 3], id="growing"),
        pytest.param([90, 10, 1], id="shrinking"),
        pytest.param([1] * 40, id="single-bytes"),
    ],
)
def test_blocks_of_any_size_are_read_at_any_offset(mode: str, sizes: list[int]) -> None:
    plain = plain_of(sum(sizes))
    decrypted = MindSporeDecrypted(Memory(blocks_of(plain, sizes, mode)), KEY, mode)
    assert decrypted.size == len(plain)
    for start in range(len(plain)):
        for stop in {start, start + 1, (start + len(plain)) // 2, len(plain)}:
            assert read(decrypted, start, stop - start) == plain[start:stop]
    with pytest.raises(MalformedError, match="the file has"):
        read(decrypted, 1, len(plain))


@pytest.mark.parametrize("mode", MODES)
def test_opening_an_even_file_reads_its_first_block_and_its_end(mode: str) -> None:
    stored = Memory(blocks_of(plain_of(1000 * 64), [1000] * 64, mode))
    decrypted = MindSporeDecrypted(stored, KEY, mode)
    assert stored.bytes_read < 1300
    stored.bytes_read = 0
    read(decrypted, 30_500, 100)
    assert stored.bytes_read < 1100


@pytest.mark.parametrize("mode", MODES)
def test_reading_in_file_order_reads_each_block_once(mode: str) -> None:
    stored = Memory(blocks_of(plain_of(64_000), [1000] * 64, mode))
    decrypted = MindSporeDecrypted(stored, KEY, mode)
    stored.bytes_read = 0
    for start in range(0, 64_000, 320):
        read(decrypted, start, 320)
    assert stored.bytes_read <= stored.size


@pytest.mark.parametrize("mode", MODES)
def test_several_threads_read_the_same_bytes(mode: str) -> None:
    plain = plain_of(64_000)
    decrypted = MindSporeDecrypted(Memory(blocks_of(plain, [1000] * 64, mode)), KEY, mode)
    starts = [int(i) for i in np.random.default_rng(3).integers(0, 60_000, 400)]
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda start: read(decrypted, start, 2500), starts))
    assert parts == [plain[start : start + 2500] for start in starts]


def forged(at: int, field: str, value: int, mode: str) -> bytes:
    """Two blocks of 64 plain bytes; a field of one of the headers replaced."""
    stored = bytearray(blocks_of(plain_of(128), [64, 64], mode))
    struct.pack_into(field, stored, at, value)
    return bytes(stored)


GCM_BLOCK, CBC_BLOCK = 48 + 64, 32 + 80


@pytest.mark.parametrize(
    ("data", "mode", "offset"),
    [
        pytest.param(forged(20, "<i", 25 + 64, "AES-GCM"), "AES-GCM", 0, id="block-length"),
        pytest.param(forged(24, "<i", 12, "AES-GCM"), "AES-GCM", 0, id="iv-length"),
        pytest.param(forged(44, "<i", 65, "AES-GCM"), "AES-GCM", 0, id="cipher-length"),
        pytest.param(forged(4, "<i", -1, "AES-CBC"), "AES-CBC", 0, id="negative-block-length"),
        pytest.param(forged(8, "<i", 0, "AES-CBC"), "AES-CBC", 0, id="cbc-iv-length"),
        pytest.param(forged(28, "<i", 2**31 - 1, "AES-CBC"), "AES-CBC", 0, id="cipher-length-of-gigabytes"),
        pytest.param(
            forged(GCM_BLOCK, "<I", 0x7F3A5ED9, "AES-GCM"), "AES-GCM", GCM_BLOCK, id="other-mode-later"
        ),
        pytest.param(
            forged(GCM_BLOCK + 44, "<i", 1, "AES-GCM"), "AES-GCM", GCM_BLOCK, id="later-cipher-length"
        ),
        pytest.param(
            forged(0, "<I", 0x7F3A5ED8, "AES-GCM")[: GCM_BLOCK + 47], "AES-GCM", GCM_BLOCK, id="cut-header"
        ),
        pytest.param(forged(0, "<I", 0x7F3A5ED8, "AES-GCM")[:-1], "AES-GCM", GCM_BLOCK, id="cut-ciphertext"),
        pytest.param(
            forged(0, "<I", 0x7F3A5ED9, "AES-CBC") + b"x", "AES-CBC", 2 * CBC_BLOCK, id="appended-byte"
        ),
        pytest.param(
            struct.pack("<Iii16si", 0x7F3A5ED9, 24, 16, bytes(16), 0), "AES-CBC", 0, id="no-ciphertext"
        ),
        pytest.param(
            struct.pack("<Iii16si", 0x7F3A5ED9, 24 + 17, 16, bytes(16), 17) + bytes(17),
            "AES-CBC",
            0,
            id="not-whole",
        ),
        pytest.param(
            struct.pack("<Iii16si", 0x7F3A5ED9, -8, 16, bytes(16), -32) + bytes(64),
            "AES-CBC",
            0,
            id="negative",
        ),
        pytest.param(
            struct.pack("<I16sii16si", 0x7F3A5ED8, bytes(16), 24 + 2**26 + 1, 16, bytes(16), 2**26 + 1)
            + bytes(2**26 + 1),
            "AES-GCM",
            0,
            id="larger-than-mindspore-reads",
        ),
    ],
)
def test_header_that_cannot_be_true_is_malformed(data: bytes, mode: str, offset: int) -> None:
    with pytest.raises(MalformedError, match=rf"memory.ckpt: byte {offset}: ") as caught:
        MindSporeDecrypted(Memory(data), KEY, mode)
    assert caught.value.offset == offset


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        pytest.param([48, 12, 84, 48], "AES-GCM", id="gcm-length"),
        pytest.param([48, 40, 70, 48], "AES-CBC", id="cbc-length"),
        pytest.param([48, 50, 48], "AES-CBC", id="cbc-padding"),
    ],
)
def test_uneven_block_between_even_ends_is_an_error_when_it_is_read(sizes: list[int], mode: str) -> None:
    plain = plain_of(sum(sizes))
    decrypted = MindSporeDecrypted(Memory(blocks_of(plain, sizes, mode)), KEY, mode)
    assert read(decrypted, 0, 48) == plain[:48]
    with pytest.raises(DamagedError, match="byte 96"):
        read(decrypted, 48, 1)


@pytest.mark.parametrize("cut", [0, 1], ids=["whole-blocks", "parts"])
def test_changed_gcm_block_is_damage_at_its_offset(cut: int) -> None:
    stored = bytearray(blocks_of(plain_of(192), [64, 64, 64], "AES-GCM"))
    stored[GCM_BLOCK + 60] ^= 4
    decrypted = MindSporeDecrypted(Memory(bytes(stored)), KEY)
    assert read(decrypted, 0, 64 - cut) == plain_of(192)[: 64 - cut]
    with pytest.raises(DamagedError, match=f"block at byte {GCM_BLOCK} does not decrypt") as caught:
        read(decrypted, 64, 64 - cut)
    assert caught.value.offset == GCM_BLOCK
    assert read(decrypted, 128, 64 - cut) == plain_of(192)[128 : 192 - cut]


@pytest.mark.parametrize("block", [1, 2], ids=["middle", "last"])
def test_changed_cbc_padding_is_damage_at_its_offset(block: int) -> None:
    stored = bytearray(blocks_of(plain_of(192), [64, 64, 64], "AES-CBC"))
    stored[(block + 1) * CBC_BLOCK - 1] ^= 4
    with pytest.raises(DamagedError, match="does not decrypt") as caught:
        read(MindSporeDecrypted(Memory(bytes(stored)), KEY, "AES-CBC"), 64, 128)
    assert caught.value.offset == block * CBC_BLOCK


def test_changed_cbc_content_is_not_noticed_without_a_manifest() -> None:
    stored = bytearray(blocks_of(plain_of(192), [64, 64, 64], "AES-CBC"))
    stored[CBC_BLOCK + 40] ^= 4
    assert read(MindSporeDecrypted(Memory(bytes(stored)), KEY, "AES-CBC"), 0, 192) != plain_of(192)
