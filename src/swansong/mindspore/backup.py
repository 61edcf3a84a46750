"""Loading this rank's checkpoint or, where that is no good, that of a rank which holds the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from mindspore import nn
from mindspore.train._utils import get_parameter_redundancy

from swansong.errors import ConfigError, LoadError
from swansong.mindspore.loading import checked_key, checked_mode, checked_path, load_checkpoint
from swansong.mindspore.ranks import Ranks
from swansong.store import naming
from swansong.store.opening import open_checkpoint

_RANK: Final = re.compile(r"rank_(\d+)", re.ASCII)
_UNKNOWN: Final = -1
_NOT_STATE: Final = ("accu_grads", "inputs")
"""In the names of what a strategy file lists besides the state."""


class Loaded(msgspec.Struct, frozen=True):
    """What one file gave."""

    weights: dict[str, Any]
    step: int
    """UNKNOWN: nothing says."""


def load_with_backup(
    path: str | Path, strategy: str | Path | None, net: nn.Cell, *, dec_key: bytes | None, dec_mode: str
) -> dict[str, Any]:
    """See `MindIOTTPAdapter.load_checkpoint_with_backup`."""
    checked_key(dec_key), checked_mode(dec_mode)
    own, ranks = checked_path(path), Ranks.current()
    if not isinstance(net, nn.Cell):
        raise ConfigError(f"net: wanted a Cell, got {type(net).__name__}")
    failure, loaded = None, None
    try:
        loaded = _first_that_loads(own, strategy, net, dec_key, dec_mode)
    except (LoadError, ConfigError) as error:
        failure = error  # raised below, when the others know
    rows = ranks.gather([failure is not None, loaded.step if loaded is not None else _UNKNOWN])
    if failure is not None:
        raise failure
    if failed := [rank for rank, (bad, _) in enumerate(rows) if bad]:
        raise LoadError(f"{own}: nothing could be loaded on rank {', '.join(map(str, failed))}; see there")
    if len({step for _, step in rows}) > 1:
        listed = ", ".join(f"rank {rank}: {step}" for rank, (_, step) in enumerate(rows))
        raise LoadError(f"{own}: the ranks' checkpoints are of different steps, not to be mixed: {listed}")
    return loaded.weights if loaded is not None else {}


def replicas(own: Path, strategy: str | Path | None) -> list[Path]:
    """Where the ranks that hold the same as that of `own` would have their files.

    Of a path that names no rank, there are none. Raises LoadError for a strategy file that cannot be read.
    """
    me = _rank_of(own)
    if me is None:
        return []
    others = _beside(own) if strategy is None else _redundant(checked_path(strategy), me)
    return [_of_rank(own, me, other) for other in sorted(set(others) - {me})]


def _first_that_loads(
    own: Path, strategy: str | Path | None, net: nn.Cell, key: bytes | None, mode: str
) -> Loaded:
    """Load the rank's own file, or the first sound one of a replica."""
    tried: list[str] = []
    others: list[Path] | None = None
    candidates = [own]
    while candidates or others is None:
        if not candidates:
            others = candidates = replicas(own, strategy)
            continue
        candidate = candidates.pop(0)
        try:
            return _load(candidate, net, key, mode)
        except LoadError as error:
            tried.append(str(error))
    nobody = "" if len(tried) > 1 else "\n  no rank is known that holds the same"
    raise LoadError(
        f"{own}: not loaded, and no replica either; tried:\n  " + "\n  ".join(tried) + nobody, path=str(own)
    )


def _load(path: Path, net: nn.Cell, key: bytes | None, mode: str) -> Loaded:
    weights = load_checkpoint(path, net, dec_key=key, dec_mode=mode)
    with open_checkpoint(path, key=checked_key(key), mode=checked_mode(mode), verify=False) as checkpoint:
        if checkpoint.manifest is not None:
            return Loaded(weights, checkpoint.manifest.step)
    counted = weights.get("global_step")
    if counted is None:
        return Loaded(weights, _UNKNOWN)
    return Loaded(weights, int(np.ravel(counted.asnumpy())[0]))


def _rank_of(path: Path) -> int | None:
    """The rank in whose directory a file is."""
    for part in reversed(path.parts[:-1]):
        if match := _RANK.fullmatch(part):
            return int(match[1])
    return None


def _of_rank(path: Path, me: int, other: int) -> Path:
    """The same file, of another rank; its own name may have the rank in it, too."""
    directory = next(i for i in reversed(range(len(path.parts))) if path.parts[i] == f"rank_{me}")
    name = re.sub(rf"rank_{me}(?!\d)", naming.rank_directory(other), path.name)
    below = path.parts[directory + 1 : -1]
    return Path(*path.parts[:directory], naming.rank_directory(other), *below, name)


def _beside(path: Path) -> list[int]:
    """The ranks that have a directory beside this one's."""
    directory = next(parent for parent in path.parents if _RANK.fullmatch(parent.name))
    names = [entry.name for entry in directory.parent.iterdir()] if directory.parent.is_dir() else []
    return [int(match[1]) for name in names if (match := _RANK.fullmatch(name))]


def _redundant(strategy: Path, me: int) -> list[int]:
    """The ranks that hold all that `me` holds, by a strategy file."""
    try:
        stage = max(len(groups) * len(groups[0]) for groups in _redundancy(strategy, 0).values())
        table = _redundancy(strategy, me // stage * stage)
        groups = [
            next((set(group) for group in groups if me in group), {me})
            for name, groups in table.items()
            if not any(word in name for word in _NOT_STATE)
        ]
    except Exception as error:  # MindSpore raises whatever it happens to meet in a file of another kind
        raise LoadError(
            f"{strategy}: not a strategy file that can be read: {error}", path=str(strategy)
        ) from error
    return sorted(set.intersection(*groups)) if groups else []


def _redundancy(strategy: Path, initial_rank: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Parameter -> groups of ranks with the same part of it. Errors as MindSpore's."""
    found: dict[str, tuple[tuple[int, ...], ...]] = get_parameter_redundancy(
        str(strategy), initial_rank=initial_rank
    )
    return found
