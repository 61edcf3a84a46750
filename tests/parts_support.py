"""Two writers of one checkpoint, for the tests of parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from store_support import (
    buffered,
)
from swansong.state.boxes import Box
from swansong.state.tensors import HostTensor
from swansong.store import naming
from swansong.store.checkpoint import Content, Point, Saved
from swansong.store.files import Files
from swansong.store.manifest import decode_part, encode
from swansong.store.parts import PartId, Staged, commit_parts, read_parts, write_part

T = HostTensor.of
NAME = "run-1_1"
WHOLE = np.arange(24, dtype=np.float32).reshape(6, 4)
IDS = [PartId(0, 0, 0), PartId(0, 0, 1)]


def share(rank: int, box: Box | None = None, **more: Any) -> Content:
    """Half of WHOLE (or `box` of it) and a tensor of one's own."""
    box = box or Box((3 * rank, 0), (3, 4))
    return Content(
        tensors={"w": T(WHOLE[box.slices]), f"own{rank}": T(np.full(2, rank, np.int64))},
        boxes={"w": (WHOLE.shape, box)},
        objects={"rank": rank},
        **more,
    )


def write(staging: Staged, content: Content, part: PartId, key: Any = None) -> None:
    write_part(staging.place, staging.id, buffered(Files()), content, part, key=key)


def write_both(staging: Staged, key: Any = None) -> None:
    for part in IDS:
        write(staging, share(part.rank), part, key)


def publish(staging: Staged, wanted: list[PartId] = IDS, **how: Any) -> Saved:
    taken = read_parts(staging, dict.fromkeys(wanted), key=how.get("key"))
    return commit_parts(staging, taken, Point(step=9, world_size=2), kind="fault", seq=5, **how)


def record_of(staging: Staged, part: PartId) -> Path:
    return staging.place / naming.part(*part)


def data_of(staging: Staged, part: PartId) -> Path:
    return staging.place / naming.staged_data_file(*part, 0, sealed=False)


def rewrite(staging: Staged, part: PartId, **fields: Any) -> None:
    """Change fields of a part, with a tail that fits."""
    path = record_of(staging, part)
    path.write_bytes(encode(msgspec.structs.replace(decode_part(path.read_bytes(), "p"), **fields), None))
