"""Opening one checkpoint to read it: from its manifest if it has one, else from what the container says.

What a manifest vouches for is read by the manifest alone, each byte digested before it is seen. A single
file without manifest (MindSpore's own, or one that was copied elsewhere) is parsed strictly and counts as
unverified.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from swansong.errors import (
    CheckpointNotFoundError,
    DamagedError,
    KeyNeededError,
    LoadError,
    MalformedError,
    NotCommittedError,
    SwansongError,
    SwansongWarning,
    UnauthenticatedError,
)
from swansong.state import tree
from swansong.state.boxes import Box
from swansong.state.dtypes import DTYPES
from swansong.store import catalog, members, naming, placement, safetensors
from swansong.store import manifest as manifests
from swansong.store.catalog import ATTEMPTS
from swansong.store.checkpoint import Mode
from swansong.store.ckpt import CkptReader
from swansong.store.ckpt_blocks import mode_of
from swansong.store.ckpt_cipher import MindSporeDecrypted, MindSporeEncoding, looks_encrypted
from swansong.store.crypt import Key, PieceMac, SealedEncoding, Unsealed
from swansong.store.manifest import FileRecord, Manifest, TensorRecord
from swansong.store.opened import Checkpoint
from swansong.store.source import PlainFile, Source, TensorEntry, open_regular
from swansong.store.stored import Placed, StoredTensor
from swansong.store.verified import Verified

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint", "open_file", "plain_source"]

_PATIENCE: Final = 100
"""Times that somebody may replace a checkpoint while it is being opened."""


def open_checkpoint(
    path: Path, *, key: Key | None = None, mode: Mode | None = None, verify: bool = True
) -> Checkpoint:
    """Open the checkpoint at `path`: a single file, a native directory, or what one rank wrote of such a one
    (`rank_{r}/...`), of which then only the tensors in that file are there.

    With `verify`, each byte is checked against its digest when it is read. `mode` matters only for
    an encrypted file without manifest; None means the mode that it says itself.

    Raises CheckpointNotFoundError, NotCommittedError (a directory without manifest), DamagedError (no
    manifest fits the file), KeyNeededError, WrongKeyError, UnauthenticatedError (a key was given, and the
    content is not sealed with it).
    """
    damaged = 0
    for _ in range(_PATIENCE):
        try:
            return _open_once(path, key, mode, verify)
        except _ReplacedError:
            continue
        except (DamagedError, CheckpointNotFoundError):
            damaged += 1
            if damaged == ATTEMPTS:
                raise
    raise LoadError(f"{path}: replaced {_PATIENCE} times while it was being opened", path=str(path))


def open_file(path: Path, stack: ExitStack) -> PlainFile:
    """Open a data file for reading until `stack` closes. Raises OSError, MalformedError (no regular file)."""
    descriptor = open_regular(path)
    stack.callback(os.close, descriptor)
    # Threads that take turns at pieces look like random access, for which the kernel would not read ahead.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return PlainFile(descriptor, str(path))


class _ReplacedError(Exception):
    """Somebody put another checkpoint in this one's place while it was being opened."""


def _open_once(path: Path, key: Key | None, mode: Mode | None, verify: bool) -> Checkpoint:
    before = _current(path)
    stack = ExitStack()
    try:
        checkpoint = _open(path, stack, key, mode, verify)
        if _current(path) != before:
            # The manifest that was found may be the next one's: it fits if both files have one size.
            raise _ReplacedError
        return checkpoint
    except BaseException as error:
        stack.close()
        if isinstance(error, DamagedError) and _current(path) != before:
            raise _ReplacedError from None
        if isinstance(error, SwansongError) or not isinstance(error, OSError):
            raise
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CheckpointNotFoundError(
                f"{path}: there is no such file or directory", path=str(path)
            ) from None
        raise LoadError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error


def _current(path: Path) -> tuple[int, int, int] | None:
    """What changes when a checkpoint is replaced: a directory's manifest, or the single file."""
    return catalog.identity(path / naming.MANIFEST) or catalog.identity(path)


def _open(path: Path, stack: ExitStack, key: Key | None, mode: Mode | None, verify: bool) -> Checkpoint:
    if path.is_dir():
        record = path / naming.MANIFEST
        try:
            raw = catalog.read_manifest(record)
        except FileNotFoundError:
            if not path.is_dir():
                raise  # pruned at this very moment
            raise NotCommittedError(
                f"{path}: not a committed checkpoint: there is no {naming.MANIFEST}", path=str(path)
            ) from None
        return _open_committed(path, path, manifests.decode(raw, str(record), key), stack, key, verify)
    data = open_file(path, stack)
    claims = catalog.sidecars(path.parent).get(path.name, [])
    claim, problem = catalog.match(data, claims)
    if claim is not None:
        raw = catalog.read_manifest(claim.path)
        manifest = manifests.decode(raw, str(claim.path), key)
        return _open_committed(path, path.parent, manifest, stack, key, verify, opened=data)
    if problem is not None:
        raise problem
    part = members.enclosing(path, key)
    if part is not None:
        return _open_committed(path, path.parent.parent, part, stack, key, verify, opened=data)
    return _open_foreign(path, data, stack, key, mode, verify)


def _open_committed(
    path: Path,
    base: Path,
    manifest: Manifest,
    stack: ExitStack,
    key: Key | None,
    verify: bool,
    opened: PlainFile | None = None,
) -> Checkpoint:
    if not manifest.readable:
        raise KeyNeededError(
            f"{path}: encrypted; give the key (dec_key, --key-file) to read it", path=str(path)
        )
    checkpoint = Checkpoint(path, manifest, stack)
    sources: list[Source] = []
    for index, record in enumerate(manifest.files):
        data = opened if index == 0 and opened is not None else _open_listed(base / record.name, stack)
        sources.append(plain_source(data, record, manifest, index, key, verify=verify))
    placement.check(path, manifest, [source.size for source in sources])
    if verify:
        # No tensor's read will ever meet these. A byte of a piece cannot be had without checking all of it.
        for index, (record, source) in enumerate(zip(manifest.files, sources, strict=True)):
            for offset in placement.bare_pieces(manifest, index, source.size, _plain_piece(record)):
                source.read_into(offset, np.empty(1, np.uint8))
    single = manifest.container != "directory"
    for name, tensor in manifest.tensors.items():
        stored = _stored(name, tensor, sources)
        beside = single and any(chunk.file > 0 for chunk in tensor.chunks)
        (checkpoint.rest if beside else checkpoint.entries)[name] = stored
    for alias, name in manifest.aliases.items():
        if name in checkpoint.entries:
            checkpoint.entries[alias] = checkpoint.entries[name]
    objects = manifest.objects or {}
    checkpoint.objects = _plain(objects.get("extra"), path, checkpoint.entries)
    checkpoint.append_info = _plain(manifest.append_info, path, {})
    return checkpoint


def _open_listed(path: Path, stack: ExitStack) -> PlainFile:
    try:
        return open_file(path, stack)
    except FileNotFoundError:
        raise MalformedError(
            f"{path}: missing, though the manifest lists it", path=str(path), file=str(path)
        ) from None


def plain_source(
    data: Source, record: FileRecord, manifest: Manifest, index: int, key: Key | None, *, verify: bool = True
) -> Source:
    """The plain bytes of a committed data file, checked and decrypted on the way.

    Raises KeyNeededError, MalformedError (a size that the manifest contradicts).
    """
    stored: Source = data
    salt = bytes.fromhex(record.salt) if record.salt else b""
    mac = PieceMac(key, salt) if key is not None and record.macs is not None else None
    if verify or mac is not None:  # who gives a key is never given what it does not authenticate
        stored = Verified(data, record, placement.names_in(manifest, index), mac)
    if record.scheme == "none":
        return stored
    if key is None:
        raise KeyNeededError(
            f"{data.path}: encrypted; give the key (dec_key, --key-file) to read it", path=data.path
        )
    if record.scheme == "sealed":
        return Unsealed(stored, key, salt)
    return MindSporeDecrypted(stored, key.material, _mode_of(record.scheme, data.path))


def _plain_piece(record: FileRecord) -> int:
    """Plain bytes in every piece of a file but the last."""
    if record.scheme == "none":
        return record.piece
    return SealedEncoding.plain_piece if record.scheme == "sealed" else MindSporeEncoding.plain_piece


def _stored(name: str, tensor: TensorRecord, sources: list[Source]) -> StoredTensor:
    """A tensor as the manifest places it, after `placement.check`."""
    dtype = DTYPES[tensor.dtype]
    placed = []
    for chunk in tensor.chunks:
        shape = tensor.shape if chunk.shape is None else chunk.shape
        box = None if chunk.offset is None else Box(chunk.offset, shape)
        entry = TensorEntry(name, dtype, shape, tuple(chunk.ranges))
        placed.append(Placed(entry, sources[chunk.file], box))
    return StoredTensor(name, dtype, tensor.shape, tuple(placed))


def _whole(entry: TensorEntry, source: Source) -> StoredTensor:
    return StoredTensor(entry.name, entry.dtype, entry.shape, (Placed(entry, source, None),))


def _open_foreign(
    path: Path, data: PlainFile, stack: ExitStack, key: Key | None, mode: Mode | None, verify: bool
) -> Checkpoint:
    checkpoint = Checkpoint(path, None, stack)
    if path.suffix == ".safetensors":
        if key is not None:
            raise UnauthenticatedError(
                f"{path}: a key was given, but this file is not encrypted", path=str(path)
            )
        for name, entry in safetensors.scan(data).entries.items():
            checkpoint.entries[name] = _whole(entry, data)
        return checkpoint
    source: Source = data
    if looks_encrypted(data):
        if key is None:
            raise KeyNeededError(
                f"{path}: encrypted; give the key (dec_key, --key-file) to read it", path=str(path)
            )
        own = "AES-CBC" if mode_of(data) == "AES-CBC" else "AES-GCM"
        source = MindSporeDecrypted(data, key.material, mode or own)
        unseen = "no changed byte" if mode_of(data) == "AES-CBC" else "no missing, repeated or moved block"
        warnings.warn(
            f"{path}: decrypted, but no manifest vouches for it: {unseen} would be noticed",
            SwansongWarning,
            stacklevel=5,
        )
    elif key is not None:
        raise UnauthenticatedError(f"{path}: a key was given, but this file is not encrypted", path=str(path))
    reader = CkptReader(source)
    if verify:
        reader.verify_crc()
    for name, entry in reader.entries.items():
        checkpoint.entries[name] = _whole(entry, source)
    checkpoint.append_info = dict(reader.strings)
    return checkpoint


def _mode_of(scheme: str, path: str) -> Mode:
    modes: Mapping[str, Mode] = {"mindspore-AES-GCM": "AES-GCM", "mindspore-AES-CBC": "AES-CBC"}
    if scheme not in modes:
        raise MalformedError(f"{path}: encrypted by {scheme!r}, which this release does not know", path=path)
    return modes[scheme]


def _plain(skeleton: Any, path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    if skeleton is None:
        return {}
    value = tree.unflatten(skeleton, tensors)
    if not isinstance(value, dict):
        raise MalformedError(
            f"{path}: wanted a dictionary in the manifest, found {type(value).__name__}", path=str(path)
        )
    return value
