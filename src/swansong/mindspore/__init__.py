"""Checkpoints for `mindspore.train.Model`: the names and arguments of MindSpore's own classes.

`CheckpointConfig`, `ModelCheckpoint` and `MindIOTTPAdapter` replace those of `mindspore.train`; `resume`
continues a run at the next batch. Needs the `[mindspore]` extra.
"""

from importlib.util import find_spec

if find_spec("mindspore") is None:
    raise ModuleNotFoundError(
        "swansong.mindspore needs MindSpore, which is not installed: pip install 'swansong[mindspore]'",
        name="mindspore",
    )

from swansong.mindspore.callback import ModelCheckpoint
from swansong.mindspore.config import CheckpointConfig
from swansong.mindspore.loading import latest_checkpoint, load_checkpoint
from swansong.mindspore.position import ResumePoint
from swansong.mindspore.resuming import resume
from swansong.mindspore.ttp import MindIOTTPAdapter

__all__ = [
    "CheckpointConfig",
    "MindIOTTPAdapter",
    "ModelCheckpoint",
    "ResumePoint",
    "latest_checkpoint",
    "load_checkpoint",
    "resume",
]
