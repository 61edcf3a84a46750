"""What the ranks of a job exchange through torch.distributed, before and between steps: few bytes."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swansong.errors import ConfigError
from swansong.protocol.handshake import INCARNATION

EVERYWHERE: Final = "all"
"""For `replicas`: every rank holds equal state."""
_TIMEOUT: Final = timedelta(minutes=10)


class Ranks:
    """This rank among the others. All ranks make one at the same place of the script: that is collective."""

    def __init__(self) -> None:
        """Raises ConfigError under a launcher before the process group is there."""
        self.rank, self.size = 0, 1
        self._group: Any = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                # Of its own, so that nothing here comes between the collectives of training.
                self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "protect: WORLD_SIZE says that there are several ranks; call "
                "torch.distributed.init_process_group() first"
            )

    def incarnation(self) -> bytes:
        """16 random bytes, the same on all ranks. Collective."""
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(INCARNATION)), dtype=torch.uint8)
        self._from_0(drawn)
        return bytes(drawn.tolist())

    def word_of_0(self, flag: bool) -> bool:
        """What rank 0 says. Collective."""
        said = torch.tensor([flag], dtype=torch.uint8)
        self._from_0(said)
        return bool(said.item())

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload by rank, on rank 0; elsewhere nothing. Collective."""
        if self.size == 1:
            return [payload]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=self._group)
        most = max(int(size.item()) for size in sizes)
        padded = torch.frombuffer(bytearray(payload.ljust(max(1, most), b"\0")), dtype=torch.uint8)
        if self.rank != 0:
            dist.gather(padded, dst=0, group=self._group)
            return []
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.gather(padded, found, dst=0, group=self._group)
        return [one.numpy().tobytes()[: int(size.item())] for one, size in zip(found, sizes, strict=True)]

    def _from_0(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self._group)


def placement(model: nn.Module, ranks: Ranks, replicas: str | None) -> str | None:
    """Who else holds equal state, as a component's key says it; None: nobody, as far as is known.

    Known are DistributedDataParallel's group and what the user declares.
    """
    if replicas is not None or ranks.size == 1:
        return replicas or EVERYWHERE
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if not isinstance(model, DistributedDataParallel):
        return None
    members = sorted(dist.get_process_group_ranks(model.process_group))
    if members == list(range(ranks.size)):
        return EVERYWHERE
    return f"ddp of ranks {', '.join(map(str, members))}"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, if it is wrapped for data parallelism."""
    return model.module if isinstance(model, DistributedDataParallel | nn.DataParallel) else model
