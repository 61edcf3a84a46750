"""Loading a checkpoint, by path or the newest of a series."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from mindspore import nn

from swansong.errors import ConfigError, LoadError, SwansongWarning
from swansong.mindspore.parameters import fill, host_tensor, mismatches, named_state, new_parameter
from swansong.policy.checks import shown
from swansong.state.tensors import HostTensor
from swansong.store import naming
from swansong.store.checkpoint import Mode
from swansong.store.crypt import Key
from swansong.store.latest import choose
from swansong.store.opening import open_checkpoint


def load_checkpoint(
    path: str | Path,
    net: nn.Cell | None = None,
    *,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    verify: bool = True,
) -> dict[str, Any]:
    """Return a checkpoint's content by name, as `mindspore.load_checkpoint` does, and fill `net` with it.

    Values are Parameters, also for what was appended (int as int64, float as float64: exactly what was
    given), and str. MindSpore's own files load too, strictly checked. With `net`, every Parameter of it that
    the checkpoint holds gets its value from there, the optimizer's among them if `net` is a train network;
    what `net` lacks is left out, and what the checkpoint lacks is warned of (SwansongWarning).

    With `verify`, every byte is checked first. Raises LoadError: CheckpointNotFoundError, DamagedError,
    KeyNeededError, WrongKeyError, UnauthenticatedError, or one that lists every Parameter of `net` with
    another type or shape; `net` is as it was then. ConfigError for a wrong argument.
    """
    key, mode = checked_key(dec_key), checked_mode(dec_mode)
    with open_checkpoint(checked_path(path), key=key, mode=mode, verify=verify) as checkpoint:
        state = named_state(net) if net is not None else {}
        beside = {name: checkpoint.rest[name] for name in state if name in checkpoint.rest}
        held = checkpoint.entries | beside
        if wrong := mismatches(state, held):
            raise not_fitting(checkpoint.path, wrong)
        loaded = {name: new_parameter(name, tensor) for name, tensor in checkpoint.each(held)}
        loaded |= {name: _appended(name, value) for name, value in checkpoint.append_info.items()}
    for name in state.keys() & held.keys():
        fill(state[name], host_tensor(name, loaded[name]))
    if missing := [name for name in state if name not in held]:
        warnings.warn(
            f"{path}: holds no {listed(missing)}; the network keeps its own", SwansongWarning, stacklevel=2
        )
    return loaded


def latest_checkpoint(
    directory: str | Path,
    prefix: str,
    *,
    ttp_directory: str | Path | None = None,
    dec_key: bytes | None = None,
) -> Path | None:
    """Return the newest checkpoint of series `prefix` that verifies as a whole, or None.

    Newest is what was saved last, whatever its step. Checkpoints that a fault left in `ttp_directory`
    count. Damaged ones are passed over with a SwansongWarning that names them. With a key, only what was
    sealed with it counts. ConfigError for a wrong argument.
    """
    choice = choose(
        searched(directory, ttp_directory), naming.checked_prefix(prefix), key=checked_key(dec_key)
    )
    choice.warn()
    return choice.newest.path if choice.newest is not None else None


def not_fitting(path: Path, wrong: list[str]) -> LoadError:
    """The error for a checkpoint of another network."""
    return LoadError(f"{path}: does not fit the network:\n  " + "\n  ".join(wrong), path=str(path))


def listed(names: list[str], most: int = 10) -> str:
    """Names for a message that must stay readable."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def searched(directory: str | Path, ttp_directory: str | Path | None) -> list[Path]:
    """The directories in which a series is looked for."""
    given = [directory] if ttp_directory is None else [directory, ttp_directory]
    return [checked_path(path) for path in given]


def checked_path(path: object) -> Path:
    """Return a path as Path; ConfigError if it is none."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"wanted a path as str or Path, got {shown(path)}")
    if not str(path).strip():
        raise ConfigError(f"wanted a path, got {shown(path)}")
    return Path(path)


def checked_key(key: bytes | None) -> Key | None:
    """Return a key wrapped up; ConfigError if it is none. It is never shown."""
    return None if key is None else Key(key)


def checked_mode(mode: object) -> Mode:
    """Return a cipher mode; ConfigError if it is none."""
    for known in get_args(Mode):
        if mode == known:
            return cast(Mode, known)
    raise ConfigError(f"dec_mode: wanted {' or '.join(map(repr, get_args(Mode)))}, got {shown(mode)}")


def _appended(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    return new_parameter(name, HostTensor.of(np.array(value)))
