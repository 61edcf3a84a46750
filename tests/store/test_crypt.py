"""Keys and sealed files, against the primitives themselves: what is written, and what is refused."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  to see that a key does not get through it
import struct
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from hypothesis import given
from hypothesis import strategies as st

from store_support import KEY, OTHER_KEY, Memory, hkdf
from swansong.errors import ConfigError, DamagedError, MalformedError
from swansong.store import crypt
from swansong.store.checkpoint import SaveOptions
from swansong.store.crypt import Key, PieceMac, SealedEncoding, Unsealed
from swansong.store.pieces import PIECE
from swansong.store.source import read

SALT = bytes(range(16))
STEP = PIECE - 16
"""Plain bytes of a sealed piece."""


def noise(size: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(7).bytes(size), np.uint8)


def seal(plain: np.ndarray, key: Key = KEY, salt: bytes = SALT) -> list[bytes]:
    """A sealed file's pieces, as the writer makes them."""
    encoding = SealedEncoding(key, salt)
    count = -(-len(plain) // STEP)
    out = np.empty(PIECE, np.uint8)
    pieces = []
    for index in range(count):
        length = encoding.encode(index, index == count - 1, plain[index * STEP : (index + 1) * STEP], out)
        pieces.append(out[:length].tobytes())
    return pieces


def unseal(pieces: list[bytes], key: Key = KEY, salt: bytes = SALT) -> bytes:
    source = Unsealed(Memory(b"".join(pieces)), key, salt)
    return read(source, 0, source.size)


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """Three pieces, the last one short."""
    return noise(2 * STEP + 1000)


@pytest.fixture(scope="module")
def pieces(plain: np.ndarray) -> list[bytes]:
    return seal(plain)


# -- derivation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 24, 32])
def test_derived_keys_are_those_of_rfc_5869(size: int) -> None:
    material = bytes(range(size))
    assert Key(material).derive(SALT, "file") == hkdf(material, SALT, b"swansong/1 file")
    assert Key(material).check_value(SALT) == hkdf(material, SALT, b"swansong/1 key check")[:8].hex()


def test_this_hkdf_itself_gives_the_first_vector_of_rfc_5869() -> None:
    assert hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42) == bytes.fromhex(
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_every_purpose_and_every_salt_has_a_key_of_its_own() -> None:
    purposes = ("file", "piece mac", "manifest", "manifest mac", "key check")
    keys = {KEY.derive(salt, purpose) for salt in (SALT, bytes(16)) for purpose in purposes}
    assert len(keys) == 10
    assert crypt.new_salt() != crypt.new_salt()
    assert len(crypt.new_salt()) == crypt.SALT


# -- sealed files --------------------------------------------------------------------------------------------


def test_a_piece_is_aes_gcm_under_the_files_key_with_its_number_as_nonce(
    plain: np.ndarray, pieces: list[bytes]
) -> None:
    cipher = AESGCM(hkdf(KEY.material, SALT, b"swansong/1 file"))
    for index, piece in enumerate(pieces):
        nonce = struct.pack(">QI", index, index == 2)
        want = plain[index * STEP : (index + 1) * STEP].tobytes()
        assert cipher.decrypt(nonce, piece, SALT + nonce) == want
    assert [len(piece) for piece in pieces] == [PIECE, PIECE, 1016]


@pytest.mark.parametrize("size", [0, 1, 15, 16, STEP - 1, STEP, STEP + 1], ids=str)
def test_any_size_comes_back(size: int) -> None:
    content = noise(size)
    sealed = seal(content)
    assert sum(map(len, sealed)) == SealedEncoding(KEY, SALT).stored_size(size)
    assert unseal(sealed) == content.tobytes()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1), (STEP - 1, 2), (STEP, STEP), (5, 2 * STEP), (2 * STEP, 1000), (2 * STEP + 1000, 0)],
    ids=str,
)
def test_any_range_can_be_read(plain: np.ndarray, pieces: list[bytes], offset: int, length: int) -> None:
    source = Unsealed(Memory(b"".join(pieces)), KEY, SALT)
    assert read(source, offset, length) == plain[offset : offset + length].tobytes()


def test_reading_in_order_decrypts_each_piece_once(pieces: list[bytes]) -> None:
    stored = Memory(b"".join(pieces))
    source = Unsealed(stored, KEY, SALT)
    for offset in range(0, source.size - 1, STEP // 4):
        read(source, offset, min(STEP // 4, source.size - offset))
    assert stored.reads == [(0, PIECE), (PIECE, PIECE), (2 * PIECE, 1016)]


def test_a_range_outside_is_refused(pieces: list[bytes]) -> None:
    source = Unsealed(Memory(b"".join(pieces)), KEY, SALT)
    for offset, length in ((-1, 1), (source.size, 1), (0, source.size + 1)):
        with pytest.raises(MalformedError, match="wanted bytes"):
            read(source, offset, length)


def _flipped(pieces: list[bytes]) -> list[bytes]:
    return [pieces[0], pieces[1][:-1] + bytes([pieces[1][-1] ^ 1]), pieces[2]]


@pytest.mark.parametrize(
    ("change", "offset"),
    [
        (lambda p: [p[1], p[0], p[2]], 0),
        (lambda p: [p[1], p[2]], 0),
        (lambda p: [p[0], p[2]], PIECE),
        (lambda p: [p[0], p[1]], PIECE),
        (lambda p: [p[0], p[0], p[2]], PIECE),
        (lambda p: [p[0], p[1], p[1], p[2]], 2 * PIECE),
        (lambda p: [*p[:2], p[2][:-1]], 2 * PIECE),
        (lambda p: [*p, p[2]], 2 * PIECE),
        (lambda p: [p[0], p[1][:-1] + bytes([p[1][-1] ^ 1]), p[2]], PIECE),
    ],
    ids=[
        *("exchanged", "first dropped", "one dropped", "last dropped", "one twice", "one inserted"),
        *("cut", "last twice", "bit flipped"),
    ],
)
def test_pieces_that_are_not_all_there_in_order_do_not_authenticate(
    pieces: list[bytes], change: Callable[[list[bytes]], list[bytes]], offset: int
) -> None:
    with pytest.raises(DamagedError, match="does not authenticate") as caught:
        unseal(change(pieces))
    assert caught.value.offset == offset
    assert caught.value.file == "memory"


def test_a_piece_of_another_file_does_not_authenticate(pieces: list[bytes], plain: np.ndarray) -> None:
    other = seal(plain, salt=bytes(16))
    with pytest.raises(DamagedError, match="at byte 0 does not authenticate"):
        unseal([other[0], *pieces[1:]])


@pytest.mark.parametrize("key", [OTHER_KEY, Key(KEY.material[:16])], ids=["same size", "its first half"])
def test_another_key_does_not_open_a_file(pieces: list[bytes], key: Key) -> None:
    with pytest.raises(DamagedError, match="does not authenticate"):
        unseal(pieces, key)


@pytest.mark.parametrize("size", [1, 15, 16, PIECE + 1, PIECE + 16], ids=str)
def test_a_size_that_no_sealed_file_has_is_refused_at_once(size: int) -> None:
    with pytest.raises(MalformedError, match="not the size of a sealed file"):
        Unsealed(Memory(bytes(size)), KEY, SALT)


def test_check_proves_a_piece_and_gives_its_stored_length(pieces: list[bytes]) -> None:
    source = Unsealed(Memory(b"".join(_flipped(pieces))), KEY, SALT)
    assert (source.check(0), source.check(2)) == (PIECE, 1016)
    with pytest.raises(DamagedError, match=f"at byte {PIECE} does not authenticate"):
        source.check(1)


# -- codes of pieces and messages ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4097], ids=str)
def test_the_code_of_a_piece_is_a_gmac_with_its_number_as_nonce(size: int) -> None:
    piece = noise(size)
    encryptor = Cipher(
        AES(hkdf(KEY.material, SALT, b"swansong/1 piece mac")), GCM(struct.pack(">QI", 3, 1))
    ).encryptor()
    encryptor.authenticate_additional_data(piece.tobytes())
    encryptor.finalize()
    assert PieceMac(KEY, SALT)(3, True, piece) == encryptor.tag.hex()


def test_the_code_of_a_piece_depends_on_place_file_and_key() -> None:
    piece = noise(100)
    codes = {
        PieceMac(key, salt)(index, last, piece)
        for key in (KEY, OTHER_KEY)
        for salt in (SALT, bytes(16))
        for index in (0, 1)
        for last in (False, True)
    }
    assert len(codes) == 16


@given(st.binary(max_size=200), st.binary(max_size=20), st.data())
def test_a_sealed_message_opens_only_as_it_was_sealed(
    message: bytes, associated: bytes, data: st.DataObject
) -> None:
    key = bytes(32)
    sealed = crypt.seal_message(key, message, associated)
    assert crypt.open_message(key, sealed, associated) == message
    assert crypt.open_message(key, sealed, associated + b"x") is None
    assert crypt.open_message(bytes(31) + b"x", sealed, associated) is None
    at = data.draw(st.integers(0, len(sealed) - 1))
    assert crypt.open_message(key, sealed[:at], associated) is None
    changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
    assert crypt.open_message(key, changed, associated) is None


@pytest.mark.parametrize(
    ("got", "equal"), [("ab", True), ("aB", False), ("", False), ("é", False), ("\ud800", False)]
)
def test_codes_of_any_text_can_be_compared(got: str, equal: bool) -> None:
    assert crypt.same_mac("ab", got) is equal


# -- secrecy -------------------------------------------------------------------------------------------------

SECRET = b"hunter2-hunter2-hunter2-hunter2-"


@pytest.mark.parametrize(
    "show",
    [
        repr,
        str,
        "{}".format,
        "{!r:>80}".format,
        lambda key: "%s %r" % (key, key),  # noqa: UP031
        lambda key: repr([key]),
        lambda key: repr(SaveOptions(key=key)),
        lambda key: repr(PieceMac(key, SALT)),
        lambda key: repr(SealedEncoding(key, SALT)),
        lambda key: repr(Unsealed(Memory(b""), key, SALT)),
    ],
    ids=["repr", "str", "format", "format !r", "%", "in a list", "options", "mac", "encoding", "source"],
)
def test_a_keys_bytes_are_never_shown(show: Callable[[Key], str]) -> None:
    shown = show(Key(SECRET))
    assert SECRET.decode() not in shown
    assert "hunter2" not in shown
    assert SECRET.hex()[:8] not in shown


@pytest.mark.parametrize(
    "take",
    [
        *(lambda key, n=n: pickle.dumps(key, n) for n in range(pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_a_key_is_not_copied_out(take: Callable[[Key], object]) -> None:
    with pytest.raises(TypeError, match="not copied"):
        take(Key(SECRET))


@pytest.mark.parametrize(
    "material",
    [b"", SECRET[:15], SECRET[:17], SECRET + b"x", SECRET.decode(), bytearray(SECRET), None],
    ids=["empty", "15", "17", "33", "str", "bytearray", "None"],
)
def test_what_cannot_be_a_key_is_refused_without_showing_it(material: object) -> None:
    with pytest.raises(ConfigError, match="key: wanted") as caught:
        Key(material)  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)
