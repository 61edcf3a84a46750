"""What goes into a checkpoint and what is known of one that was saved: values only."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from swansong.errors import ConfigError
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store.crypt import Key

Kind = Literal["periodic", "final", "exception", "fault", "preemption", "requested"]
"""Why a checkpoint was saved."""
Container = Literal["ckpt", "safetensors", "directory"]
"""How it lies on disk: MindSpore's single file, one safetensors file, or the native directory."""
Mode = Literal["AES-GCM", "AES-CBC"]
"""Cipher mode; AES-CBC exists only in MindSpore's container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where training stands."""

    step: int
    """Completed updates since the start of training."""
    epoch: int | None = None
    """From 1."""
    step_in_epoch: int | None = None
    """From 1: (step - 1) % steps_per_epoch + 1."""
    boundary_step: int | None = None
    """Last boundary that was reached; None: `step`."""
    world_size: int = 1
    """Ranks in the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What one writer contributes. Tensors are shown, not copied."""

    tensors: Mapping[str, HostTensor]
    """By name; for a split tensor, this writer's box of it."""
    boxes: Mapping[str, tuple[tuple[int, ...], Box]] = field(default_factory=dict)
    """Name -> (global shape, box), for tensors of which `tensors` holds a part."""
    components: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parts only: component key -> names of its tensors, so that a committer can take some components."""
    scope: str = ""
    """Parts only: what the manifest puts before names, where other writers have others of the same names."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors -> the name in `tensors`."""
    rest: Mapping[str, HostTensor] = field(default_factory=dict)
    """Single files only: tensors that the file leaves out but a resumed run needs."""
    skeleton: Any = None
    """Structure of the state, as `state.tree.flatten` gives it; None if `tensors` is the state."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Anything else: nested dictionaries, lists, numbers, strings, bytes."""
    extra: Any = None
    """`objects` as a skeleton of `state.tree` without tensors, instead of them."""
    rank_objects: Mapping[int, Any] = field(default_factory=dict)
    """Rank -> what only that rank has, as such a skeleton. Single writers only."""
    append_info: Mapping[str, int | float | bool | str | HostTensor] = field(default_factory=dict)
    """What the user appends; kept exactly in the manifest, as MindSpore encodes it in a .ckpt."""
    inexact: tuple[Mapping[str, Any], ...] = ()
    """What a resumed run will not get back exactly, each with its reason."""

    @property
    def appended(self) -> dict[str, HostTensor]:
        """The tensors in `append_info`."""
        return {name: value for name, value in self.append_info.items() if isinstance(value, HostTensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            tensor.nbytes for group in (self.tensors, self.rest, self.appended) for tensor in group.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is kept."""

    container: Container = "directory"
    """See Container."""
    key: Key | None = None
    """Encrypts and authenticates."""
    mode: Mode = "AES-GCM"
    """Ignored without a key."""
    crc: bool = False
    """Append MindSpore's CRC trailer; .ckpt without key only."""

    def __post_init__(self) -> None:
        if self.crc and (self.key is not None or self.container != "ckpt"):
            raise ConfigError(
                "crc: only for container 'ckpt' without a key; MindSpore cannot read it otherwise"
            )
        if self.key is not None and self.mode == "AES-CBC" and self.container != "ckpt":
            raise ConfigError(f"mode: AES-CBC exists only in container 'ckpt', not in {self.container!r}")
        if self.key is not None and self.container == "safetensors":
            raise ConfigError(
                "key: one safetensors file cannot be encrypted; use container 'ckpt' or 'directory'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is on disk, durably."""

    path: Path
    id: str
    seq: int
    nbytes: int
    """Stored bytes."""
    direct: bool
    """False if any data file had to go through the page cache although direct I/O was wanted."""


def new_id() -> str:
    """A random identity: 32 hexadecimal digits, of which names carry the first 8."""
    return secrets.token_hex(16)


def short(identity: str) -> str:
    """The part of an identity that stands in names."""
    return identity[:8]
