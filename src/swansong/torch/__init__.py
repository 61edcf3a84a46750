"""Adapter for PyTorch: optimizers, modules, data loaders, torchrun.

with swansong.torch.protect(
    model=model, optimizer=optimizer, loader=loader, scheduler=scheduler,
    directory="checkpoints", prefix="lenet", config=CheckpointConfig(save_checkpoint_steps=100),
    ttp="127.0.0.1:2000",
) as run:
    run.resume()
    for epoch, (images, labels) in run.batches(epochs=10):
        ...
        optimizer.step()
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "swansong.torch needs PyTorch, which is not installed: pip install 'swansong[torch]'", name="torch"
    )

from swansong.config import CheckpointConfig
from swansong.torch.protecting import load_state, protect
from swansong.torch.run import Run
from swansong.ttp_options import TTPOptions

__all__ = ["CheckpointConfig", "Run", "TTPOptions", "load_state", "protect"]
