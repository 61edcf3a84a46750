"""Reading what a checkpoint says of a training run in PyTorch."""

from __future__ import annotations

from pathlib import Path

from swansong.errors import CheckpointNotFoundError, LoadError
from swansong.persist.loading import Kept, structures_in
from swansong.store import catalog, naming
from swansong.store.crypt import Key
from swansong.store.latest import Examine, choose
from swansong.store.opening import Checkpoint
from swansong.torch.moved import Restored, own_of


def restored(checkpoint: Checkpoint, component: str, rank: int) -> Restored:
    """What a checkpoint says to one rank, all of it verified. `component` is the key of what it holds.

    Tensors show the page cache, or fresh memory if they are encrypted (see `Checkpoint.map_all`), and outlive
    the checkpoint. A job that has another number of replicas than the one that saved finds the only component
    all the same. Raises LoadError for a checkpoint that is none of a PyTorch run, or not of this component,
    and what `Checkpoint.map_all` raises.
    """
    path, manifest = checkpoint.path, checkpoint.manifest
    if manifest is None or not manifest.objects:
        raise LoadError(f"{path}: is no checkpoint of a protected PyTorch run", path=str(path))
    known = structures_in(manifest.objects.get("state"))
    structure = known.get(component) or (next(iter(known.values())) if len(known) == 1 else None)
    if structure is None:
        raise LoadError(
            f"{path}: does not hold what rank {rank} holds; is it another model, or number of ranks?",
            path=str(path),
        )
    tensors = checkpoint.map_all()
    kept = manifest.rank_objects.get(str(rank)) or {}
    own, alone, packed = own_of(kept.get("extra"), rank)
    shared = manifest.objects.get("extra") if alone is None else alone
    said = [entry for entry in manifest.inexact if entry.get("rank", rank) == rank]
    reasons = tuple(f"{entry.get('what', 'state')}: {entry.get('reason', '')}" for entry in said)
    return Restored(structure=structure, shared=shared, tensors=tensors | packed, own=own, inexact=reasons)


def any_restored(source: Path, prefix: str | None, *, key: Key | None) -> tuple[int, Restored]:
    """Step and content of a checkpoint, or of the newest that verifies in a directory of them.

    Raises LoadError, CheckpointNotFoundError.
    """
    with Kept(Checkpoint.map_all) as kept:
        native = (source / naming.MANIFEST).is_file()
        path = source if native else _newest(source, prefix, key, kept.examine)
        checkpoint = kept.open(path, key)
        step = checkpoint.manifest.step if checkpoint.manifest is not None else 0
        return step, restored(checkpoint, "", 0)


def _newest(directory: Path, prefix: str | None, key: Key | None, examine: Examine) -> Path:
    if not directory.is_dir():
        raise CheckpointNotFoundError(f"{directory}: there is nothing", path=str(directory))
    found = catalog.scan(directory)
    series = (
        {one.manifest.series for one in found if one.manifest is not None} if prefix is None else {prefix}
    )
    if len(series) > 1:
        raise LoadError(
            f"{directory}: has checkpoints of {', '.join(sorted(series))}; say which with prefix=",
            path=str(directory),
        )
    choice = choose([directory], next(iter(series)), key=key, examine=examine) if series else None
    if choice is None or choice.newest is None:
        raise CheckpointNotFoundError(f"{directory}: has no checkpoint that verifies", path=str(directory))
    choice.warn()
    return choice.newest.path
