"""Continuing a run: from the newest checkpoint that every rank can use, at the next batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mindspore.dataset as ds
from mindspore import nn
from mindspore.train import Model

from swansong.errors import ConfigError, SwansongWarning
from swansong.mindspore.agreement import agreed, warn_of_other_series
from swansong.mindspore.content import RunRecord, trained_part
from swansong.mindspore.destination import checked_directory
from swansong.mindspore.loading import checked_key, checked_mode, checked_path, not_fitting, searched
from swansong.mindspore.parameters import fill, mismatches, named_state
from swansong.mindspore.position import ResumePoint, Resumption
from swansong.mindspore.ranks import Ranks
from swansong.mindspore.seeds import Seeds, gathered_seeds
from swansong.store import naming
from swansong.store.files import Files
from swansong.store.manifest import Manifest
from swansong.store.opening import Checkpoint, open_checkpoint
from swansong.store.workspace import Workspace
from swansong.store.writing import await_writers

_PATIENCE_S: Final = 120.0
"""How long a save of the job before is waited for."""
_POLL_S: Final = 0.1
_SEEDS: Final = ("mindspore.set_seed", "mindspore.dataset.config.set_seed")


def resume(
    model: Model,
    directory: str | Path,
    prefix: str,
    dataset: Any = None,
    *,
    ttp_directory: str | Path | None = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    allow_reshuffle: bool = False,
    exact_augmentation: bool = False,
    allow_fresh: bool = False,
) -> ResumePoint:
    """Load the newest checkpoint of series `prefix` into `model`, so that training goes on at the next batch.

        point = resume(model, "checkpoint", "LeNet5", dataset)
        if not point.finished(epochs):
            model.train(epochs, dataset, callbacks, initial_epoch=point.initial_epoch)

    `callbacks` must include a ModelCheckpoint, which sets MindSpore's step counter right; one with the same
    directory and prefix continues the series. The result is equal, bit for bit, to that of a run that was
    never disturbed, provided that the data pipeline repeats itself: the seeds of MindSpore and of its data
    sets must be set, and set as they were. Random operations in the pipeline repeat themselves only with
    `exact_augmentation=True`, which makes MindSpore replay what was seen (slower). Random operators in the
    network (dropout) do not, in MindSpore not even undisturbed. `dataset` may be left out at an epoch's end,
    if its order is the same in every epoch.

    `dataset` yields only what is left of it until training has begun: evaluate with another one meanwhile,
    and after a run that is `finished`.

    A new process is best: after an exception inside a network, PyNative mode runs networks twice per step.

    All ranks must call it; they take the newest that verifies on every one of them. Checkpoints that a fault
    left in `ttp_directory` count. What the job before still saves is waited for. Damaged ones are passed over
    with a SwansongWarning that names them.

    With an empty series, returns step 0 and path None. If there are checkpoints but none can be used, raises
    DamagedError or, if no manifest vouches for any, NotCommittedError, unless `allow_fresh`.

    Raises ConfigError if the order of the data cannot go on where it was (no seeds, other seeds, another
    number of ranks or of steps per epoch), unless `allow_reshuffle`, and for wrong arguments; LoadError if
    the checkpoint does not fit the network, or if another rank failed.
    """
    where = checked_directory(directory)
    key, mode = checked_key(dec_key), checked_mode(dec_mode)
    series, network, ranks = naming.checked_prefix(prefix), model.train_network, Ranks.current()
    _await_former(where, series, ttp_directory)
    found = agreed(ranks, searched(where, ttp_directory), series, key, allow_fresh=allow_fresh)
    if found is None or found.manifest is None:
        if (earlier := Resumption.pending(network)) is not None:
            earlier.settle(network)
        warn_of_other_series(searched(where, ttp_directory), series)
        return ResumePoint(0, 0, 0, None)
    step, now = found.manifest.step, gathered_seeds(ranks)

    def load() -> int:
        with open_checkpoint(found.path, key=key, mode=mode) as checkpoint:
            record = RunRecord.of(checkpoint)
            per_epoch = _steps_per_epoch(found.path, step, record, dataset)
            if not allow_reshuffle and (reasons := reshuffled(record, now, per_epoch)):
                raise ConfigError(
                    f"{found.path}: the data cannot go on in the order they were in: {'; '.join(reasons)}. "
                    "With allow_reshuffle=True training goes on all the same, not exactly"
                )
            restore(network, checkpoint, ranks.rank)
            return per_epoch

    per_epoch = ranks.together(load)
    _warn_of_losses(found.manifest, dataset, exact_augmentation)
    resumption = Resumption(
        found=found,
        directory=where,
        prefix=series,
        step=step,
        steps_per_epoch=per_epoch,
        dataset=dataset,
        fast_recovery=bool(ds.config.get_fast_recovery()) if exact_augmentation else None,
    )
    resumption.attach(network)
    return ResumePoint(step, step // per_epoch, (step - 1) % per_epoch + 1 if step else 0, found.path)


def reshuffled(record: RunRecord | None, now: tuple[Seeds, ...], per_epoch: int) -> list[str]:
    """Why the order of the data would not be the one that was begun, in words; empty if it would."""
    if record is None:
        return ["nothing is recorded of it"]
    reasons = []
    if len(record.seeds) != len(now):
        reasons.append(f"there were {len(record.seeds)} ranks, now there are {len(now)}")
    if record.steps_per_epoch != per_epoch:
        reasons.append(f"an epoch had {record.steps_per_epoch} steps, now it has {per_epoch}")
    for rank, (then, seeds) in enumerate(zip(record.seeds, now, strict=False)):
        for what, before, after in zip(_SEEDS, then, seeds, strict=True):
            if before is None:
                reasons.append(f"the run that saved had not called {what} (rank {rank})")
            elif before != after:
                reasons.append(f"{what} was {before} on rank {rank}, now it is {after}")
    return reasons


def restore(network: nn.Cell, checkpoint: Checkpoint, rank: int = 0) -> None:
    """Fill every Parameter and buffer of a rank's train network; nothing is changed if they do not fit, or if
    anything is damaged.

    Raises LoadError that lists what is missing, left over, or of another type or shape; DamagedError.
    """
    state, part = named_state(network), trained_part(checkpoint, rank)
    wrong = [f"{name}: not in the checkpoint" for name in state if name not in part]
    wrong += [f"{name}: not in the network" for name in part if name not in state]
    wrong += mismatches(state, part)
    if wrong:
        raise not_fitting(checkpoint.path, wrong)
    for name, tensor in checkpoint.each(part):
        fill(state[name], tensor)


def _await_former(where: Path, series: str, directory: str | Path | None) -> None:
    """Wait for what the job before may still be saving: its writer process and its controller outlive it."""
    await_writers(where, series, Files())
    if directory is None:
        return
    space, deadline = Workspace(checked_path(directory), Files()), time.monotonic() + _PATIENCE_S
    while space.busy:
        if time.monotonic() >= deadline:
            warnings.warn(
                f"{directory}: something is still being saved there after {_PATIENCE_S:g} s; it will not be "
                "resumed from",
                SwansongWarning,
                stacklevel=3,
            )
            return
        time.sleep(_POLL_S)


def random_operations(dataset: Any) -> list[str]:
    """Names of the random operations in a data pipeline; those inside functions cannot be seen."""
    pending = [dataset]
    names: set[str] = set()
    while pending:
        node = pending.pop()
        pending += getattr(node, "children", [])
        for operation in _operations(getattr(node, "operations", [])):
            if type(operation).__name__.startswith("Random"):
                names.add(type(operation).__name__)
    return sorted(names)


def _operations(given: Any) -> Iterator[Any]:
    for operation in given if isinstance(given, list | tuple) else [given]:
        yield operation
        yield from _operations(getattr(operation, "transforms", []))


def _steps_per_epoch(path: Path, step: int, record: RunRecord | None, dataset: Any) -> int:
    if dataset is not None and not (record is not None and record.sink):
        size = int(dataset.get_dataset_size())
        if size < 1:
            raise ConfigError("dataset: wanted one with at least one batch, got an empty one")
        return size
    if record is None:
        raise ConfigError(f"{path}: nothing is recorded of the data; pass the data set to resume")
    if dataset is None and step % record.steps_per_epoch:
        raise ConfigError(
            f"{path}: step {step} is in the middle of an epoch of {record.steps_per_epoch} steps; "
            "pass the data set to resume, so that it can skip what was seen"
        )
    return record.steps_per_epoch


def _warn_of_losses(manifest: Manifest, dataset: Any, exact_augmentation: bool) -> None:
    """Say what will not be as it would have been."""
    losses = [f"{entry.get('what')}: {entry.get('reason')}" for entry in manifest.inexact]
    if dataset is None:
        losses.append("order of the data: no data set was given, so it begins as in the first epoch")
    elif not exact_augmentation and (names := random_operations(dataset)):
        losses.append(f"{', '.join(names)} in the data pipeline: only with exact_augmentation=True")
    for loss in losses:
        warnings.warn(f"{manifest.name}: not continued exactly: {loss}", SwansongWarning, stacklevel=3)
