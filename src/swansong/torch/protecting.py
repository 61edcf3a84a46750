"""The way into the adapter: `protect` and `load_state`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from swansong.config import CheckpointConfig
from swansong.engine.address import parse_address
from swansong.errors import ConfigError, NotSupportedError
from swansong.persist import job
from swansong.persist.saver import OnError
from swansong.persist.session import Plan
from swansong.policy.keep import KeepPolicy
from swansong.policy.save import SavePolicy
from swansong.store import naming
from swansong.store.crypt import Key
from swansong.torch.device_setup import sole_device
from swansong.torch.generators import Generators
from swansong.torch.loading import any_restored
from swansong.torch.moved import Moved
from swansong.torch.optimizers import check_optimizer
from swansong.torch.position import Feed
from swansong.torch.ranks import EVERYWHERE, Ranks, placement, unwrapped
from swansong.torch.run import Run
from swansong.torch.state import TrainingState
from swansong.torch.updates import Updates
from swansong.torch.vote import Vote
from swansong.ttp_options import TTPOptions


def protect(
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
    directory: str | Path,
    prefix: str,
    loader: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    also: Mapping[str, Any] | None = None,
    config: CheckpointConfig | None = None,
    save: SavePolicy | None = None,
    keep: KeepPolicy | None = None,
    key: bytes | None = None,
    ttp: str | None = None,
    replicas: str | None = None,
    options: TTPOptions | None = None,
    on_error: OnError = "raise",
    generators: Mapping[str, torch.Generator] | None = None,
    exact_augmentation: bool = False,
    incarnation: bytes | None = None,
    overlap: bool = False,
    when_busy: Literal["wait", "skip", "replace"] = "wait",
) -> Run:
    """Protect a training loop; use as `with protect(...) as run:`, on all ranks at the same place.

    `model` may be wrapped by DistributedDataParallel; several optimizers make one step together.
    `scheduler`, `scaler`, and whatever `also` names have `state_dict` and `load_state_dict`. All that is
    copied at every step, but for a torch.optim.swa_utils.AveragedModel, which is saved in place (its
    `update_parameters` belongs to the step), and other modules as long as nobody writes to them. `loader`
    feeds `run.batches()`, see `position.Feed`; `generators` and `exact_augmentation` are for it.

    `config`, or `save` and `keep`, say when to save and what stays (none of them: no periodic checkpoints),
    `on_error` what becomes of a periodic save that fails; `key`, 16, 24 or 32 bytes, encrypts (by default
    that of `config`). `ttp` is HOST:PORT of the controller, on rank 0's host (None: periodic checkpoints
    only).

    Who holds equal state is known for DistributedDataParallel; `replicas` declares it otherwise: "all" ranks,
    or a name that exactly the ranks of one group give. `incarnation`, 16 random bytes that are the same on
    all ranks and new at each start of the job, is exchanged through torch.distributed unless given.

    Raises ConfigError for arguments that cannot be, UnrepresentableError for state that cannot be saved,
    NotSupportedError.
    """
    if overlap or when_busy != "wait":
        raise NotSupportedError("overlap, when_busy: not supported yet; use overlap=False, when_busy='wait'")
    ranks, optimizers = Ranks(), _named(optimizer)
    device = _device(model, optimizers, distributed=ranks.size > 1)
    where = placement(model, ranks, replicas)
    config = _config(config, save, keep, whole=where == EVERYWHERE)
    plan = Plan(
        directory=Path(directory).absolute(),
        prefix=naming.checked_prefix(prefix),
        rank=ranks.rank,
        world_size=ranks.size,
        incarnation=_incarnation(incarnation, ranks),
        address=parse_address(ttp) if ttp is not None else None,
        config=config,
        key=_key(key, config),
        options=options or TTPOptions(),
        on_error=on_error,
    )
    scope = "" if where == EVERYWHERE else where or f"rank {ranks.rank}"
    others = _present(scheduler=scheduler, scaler=scaler, **(also or {}))
    state = TrainingState(unwrapped(model), optimizers, others, scope)
    feed = _feed(loader, generators, exact_augmentation)
    moved = Moved(state, feed, feed.generators if feed is not None else Generators(generators), not scope)
    moved.capture()  # what cannot be saved is refused now, not when training is under way
    updates = Updates(optimizers, scaler, _vote(plan, where), state.averages)
    return Run(plan, ranks, state, updates, moved, feed, where, device)


def load_state(
    source: str | Path,
    *,
    into: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
    prefix: str | None = None,
    key: bytes | None = None,
) -> int:
    """Load parameters and buffers, and optimizers if given, in place; return the step.

    `source` is a checkpoint, or a directory of them, of which the newest that verifies is taken; `prefix` is
    needed where there are several series. Generators, position and whatever else stay as they are. Raises
    LoadError, CheckpointNotFoundError.
    """
    step, saved = any_restored(Path(source), prefix, key=Key(key) if key is not None else None)
    TrainingState(unwrapped(into), _named(optimizer) if optimizer is not None else {}, {}).load(
        saved.tensors, saved.structure, saved.shared
    )
    return step


def _named(optimizer: Any) -> dict[str, Optimizer]:
    if isinstance(optimizer, Mapping):
        named = dict(optimizer)
    elif isinstance(optimizer, Sequence):
        named = {f"optimizer {number}": one for number, one in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    if not named:
        raise ConfigError("optimizer: wanted at least one")
    return named


def _config(
    config: CheckpointConfig | None, save: SavePolicy | None, keep: KeepPolicy | None, *, whole: bool
) -> CheckpointConfig | None:
    if config is not None and (save is not None or keep is not None):
        raise ConfigError("config: wanted either config or save and keep, got both")
    if save is not None or keep is not None:
        config = CheckpointConfig.of(save=save, keep=keep)
    if config is not None and not whole:
        raise NotSupportedError(
            "config: state that is not the same on all ranks (DistributedDataParallel, or replicas='all') "
            "has no periodic checkpoints yet; give config=None"
        )
    return config


def _vote(plan: Plan, where: str | None) -> Vote | None:
    """Needed where a fault could part the ranks by a step, and somebody would save then."""
    parted = plan.controlled and plan.world_size > 1 and where != EVERYWHERE
    return Vote.of_all_ranks() if parted else None


def _incarnation(given: bytes | None, ranks: Ranks) -> bytes:
    if given is not None or job.VARIABLE in os.environ or ranks.size == 1:
        return job.incarnation_of(given, os.environ, ranks.size)
    return ranks.incarnation()


def _key(key: bytes | None, config: CheckpointConfig | None) -> Key | None:
    material = key if key is not None or config is None else config.enc_key
    return Key(material) if material is not None else None


def _feed(loader: Any, generators: Mapping[str, torch.Generator] | None, exact: bool) -> Feed | None:
    return None if loader is None else Feed(loader, generators=generators, exact_augmentation=exact)


def _present(**others: Any) -> dict[str, Any]:
    return {name: other for name, other in others.items() if other is not None}


def _device(
    model: nn.Module, optimizers: Mapping[str, Optimizer], *, distributed: bool
) -> torch.device | None:
    """Where the parameters are, if not on the CPU. Refuses what cannot be followed."""
    for name, optimizer in optimizers.items():
        check_optimizer(name, optimizer, distributed)
    return sole_device((f"model: {name}", parameter) for name, parameter in model.named_parameters())
