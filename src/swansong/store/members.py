"""One data file of a committed directory, opened by itself: what its manifest says of that file alone."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from swansong.store import catalog, naming
from swansong.store import manifest as manifests
from swansong.store.crypt import Key
from swansong.store.manifest import Manifest


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that `path` is a file of, or else `path` itself. Errors as `manifest.decode`."""
    return path.parent.parent if path.is_file() and enclosing(path, None) is not None else path


def enclosing(path: Path, key: Key | None) -> Manifest | None:
    """The manifest of the checkpoint whose directory `rank_{r}` holds `path`, cut down to that file.

    None if there is no such checkpoint, or if it does not list the file. Of the tensors only those remain
    that lie in it as a whole, under the names that they have in it. Errors as `manifest.decode`.
    """
    if not naming.is_rank_directory(path.parent.name):
        return None
    base = path.parent.parent
    record = base / naming.MANIFEST
    try:
        raw = catalog.read_manifest(record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = manifests.decode(raw, str(record), key)
    name = f"{path.parent.name}/{path.name}"
    index = next((i for i, file in enumerate(manifest.files) if file.name == name), None)
    if index is None:
        return None
    scope = f"{path.parent.name}/"
    tensors = {
        tensor.removeprefix(scope): replace(entry, chunks=[replace(chunk, file=0) for chunk in entry.chunks])
        for tensor, entry in manifest.tensors.items()
        if all(chunk.file == index for chunk in entry.chunks)
    }
    aliases = {
        alias.removeprefix(scope): of.removeprefix(scope)
        for alias, of in manifest.aliases.items()
        if of.removeprefix(scope) in tensors
    }
    return replace(manifest, files=[manifest.files[index]], tensors=tensors, aliases=aliases)
