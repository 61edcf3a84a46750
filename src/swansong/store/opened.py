"""An open checkpoint, and the ways to have its tensors.

| way        | where the values are         | memory beside that  | what is verified, and when              |
|------------|------------------------------|---------------------|-----------------------------------------|
| `read`     | fresh                        | at most 64 MiB      | each piece, before it is copied         |
| `read_all` | fresh                        | at most 64 MiB      | each piece, before it is copied         |
| `fill`     | memory that is there already | at most 64 MiB      | everything, before anything is written; |
|            |                              |                     | each piece again, before it is copied   |
| `map_all`  | the page cache; fresh if it  | none                | everything, before it returns; not      |
|            | is encrypted                 |                     | again if the kernel reloads a page      |
| `each`     | the same, one by one         | at most 64 MiB      | everything, before the first; encrypted |
|            |                              |                     | pieces again                            |

MindSpore's encryption takes two buffers more per thread: up to 144 MiB instead of 64. More threads than the
default take more buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from swansong.errors import ConfigError, DamagedError, LoadError
from swansong.state import tree
from swansong.state.tensors import HostTensor
from swansong.store import reading, stored
from swansong.store.manifest import Manifest
from swansong.store.mapping import mapped
from swansong.store.source import PlainFile, Source
from swansong.store.stored import StoredTensor


class Checkpoint:
    """An open checkpoint. Close it, or use it in a `with` block.

    `threads` of its methods is for those that read at once; None: as many as there are cores, within what
    memory allows.
    """

    def __init__(self, path: Path, manifest: Manifest | None, stack: ExitStack) -> None:
        self.path = path
        self.manifest = manifest
        """None: unverified, nothing but the container vouches for the content."""
        self.entries: dict[str, StoredTensor] = {}
        """Tensors of the checkpoint proper, by name; aliases of tied tensors included."""
        self.rest: dict[str, StoredTensor] = {}
        """Tensors kept beside a single file that leaves them out."""
        self.append_info: dict[str, Any] = {}
        """What the user appended, tensors not included (those are entries)."""
        self.objects: dict[str, Any] = {}
        """Whatever else the state consists of; in place of its tensors, which are among `entries`, those."""
        self._stack = stack
        self._verified = False
        self._contents: dict[int, NDArray[np.uint8]] | None = None
        """Of the files that are mapped, by the `id` of their sources; None before the first is wanted."""
        self._mapped: dict[str, HostTensor] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were read or mapped stay."""
        self._mapped = self._contents = None
        self._stack.close()

    def read(self, name: str) -> HostTensor:
        """Read one tensor (also of `rest`), verified, into fresh memory; shape and dtype as saved.

        Raises KeyError for an unknown name, DigestMismatchError or another DamagedError that names it.
        """
        wanted = self.entries.get(name) or self.rest[name]
        with reading.named(name):
            return wanted.read()

    def read_all(self, *, threads: int | None = None) -> dict[str, HostTensor]:
        """Read every tensor of `entries`, in file order, so that each piece is read once.

        Raises DigestMismatchError or another DamagedError; nothing is returned then.
        """
        return self.read_some(self.entries, threads=threads)

    def read_some(self, names: Iterable[str], *, threads: int | None = None) -> dict[str, HostTensor]:
        """The same, for tensors of `entries` or `rest`."""
        wanted = [(name, self.entries.get(name) or self.rest[name]) for name in names]
        read = {name: tensor.empty() for name, tensor in wanted}
        stored.fill([(tensor, read[name].array) for name, tensor in wanted], threads=threads)
        return read

    def map_all(self, *, threads: int | None = None) -> dict[str, HostTensor]:
        """Show every tensor of `entries` in memory that the file is mapped to, once all of it is verified.

        What cannot be mapped, since it is encrypted or parted, is read into fresh memory. A second call
        returns the same tensors. Their arrays may be unaligned. What is written to them stays in this
        process; see `mapping` for what may not happen to the file. Errors as `read_all`.
        """
        if self._mapped is None:
            contents = self._map(self.entries.values(), threads)
            shown = {name: _shown(tensor, contents) for name, tensor in self.entries.items()}
            fresh = self.read_some([n for n, tensor in shown.items() if tensor is None], threads=threads)
            self._mapped = {name: tensor or fresh[name] for name, tensor in shown.items()}
        return dict(self._mapped)

    def each(self, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, HostTensor]]:
        """Yield some of this checkpoint's tensors, one by one, once the files that they are in are verified.

        For those who copy or drop each before they ask for the next. Otherwise as `map_all`.
        """
        contents = self._map(tensors.values(), None)
        reading.check(source for source in _checked(tensors.values()) if id(source) not in contents)
        for name, tensor in tensors.items():
            with reading.named(name):
                read = _shown(tensor, contents) or tensor.read()
            yield name, read

    def verify(self, *, threads: int | None = None) -> None:
        """Check every piece of every tensor's file, and keep nothing. Once is enough.

        Raises DigestMismatchError or another DamagedError.
        """
        if not self._verified:
            reading.check(_checked([*self.entries.values(), *self.rest.values()]), threads=threads)
            self._verified = True

    def fill(self, targets: Mapping[str, HostTensor], *, threads: int | None = None) -> None:
        """Read tensors of `entries` or `rest` into memory that is there already, of any strides.

        The whole checkpoint is verified before anything is written. Each piece is checked once more when it
        is copied; only if it was changed in between, or at an interrupt, are `targets` left partly written,
        and the error has a note that says so. Raises LoadError for a name that is not there or another type
        or shape, ConfigError for memory that cannot be written; DigestMismatchError or another DamagedError.
        """
        wanted = [(self._fitting(name, tensor), tensor.array) for name, tensor in targets.items()]
        self.verify(threads=threads)
        try:
            stored.fill(wanted, threads=threads)
        except (DamagedError, OSError) as error:
            error.add_note(
                f"{self.path} was sound a moment ago, and has been changed while it was being loaded: what "
                "was to be filled may hold some of its values by now"
            )
            raise

    def state(self) -> Any:
        """The nested state, as it was given to be saved: HostTensors for tensors, arrays for NumPy arrays."""
        skeleton = self.manifest.objects.get("state") if self.manifest and self.manifest.objects else None
        if skeleton is None:
            return self.read_all()
        return tree.unflatten(skeleton, self.read_all(), as_array=lambda tensor: tensor.array)

    def _map(self, tensors: Iterable[StoredTensor], threads: int | None) -> dict[int, NDArray[np.uint8]]:
        """Map the files that these are in, as far as that can be done, and check them."""
        if self._contents is None:
            self._contents = {}
        for source in _sources(tensors):
            if id(source) not in self._contents and (content := mapped(source, threads=threads)) is not None:
                self._contents[id(source)] = content
        return self._contents

    def _fitting(self, name: str, tensor: HostTensor) -> StoredTensor:
        found = self.entries.get(name) or self.rest.get(name)
        if found is None:
            raise LoadError(f"{self.path}: holds no tensor {name!r}", path=str(self.path))
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            raise LoadError(
                f"{self.path}: tensor {name!r}: wanted {tensor.dtype.name} {list(tensor.shape)}, "
                f"found {found.dtype.name} {list(found.shape)}",
                path=str(self.path),
            )
        if not tensor.array.flags.writeable:
            raise ConfigError(f"tensor {name!r}: wanted memory that can be written, got some that cannot")
        return found


def _sources(tensors: Iterable[StoredTensor]) -> list[Source]:
    """Each file that a tensor stands in, once."""
    return list({id(chunk.source): chunk.source for tensor in tensors for chunk in tensor.chunks}.values())


def _checked(tensors: Iterable[StoredTensor]) -> list[Source]:
    """Those of them that have anything to compare."""
    return [source for source in _sources(tensors) if not isinstance(source, PlainFile)]


def _shown(tensor: StoredTensor, contents: Mapping[int, NDArray[np.uint8]]) -> HostTensor | None:
    """A tensor that stands in one piece in a mapped file; None for any other."""
    if len(tensor.chunks) != 1 or len(tensor.chunks[0].entry.ranges) != 1 or not tensor.nbytes:
        return None
    chunk = tensor.chunks[0]
    content = contents.get(id(chunk.source))
    start, stop = chunk.entry.ranges[0]
    if content is None or chunk.entry.shape != tensor.shape:
        return None
    return HostTensor(tensor.dtype, content[start:stop].view(tensor.dtype.carrier).reshape(tensor.shape))
