"""CheckpointConfig with what MindSpore adds to it: Cells, Tensors, Parameters and Generators."""

from __future__ import annotations

from typing import ClassVar

from mindspore import Generator, Parameter, Tensor, nn

from swansong import config


class CheckpointConfig(config.CheckpointConfig):
    """When checkpoints are saved, which of them stay, and what they contain: MindSpore's arguments.

    `saved_network` may be a Cell; values in the dict of `append_info` may also be Parameters, Tensors and
    Generators (of which the state is saved). See `swansong.CheckpointConfig`.
    """

    network_types: ClassVar[tuple[type, ...]] = (nn.Cell,)
    append_types: ClassVar[tuple[type, ...]] = (int, float, bool, str, Parameter, Tensor, Generator)
