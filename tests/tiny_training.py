"""A network small enough to be trained in every test: 60 samples, batches of 10, so 6 steps per epoch."""

from __future__ import annotations

import struct
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Model, nn
from mindspore.dataset import transforms, vision
from mindspore.train import Callback

SAMPLES, BATCH = 60, 10
STEPS = SAMPLES // BATCH
SEED = 3


class Net(nn.Cell):
    """One dense layer behind a flattening."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.fc = nn.Dense(features, 10)

    def construct(self, x):
        return self.fc(self.flatten(x))


class Samples:
    """A source for GeneratorDataset: 16 features, a class."""

    def __init__(self) -> None:
        random = np.random.RandomState(0)
        self.x = random.rand(SAMPLES, 16).astype(np.float32)
        self.y = random.randint(0, 10, SAMPLES).astype(np.int32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        return self.x[index], np.array(self.y[index])


def model(features: int = 16, *, seed: int = SEED) -> Model:
    """A freshly initialised model with moments and a learning rate that decays; also seeds everything."""
    ms.set_seed(seed)
    ds.config.set_seed(seed)
    net = Net(features)
    optimizer = nn.Adam(net.trainable_params(), nn.exponential_decay_lr(0.1, 0.9, 1000, 4, 1))
    return Model(net, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), optimizer)


def generated() -> ds.Dataset:
    """Shuffled batches of `Samples`."""
    return ds.GeneratorDataset(Samples(), ["x", "y"], shuffle=True).batch(BATCH)


def mnist(directory: Path, *, flip: bool = False) -> ds.Dataset:
    """Shuffled batches of MnistDataset; the files are written if they are missing."""
    if not directory.exists():
        directory.mkdir()
        random = np.random.RandomState(1)
        images = random.randint(0, 256, (SAMPLES, 28, 28), np.uint8)
        labels = random.randint(0, 10, SAMPLES).astype(np.uint8)
        (directory / "train-images-idx3-ubyte").write_bytes(
            struct.pack(">4I", 2051, SAMPLES, 28, 28) + images.tobytes()
        )
        (directory / "train-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 2049, SAMPLES) + labels.tobytes()
        )
    dataset = ds.MnistDataset(str(directory), shuffle=True)
    dataset = dataset.map(vision.Rescale(1 / 255, 0), input_columns="image")
    if flip:
        dataset = dataset.map(vision.RandomHorizontalFlip(0.5), input_columns="image")
    return dataset.map(transforms.TypeCast(ms.int32), input_columns="label").batch(BATCH)


def state(trained: Model) -> dict[str, bytes]:
    """Every Parameter's bytes."""
    return {p.name: p.asnumpy().tobytes() for p in trained.train_network.get_parameters()}


class StopAt(Callback):
    """Asks training to stop at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, run_context) -> None:
        if run_context.original_args().cur_step_num == self.step:
            run_context.request_stop()


class RaiseAt(Callback):
    """Raises at a step, in the given method."""

    def __init__(
        self, step: int, where: str = "on_train_step_end", error: type[BaseException] = RuntimeError
    ):
        self.step, self.error = step, error
        setattr(self, where, self._maybe)

    def _maybe(self, run_context) -> None:
        if run_context.original_args().cur_step_num == self.step:
            raise self.error("boom")
