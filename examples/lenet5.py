"""The example on the reference page of `CheckpointConfig`, as a program: LeNet5, checkpoints by policy.

    python examples/lenet5.py

What differs from the page: the classes come from `swansong.mindspore`, and one line resumes. Stop it at any
moment and start it again: it goes on at the next batch.
"""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from digits import write_digits
from mindspore import Model, nn
from mindspore.common.initializer import Normal
from mindspore.dataset import transforms, vision
from mindspore.train import Accuracy, LossMonitor

from swansong.mindspore import CheckpointConfig, ModelCheckpoint, resume

SEED = 1
BATCH = 16


class LeNet5(nn.Cell):
    """Two convolutions and three dense layers: [n, 1, 32, 32] float32 -> [n, num_class] logits."""

    def __init__(self, num_class: int = 10, num_channel: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channel, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.fc1 = nn.Dense(16 * 5 * 5, 120, weight_init=Normal(0.02))
        self.fc2 = nn.Dense(120, 84, weight_init=Normal(0.02))
        self.fc3 = nn.Dense(84, num_class, weight_init=Normal(0.02))
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """Return the logits of a batch of images."""
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)


def create_dataset(
    data_path: str | Path, *, part: str = "train", shards: int | None = None, shard: int | None = None
) -> ds.Dataset:
    """Batches of 16 images, [16, 1, 32, 32] float32, and labels, [16] int32; shuffled for training.

    Of `shards` equal parts only number `shard`, for one of as many ranks.
    """
    training = part == "train"
    path = str(Path(data_path, part))
    dataset = ds.MnistDataset(path, shuffle=training, num_shards=shards, shard_id=shard)
    image_operations = [
        vision.Resize((32, 32)),
        vision.Rescale(1 / 255, 0),
        vision.Rescale(1 / 0.3081, -0.1307 / 0.3081),
        vision.HWC2CHW(),
    ]
    dataset = dataset.map(image_operations, input_columns="image")
    dataset = dataset.map(transforms.TypeCast(ms.int32), input_columns="label")
    return dataset.batch(BATCH, drop_remainder=training)


def create_model() -> tuple[LeNet5, Model]:
    """The network, its loss and its optimizer. The seed fixes the first weights and the order of the data."""
    ms.set_seed(SEED)
    net = LeNet5()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    optim = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    return net, Model(net, loss_fn=loss, optimizer=optim, metrics={"accuracy": Accuracy()})


def main(epochs: int = 8) -> None:
    """Train, or go on training, and test."""
    ms.set_context(mode=ms.GRAPH_MODE)
    net, model = create_model()
    data_path = "./MNIST_Data"
    write_digits(Path(data_path))
    dataset = create_dataset(data_path)
    config = CheckpointConfig(saved_network=net)
    ckpoint_cb = ModelCheckpoint(prefix="LeNet5", directory="./checkpoint", config=config)
    point = resume(model, "./checkpoint", "LeNet5", dataset)
    if not point.finished(epochs):
        print(f"training from step {point.step}")
        model.train(
            epochs,
            dataset,
            callbacks=[ckpoint_cb, LossMonitor(dataset.get_dataset_size())],
            initial_epoch=point.initial_epoch,
        )
    print(model.eval(create_dataset(data_path, part="test")))


if __name__ == "__main__":
    main()
