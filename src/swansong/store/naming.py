"""The only place that spells and parses names.

{stem}-{epoch}_{step_in_epoch}.ckpt                 a checkpoint, single file (or .safetensors)
{stem}-{epoch}_{step_in_epoch}/                     a checkpoint, native directory
{stem}-{epoch}_{step_in_epoch}_breakpoint.ckpt      saved on an exception
{stem}-{step}[_{n}]/                                a checkpoint of a loop that counts no epochs
.swansong/{name}.{id8}.json                         manifest of the single file {name}
.swansong/{name}.{id8}.rest.safetensors[.sealed]    parameters that the single file leaves out
.swansong/{series}.lock                             highest seq drawn; flocked while drawing or pruning
.swansong/{series}.writers                          flocked, shared, while writer processes are at work
.swansong/tmp/{id8}-{name}                          being written; flocked through {id8}-{name}.lock
{name}/manifest.json                                manifest of a native directory
{name}/c{part}-{number}-{id8}.safetensors[.sealed]  its data files
part-{generation}-{attempt}-{rank}.json             what one of several writers contributed

ttp_saved_checkpoints-{epoch}_{step_in_epoch}[_{n}]/                      left by a fault, for MindSpore
    rank_{r}/iteration-{epoch}_{step_in_epoch}[_{n}].ckpt                 what rank r wrote of it
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from swansong.errors import ConfigError

CONTROL: Final = ".swansong"
TEMPORARY: Final = "tmp"
MANIFEST: Final = "manifest.json"
LOCK: Final = ".lock"
SEALED: Final = ".sealed"
CKPT: Final = ".ckpt"
SINGLE_FILE_SUFFIXES: Final = (CKPT, ".safetensors")
BREAKPOINT: Final = "_breakpoint"
FAULT: Final = "ttp_saved_checkpoints"
"""What the names of directories begin with that a fault leaves for MindSpore."""

NAME_LIMIT: Final = 200
"""Bytes a checkpoint's name may have, so that every name derived from it fits into 255."""

_SIDECAR: Final = re.compile(r"(?P<name>.+)\.(?P<id8>[0-9a-f]{8})\.json", re.DOTALL)
_REST: Final = re.compile(r"(?P<name>.+)\.(?P<id8>[0-9a-f]{8})\.rest\.safetensors(\.sealed)?", re.DOTALL)
_DATA: Final = re.compile(r"c\d+-\d{5,}-(?P<id8>[0-9a-f]{8})\.safetensors(\.sealed)?", re.ASCII)
_STAGED: Final = re.compile(r"g\d+-a\d+-r\d+-\d{5,}\.(safetensors(\.sealed)?|ckpt)", re.ASCII)
_FAULT: Final = re.compile(r"ttp_saved_checkpoints-\d+_\d+(_\d+)?", re.ASCII)
_RANK: Final = re.compile(r"rank_\d+", re.ASCII)
_PART: Final = re.compile(r"part-(\d+)-(\d+)-(\d+)\.json", re.ASCII)
_POSITION: Final = re.compile(
    r"(?P<stem>.*)-(?P<epoch>\d+)_(?P<step>\d+)(_breakpoint)?(\.(ckpt|safetensors))?", re.DOTALL | re.ASCII
)


def checked_prefix(prefix: str) -> str:
    """Return `prefix` if it can begin a file's name; ConfigError says why not."""
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix: wanted a str, got {prefix!r} of type {type(prefix).__name__}")
    if "/" in prefix or "\0" in prefix:
        raise ConfigError(f"prefix: must not contain '/' or NUL, got {prefix!r}")
    try:
        length = len(prefix.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"prefix: {prefix!r} has no UTF-8 form ({error.reason})") from None
    if length > NAME_LIMIT - 50:
        raise ConfigError(f"prefix: at most {NAME_LIMIT - 50} bytes, got {length}")
    return prefix


def checked_name(name: str) -> str:
    """Return `name` if a checkpoint can be called so; ConfigError says why not."""
    if not name or name in {".", "..", CONTROL} or "/" in name or "\0" in name:
        raise ConfigError(f"{name!r} cannot be a checkpoint's name")
    if name.endswith(LOCK):
        raise ConfigError(f"{name!r}: a checkpoint's name must not end in {LOCK!r}, as those of locks do")
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name!r} has no UTF-8 form ({error.reason})") from None
    if length > NAME_LIMIT:
        raise ConfigError(f"{name!r}: a checkpoint's name has at most {NAME_LIMIT} bytes, this has {length}")
    return name


def position_name(
    stem: str, epoch: int, step_in_epoch: int, suffix: str, *, on_exception: bool = False
) -> str:
    """Name of a checkpoint by its place in training; `suffix` is ".ckpt", ".safetensors" or ""."""
    return f"{stem}-{epoch}_{step_in_epoch}{BREAKPOINT if on_exception else ''}{suffix}"


def step_name(stem: str, step: int, number: int = 0) -> str:
    """Name of a checkpoint by its step alone; `number` tells it from another of that step, 0 from none."""
    return f"{stem}-{step}{f'_{number}' if number else ''}"


class Position(NamedTuple):
    """What a checkpoint's name says."""

    stem: str
    epoch: int
    step_in_epoch: int


def parse_position(name: str) -> Position | None:
    """Read a name made by `position_name`; None for other names. A hint only: manifests decide."""
    match = _POSITION.fullmatch(name)
    return Position(match["stem"], int(match["epoch"]), int(match["step"])) if match else None


def sidecar(name: str, id8: str) -> str:
    """Manifest of a single file."""
    return f"{name}.{id8}.json"


def parse_sidecar(entry: str) -> tuple[str, str] | None:
    """(name, id8) of a single file's manifest, or None."""
    match = _SIDECAR.fullmatch(entry)
    return (match["name"], match["id8"]) if match else None


def rest(name: str, id8: str, *, sealed: bool) -> str:
    """The file for parameters that a single file leaves out."""
    return f"{name}.{id8}.rest.safetensors{SEALED if sealed else ''}"


def parse_rest(entry: str) -> tuple[str, str] | None:
    """(name, id8) of a rest file, or None."""
    match = _REST.fullmatch(entry)
    return (match["name"], match["id8"]) if match else None


def data_file(part: int, number: int, id8: str, *, sealed: bool) -> str:
    """A data file of a native directory."""
    return f"c{part}-{number:05d}-{id8}.safetensors{SEALED if sealed else ''}"


def parse_data_file(entry: str) -> str | None:
    """id8 of a native directory's data file, or None."""
    match = _DATA.fullmatch(entry)
    return match["id8"] if match else None


def staged_data_file(generation: int, attempt: int, rank: int, number: int, *, sealed: bool) -> str:
    """A data file while several writers fill a directory: nobody else can have this name."""
    return f"g{generation}-a{attempt}-r{rank}-{number:05d}.safetensors{SEALED if sealed else ''}"


def staged_ckpt(generation: int, attempt: int, rank: int) -> str:
    """The same, where it is MindSpore's container: all that one writer gives is in one file."""
    return f"g{generation}-a{attempt}-r{rank}-00000{CKPT}"


def is_staged(entry: str) -> bool:
    """True for what several writers put into a directory that is not committed yet: data files and parts."""
    return _STAGED.fullmatch(entry) is not None or parse_part(entry) is not None


def part(generation: int, attempt: int, rank: int) -> str:
    """The record of one writer's contribution."""
    return f"part-{generation}-{attempt}-{rank}.json"


def parse_part(entry: str) -> tuple[int, int, int] | None:
    """(generation, attempt, rank) of a part record, or None."""
    match = _PART.fullmatch(entry)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def fault_name(epoch: int, step_in_epoch: int, number: int = 0) -> str:
    """Name of the directory that a fault leaves for MindSpore; `number` as in `step_name`."""
    return f"{FAULT}-{epoch}_{step_in_epoch}{f'_{number}' if number else ''}"


def is_fault_name(name: str) -> bool:
    """True for what `fault_name` makes."""
    return _FAULT.fullmatch(name) is not None


def rank_directory(rank: int) -> str:
    """Where the files of one rank are, within such a directory."""
    return f"rank_{rank}"


def is_rank_directory(name: str) -> bool:
    """True for what `rank_directory` makes."""
    return _RANK.fullmatch(name) is not None


def rank_file(rank: int, number: int, epoch: int, step_in_epoch: int) -> str:
    """What a rank wrote, relative to such a directory; `number` counts its parts from 0."""
    part = f"_{number}" if number else ""
    return f"{rank_directory(rank)}/iteration-{epoch}_{step_in_epoch}{part}{CKPT}"


def series_lock(series: str) -> str:
    """Lock and counter of a series."""
    return f"{series}{LOCK}"


def series_writers(series: str) -> str:
    """Lock that tells whether writer processes are at work on a series. No other name ends like it."""
    return f"{series}.writers"


def temporary(id8: str, name: str) -> str:
    """Where a checkpoint is put together."""
    return f"{id8}-{name}"


def free_stem(prefix: str, taken: Iterable[str]) -> str:
    """The stem for a run that starts afresh among the checkpoint names `taken`: MindSpore's collision rule.

    `prefix` itself if no checkpoint is called "{prefix}-..." or "{prefix}_{n}-..."; otherwise
    "{prefix}_{n}" with n one above the highest in use.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(?:_(\d+))?-.*", re.DOTALL | re.ASCII)
    used = [int(match[1] or 0) for name in taken if (match := pattern.fullmatch(name))]
    return f"{prefix}_{max(used) + 1}" if used else prefix
