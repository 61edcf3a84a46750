"""What ranks must agree on: who shares a directory, and what all of them can load.

Everything goes through one collective, AllGather of 64-bit integers, which MindSpore has on every device, in
PyNative and graph mode. A job of one rank, or one that has not initialised communication, needs none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, get_group_size, get_rank

from swansong.errors import ConfigError, LoadError, NotSupportedError
from swansong.store import naming
from swansong.store.files import Files
from swansong.store.workspace import Workspace

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place among all of them."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> Ranks:
        """The place that MindSpore's communication gives this process; alone if it is not initialised."""
        if not GlobalComm.INITED:
            return cls(0, 1)
        return cls(int(get_rank()), int(get_group_size()))

    def gather(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's `values`, by rank. All ranks must call it, with equally many, each in [-2**63, 2**63).

        Blocks until the last rank has called; raises MindSpore's RuntimeError if one is gone.
        """
        if self.size == 1:
            return [tuple(values)]
        gathered = ops.AllGather()(Tensor(np.array(values, np.int64))).asnumpy()
        return [tuple(int(value) for value in row) for row in gathered.reshape(self.size, -1)]

    def together(self, action: Callable[[], Result]) -> Result:
        """Do something on every rank; what fails on one raises on all, so that none waits for it in vain.

        Where it failed it raises its own exception, elsewhere a LoadError that names the ranks.
        """
        failure, result = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised below, when the others know
            failure = error
        failed = [rank for rank, (bad,) in enumerate(self.gather([failure is not None])) if bad]
        if failure is not None:
            raise failure
        if failed:
            raise LoadError(f"failed on rank {', '.join(map(str, failed))}; see the error there")
        return cast(Result, result)


@dataclass(frozen=True, slots=True)
class Writers:
    """Who of the ranks writes what this rank holds."""

    ranks: Ranks
    group: tuple[int, ...]
    """The ranks that share this one's directory, ascending. The first writes."""

    @property
    def writes(self) -> bool:
        """True if this rank is the one that writes."""
        return self.ranks.rank == self.group[0]

    def check_redundancy(self, remove: bool) -> None:
        """Refuse `remove_redundancy` where it cannot be kept. Raises ConfigError, NotSupportedError."""
        if remove and self.ranks.size == 1:
            raise ConfigError("remove_redundancy: wanted False in a job of one rank, got True")
        if remove and len(self.group) == 1:
            raise NotSupportedError(
                "remove_redundancy needs ranks that share a directory; there, everything is saved once "
                f"anyway. Rank {self.ranks.rank} has a directory to itself"
            )

    def check_split(self, split: bool, integrated_save: bool) -> None:
        """Refuse to save a network that is split over ranks as if it were whole. Raises NotSupportedError."""
        if split and integrated_save:
            raise NotSupportedError(
                "integrated_save: tensors that are split over ranks are not merged yet; set "
                "integrated_save=False and give each rank a directory of its own"
            )
        if split and len(self.group) > 1:
            raise NotSupportedError(
                f"ranks {', '.join(map(str, self.group))} share a directory, but hold different parts of the "
                "network; give each rank a directory of its own"
            )


def sharing(ranks: Ranks, directory: Path, files: Files) -> Writers:
    """Find the ranks that see the same `directory` as this one.

    Found out by looking: each rank leaves an empty file there and all look which ones they can see. Paths
    and device numbers would say nothing across hosts and containers. All ranks must call it. OSError if the
    directory cannot be made or written.
    """
    if ranks.size == 1:
        return Writers(ranks, (ranks.rank,))
    [(token,), *_] = ranks.gather([secrets.randbits(32)])
    space = Workspace(directory, files)
    space.prepare()
    with space.reserve(f"rank-{ranks.rank}", f"{token:08x}") as own:
        files.write_small(own, b"")
        ranks.gather([0])
        seen = {path.name for path in space.temporary.iterdir()}
        ranks.gather([0])
    group = (r for r in range(ranks.size) if naming.temporary(f"{token:08x}", f"rank-{r}") in seen)
    return Writers(ranks, tuple(group))
