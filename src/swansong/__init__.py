"""swansong keeps a training run's work: durable, verifiable checkpoints by policy.

The adapters are separate modules, so that importing this needs no framework: `swansong.mindspore`.
"""

from swansong.config import CheckpointConfig
from swansong.errors import SwansongError, SwansongWarning
from swansong.ttp_options import TTPOptions
from swansong.version import VERSION

__version__ = VERSION

__all__ = ["CheckpointConfig", "SwansongError", "SwansongWarning", "TTPOptions", "__version__"]
