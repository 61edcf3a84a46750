"""What is known of one checkpoint without reading its data, as plain values."""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from swansong.errors import KeyNeededError
from swansong.state.dtypes import DTYPES
from swansong.store import catalog
from swansong.store import manifest as manifests
from swansong.store.catalog import Found
from swansong.store.crypt import Key
from swansong.store.manifest import SEALED_FIELDS, Manifest
from swansong.store.opening import open_checkpoint

_NOT_SHOWN: Final = {"key", "sealed", "tensors"}
_FIELDS: Final = tuple(f.name for f in msgspec.structs.fields(Manifest) if f.name not in _NOT_SHOWN)
_FILE_FIELDS: Final = ("name", "size", "piece", "scheme")
_DIMENSIONS: Final = 64
"""As many as any framework's tensor has."""

Description = dict[str, Any]
"""As in JSON: "path", "state", "problem", "bytes", "encrypted", "sealed" (true: a key would show more), the
manifest's fields without digests, and "tensors". What is not known is None."""


def describe(found: Found, key: Key | None) -> Description:
    """Describe what stands in a directory.

    Raises LoadError for what cannot be read at all, WrongKeyError, UnauthenticatedError (a key was given, and
    the checkpoint is not sealed with it).
    """
    head = {"path": str(found.path), "state": found.state, "problem": found.problem, "bytes": found.nbytes}
    if found.manifest is None or found.manifest_path is None:
        return head | _from_container(found, key)
    if key is None:
        return head | _from_manifest(found.manifest)
    raw = catalog.read_manifest(found.manifest_path)
    return head | _from_manifest(manifests.decode(raw, str(found.manifest_path), key))


def _from_manifest(manifest: Manifest) -> Description:
    fields = msgspec.to_builtins(manifest)
    known: Description = {name: fields[name] for name in _FIELDS}
    known["files"] = [{name: file[name] for name in _FILE_FIELDS} for file in fields["files"]]
    known["append_info"] = _by_name(known["append_info"])
    if not manifest.readable:
        known |= dict.fromkeys(SEALED_FIELDS)
    tensors = [_tensor(name, record.dtype, record.shape) for name, record in manifest.tensors.items()]
    return {
        "encrypted": any(file.scheme != "none" for file in manifest.files),
        "sealed": not manifest.readable,
        **known,
        "tensors": tensors if manifest.readable else None,
    }


def _from_container(found: Found, key: Key | None) -> Description:
    """All that a file says which no manifest vouches for."""
    nothing: Description = dict.fromkeys(_FIELDS)
    try:
        with open_checkpoint(found.path, key=key, verify=False) as checkpoint:
            return {
                "encrypted": key is not None,
                "sealed": False,
                **nothing,
                "append_info": checkpoint.append_info,
                "tensors": [_tensor(name, t.dtype.name, t.shape) for name, t in checkpoint.entries.items()],
            }
    except KeyNeededError:
        return {"encrypted": True, "sealed": True, **nothing, "tensors": None}


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    element = DTYPES.get(dtype)
    # A manifest may claim any shape; multiplying a million sizes would take minutes.
    possible = (
        element is not None and len(shape) <= _DIMENSIONS and all(0 <= size < 1 << 63 for size in shape)
    )
    nbytes = math.prod(shape) * element.itemsize if element is not None and possible else None
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": nbytes}


def _by_name(skeleton: Any) -> Any:
    """A dictionary with names for keys, out of its tagged form (state.tree); its values stay as they are."""
    pairs = skeleton.get("dict") if isinstance(skeleton, dict) else None
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return skeleton
    return {str(name): value for name, value in pairs}
