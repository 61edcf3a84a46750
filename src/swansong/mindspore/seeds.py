"""The seeds on which the order of the data and random operators depend."""

from __future__ import annotations

from typing import Final, NamedTuple

import mindspore as ms
import mindspore.dataset as ds

from swansong.mindspore.ranks import Ranks

UNSET_DATA_SEED: Final = 5489
"""What `mindspore.dataset.config.get_seed` gives while no seed was set (std::mt19937::default_seed)."""
_UNSET: Final = -1


class Seeds(NamedTuple):
    """One rank's seeds; None for one that was not set."""

    operators: int | None
    """`mindspore.get_seed()`"""
    data: int | None
    """`mindspore.dataset.config.get_seed()`"""


def gathered_seeds(ranks: Ranks) -> tuple[Seeds, ...]:
    """Every rank's seeds as they are now, by rank. All ranks must call it."""
    data = int(ds.config.get_seed())
    own = (ms.get_seed(), None if data == UNSET_DATA_SEED else data)
    rows = ranks.gather([_UNSET if seed is None else seed for seed in own])
    return tuple(Seeds(*(None if seed == _UNSET else seed for seed in row)) for row in rows)
