"""The commit record: what a checkpoint is, where its bytes lie, and how to tell that they are the right ones.

A manifest is one JSON document whose last 130 bytes are a tail of fixed form:

    ,"tail":{"mac":<"64 hex digits", or null and 62 spaces>,"xxh3_128":"<32 hex digits>"}}<newline>

The HMAC-SHA256, present when a key is set, covers the raw bytes before the tail; the digest covers these and
the tail's own up to the comma before "xxh3_128", so that a flipped bit shows without a key. With a key,
the fields in SEALED_FIELDS are replaced by one field "sealed" (base64 of nonce, ciphertext, tag); the rest
stay readable, so that listing, ordering and digest checks need no key. An unknown field is ignored, a higher
major version refused. docs/format.md is normative.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
import xxhash

from swansong.errors import (
    DamagedError,
    DigestMismatchError,
    MalformedError,
    NotSupportedError,
    UnauthenticatedError,
    WrongKeyError,
)
from swansong.store import clock, crypt, naming
from swansong.store.crypt import Key
from swansong.store.pieces import PIECE

FORMAT: Final = "swansong/1"
MANIFEST_START: Final = b'{"format":"swansong/'
"""What every manifest begins with."""
SIZE_LIMIT: Final = 1 << 29
"""Bytes of the largest manifest that is read."""
SEALED_FIELDS: Final = (
    "boundary_step",
    "software",
    "components",
    "tensors",
    "aliases",
    "objects",
    "rank_objects",
    "append_info",
    "inexact",
)

_TAIL: Final = re.compile(
    rb',"tail":\{"mac":(?:"(?P<mac>[0-9a-f]{64})"|null {62}),"xxh3_128":"(?P<digest>[0-9a-f]{32})"\}\}\n'
)
TAIL_SIZE: Final = 130
_UNCOVERED: Final = 49
"""Bytes at the end that the digest does not cover: itself and what encloses it."""
_VERSION: Final = re.compile(r"swansong/(?P<major>[1-9]\d{0,8})(\.\d+)?", re.ASCII)

_FileName = Annotated[
    str, msgspec.Meta(pattern=rf"^({re.escape(naming.CONTROL)}/|rank_[0-9]+/)?(?!\.{{1,2}}\Z)[^/\x00]+\Z")
]
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_PieceSize = Annotated[int, msgspec.Meta(ge=1, le=PIECE)]
_Salt = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * crypt.SALT}}}\Z")]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One data file."""

    name: _FileName
    """Relative to the directory that holds the checkpoint; for a native directory, to that one, or to a
    directory `rank_{r}` in it. Leads nowhere else."""
    size: _Size
    """Stored bytes."""
    piece: _PieceSize
    """Stored bytes per digest; the last piece may be shorter."""
    digests: list[str]
    """xxh3_128 of each stored piece, hexadecimal."""
    scheme: str = "none"
    """"none", "sealed", "mindspore-AES-GCM" or "mindspore-AES-CBC"."""
    salt: _Salt | None = None
    """Hexadecimal; set if the file is encrypted."""
    macs: list[str] | None = None
    """GMAC of each stored piece, for schemes that do not bind their blocks together."""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Where a box of a tensor lies."""

    file: int
    """Index into `files`."""
    ranges: list[tuple[int, int]]
    """Runs [start, stop) of the file's plain bytes, to be joined in order."""
    offset: tuple[int, ...] | None = None
    """Where the box begins in the tensor; None: the chunk is the whole tensor."""
    shape: tuple[int, ...] | None = None
    """The box's shape; None: the whole tensor's."""


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, by its logical type and global shape."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest itself was sealed with."""

    salt: _Salt
    check: str
    """Tells a wrong key from damage; says nothing about the key."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What manifests and parts have in common: data files, and what lies where in them."""

    format: str = FORMAT
    id: str
    """The checkpoint's identity."""
    files: list[FileRecord]
    key: KeyRecord | None = None
    sealed: str | None = None
    tensors: dict[str, TensorRecord] = {}
    aliases: dict[str, str] = {}
    objects: dict[str, Any] | None = None
    inexact: list[dict[str, Any]] = []

    @property
    def readable(self) -> bool:
        """False if the sealed fields were not opened (no key given); they then have their defaults."""
        return self.sealed is None

    @property
    def nbytes(self) -> int:
        """Stored bytes of all data files."""
        return sum(record.size for record in self.files)


class Manifest(Document, frozen=True, kw_only=True):
    """A checkpoint's commit record. Field meanings: docs/format.md, section 4."""

    name: str
    container: str
    series: str
    stem: str
    seq: int
    kind: str
    run: str
    parent: str | None = None
    step: int
    epoch: int | None = None
    step_in_epoch: int | None = None
    world_size: int = 1
    created: str
    boundary_step: int | None = None
    software: dict[str, str] = {}
    components: list[dict[str, Any]] = []
    rank_objects: dict[str, Any] = {}
    append_info: Any = None


class Part(Document, frozen=True, kw_only=True):
    """What one of several writers contributed."""

    generation: int
    attempt: int
    rank: int
    components: dict[str, list[str]] = {}
    """Component key -> names of its tensors, for a committer that takes some components of a part."""
    append_info: Any = None
    """What its .ckpt has besides tensors."""


class _Version(msgspec.Struct):
    format: str = ""


SomeDocument = TypeVar("SomeDocument", bound=Document)


def attach_tail(body: bytes, mac_key: bytes | None) -> bytes:
    """Close a JSON object (given whole, as bytes ending in "}") with the tail."""
    head = body[:-1]
    mac = f'"{crypt.message_mac(mac_key, head)}"' if mac_key is not None else "null" + " " * 62
    covered = head + f',"tail":{{"mac":{mac}'.encode()
    return covered + f',"xxh3_128":"{xxhash.xxh3_128_hexdigest(covered)}"}}}}\n'.encode()


def detach_tail(raw: bytes, path: str) -> tuple[bytes, str | None]:
    """Check length, form and digest; return the JSON object without its tail, and the MAC."""
    head, tail = raw[:-TAIL_SIZE], raw[-TAIL_SIZE:]
    match = _TAIL.fullmatch(tail)
    if match is None:
        raise MalformedError(
            f"{path}: wanted a manifest that ends with its digest, found {_shown(tail)}; it was cut short, "
            "changed, or is not a manifest",
            path=path,
            file=path,
            offset=max(0, len(raw) - TAIL_SIZE),
        )
    want, got = match["digest"].decode(), xxhash.xxh3_128_hexdigest(raw[:-_UNCOVERED])
    if want != got:
        raise DigestMismatchError(
            f"{path}: the manifest's own digest is {want}, its bytes give {got}; it was changed",
            path=path,
            file=path,
            offset=0,
            want=want,
            got=got,
        )
    mac = match["mac"]
    return head + b"}", mac.decode() if mac is not None else None


def encode(document: Document, key: Key | None) -> bytes:
    """The bytes of a manifest or part; with a key, sealed and authenticated."""
    if key is None:
        return attach_tail(msgspec.json.encode(document), None)
    fields = msgspec.to_builtins(document)
    salt = crypt.new_salt()
    private = {name: fields.pop(name) for name in SEALED_FIELDS if name in fields}
    fields["key"] = {"salt": salt.hex(), "check": key.check_value(salt)}
    box = crypt.seal_message(key.derive(salt, "manifest"), msgspec.json.encode(private), document.id.encode())
    fields["sealed"] = base64.b64encode(box).decode()
    return attach_tail(msgspec.json.encode(fields), key.derive(salt, "manifest mac"))


def decode(raw: bytes, path: str, key: Key | None = None) -> Manifest:
    """Read and check a manifest.

    Without a key, a sealed manifest's public fields (`readable` is then False). Raises MalformedError,
    DigestMismatchError, NotSupportedError (a higher major version), WrongKeyError, UnauthenticatedError (a
    key was given and the manifest is not sealed), DamagedError (it is, and does not authenticate).
    """
    found = _decode(raw, path, key, Manifest)
    try:
        clock.from_iso(found.created)
    except (ValueError, OverflowError):
        raise MalformedError(
            f"{path}: created: no time: {_shown(found.created)}", path=path, file=path
        ) from None
    return found


def decode_part(raw: bytes, path: str, key: Key | None = None) -> Part:
    """Read and check a part. Errors as `decode`."""
    return _decode(raw, path, key, Part)


def _decode(raw: bytes, path: str, key: Key | None, kind: type[SomeDocument]) -> SomeDocument:
    body, mac = detach_tail(raw, path)
    _check_version(body, path)
    try:
        document = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(
            f"{path}: not a {kind.__name__.lower()} of format {FORMAT}: {error}", path=path, file=path
        ) from None
    _check_key(document.key, mac, body, path, key)
    if key is None or document.sealed is None or document.key is None:
        return document
    try:
        return _unseal(document, document.sealed, bytes.fromhex(document.key.salt), path, key)
    except msgspec.MsgspecError as error:
        raise MalformedError(f"{path}: its sealed part: {error}", path=path, file=path) from None


def _check_key(record: KeyRecord | None, mac: str | None, body: bytes, path: str, key: Key | None) -> None:
    """Check a document's authentication code, if a key is given. See `decode`."""
    if key is None:
        return
    if record is None or mac is None:
        raise UnauthenticatedError(
            f"{path}: a key was given, but this was saved without one, so nothing proves who wrote it; "
            "load it without a key if you trust it",
            path=path,
        )
    salt = bytes.fromhex(record.salt)
    if not crypt.same_mac(record.check, key.check_value(salt)):
        raise WrongKeyError(f"{path}: saved with another key than the one given", path=path)
    if not crypt.same_mac(mac, crypt.message_mac(key.derive(salt, "manifest mac"), body[:-1])):
        raise DamagedError(
            f"{path}: the manifest does not authenticate; it was changed", path=path, file=path
        )


def _unseal(document: SomeDocument, sealed: str, salt: bytes, path: str, key: Key) -> SomeDocument:
    try:
        box = base64.b64decode(sealed, validate=True)
    except binascii.Error:
        box = b""
    private = crypt.open_message(key.derive(salt, "manifest"), box, document.id.encode())
    if private is None:
        raise DamagedError(
            f"{path}: the sealed part of the manifest does not authenticate", path=path, file=path
        )
    opened = msgspec.json.decode(private, type=dict[str, Any])
    return msgspec.convert(msgspec.to_builtins(document) | opened | {"sealed": None}, type(document))


def _check_version(body: bytes, path: str) -> None:
    try:
        found = msgspec.json.decode(body, type=_Version).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"{path}: not a manifest: {error}", path=path, file=path) from None
    version = _VERSION.fullmatch(found)
    if version is None:
        raise MalformedError(
            f"{path}: wanted a manifest of format {FORMAT}, found {_shown(found)}", path=path, file=path
        )
    if int(version["major"]) > 1:
        raise NotSupportedError(
            f"{path}: written in format {found}, this release reads {FORMAT}; use a newer one"
        )


def _shown(raw: bytes | str) -> str:
    return repr(raw[:40]) + ("..." if len(raw) > 40 else "")
