"""What several parts give together: files under their final names, tensors with all parts' chunks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from msgspec.structs import replace

from swansong.store import naming
from swansong.store.checkpoint import short
from swansong.store.manifest import Chunk, FileRecord, Part, TensorRecord
from swansong.store.placement import boxes_problem

FileNames = Callable[[int, int, str], str]
"""(rank, number of the file among that rank's, present name) -> final name, relative to the checkpoint."""


def native_names(identity: str) -> FileNames:
    """The names of a native directory's own data files."""
    return lambda rank, number, present: naming.data_file(
        rank, number, short(identity), sealed=present.endswith(naming.SEALED)
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """What a committer takes of a part."""

    part: Part
    components: AbstractSet[str] | None
    """Keys; None: everything."""

    def missing(self) -> list[str]:
        """Components that the part does not have."""
        return sorted((self.components or set()) - self.part.components.keys())

    def names(self) -> list[str]:
        """Names of the tensors that are taken, in the part's order."""
        if self.components is None:
            return list(self.part.tensors)
        wanted = {name for key in self.components for name in self.part.components[key]}
        return [name for name in self.part.tensors if name in wanted]


@dataclass(slots=True)
class Merged:
    """Fields of the manifest, and the renames (present name, final name) that make them true."""

    files: list[FileRecord] = field(default_factory=list)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    renames: list[tuple[str, str]] = field(default_factory=list)


def merge(taken: Sequence[Taken], names: FileNames) -> Merged | str:
    """Put parts together, their files called as `names` says; or say why they do not make one checkpoint.

    They do if they agree on each tensor's type and shape, and if every element is there exactly once. Files
    of which nothing is taken are left out; numbers in names go on where a rank has several parts.
    """
    merged = Merged()
    chunks: dict[str, list[Chunk]] = {}
    first: dict[str, tuple[TensorRecord, int]] = {}
    numbers: Counter[int] = Counter()
    for one in taken:
        part = one.part
        if missing := one.missing():
            return f"the part of rank {part.rank} lacks component {missing[0]}"
        wanted = one.names()
        used = sorted({chunk.file for name in wanted for chunk in part.tensors[name].chunks})
        places = {}
        for file in used:
            places[file] = len(merged.files)
            _take_file(merged, part, file, numbers[part.rank], names)
            numbers[part.rank] += 1
        for name in wanted:
            tensor = part.tensors[name]
            known, rank = first.setdefault(name, (tensor, part.rank))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                return (
                    f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)} on rank {part.rank}, but "
                    f"{known.dtype} {list(known.shape)} on rank {rank}"
                )
            moved = (replace(chunk, file=places[chunk.file]) for chunk in tensor.chunks)
            chunks.setdefault(name, []).extend(moved)
        merged.aliases |= {alias: name for alias, name in part.aliases.items() if name in wanted}
    for name, (tensor, _) in first.items():
        problem = boxes_problem(tensor.shape, chunks[name])
        if problem is not None:
            return f"tensor {name!r}: {problem}"
        merged.tensors[name] = replace(tensor, chunks=chunks[name])
    return merged


def _take_file(merged: Merged, part: Part, file: int, number: int, names: FileNames) -> None:
    record = part.files[file]
    name = names(part.rank, number, record.name)
    merged.renames.append((record.name, name))
    merged.files.append(replace(record, name=name))
