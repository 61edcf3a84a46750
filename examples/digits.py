"""Handwritten digits in MNIST's place and format, without a download.

scikit-learn carries 1,797 digits of 8x8 pixels, written by 43 people. They are brought to MNIST's 28x28 and
written as MNIST's own IDX files, where the seed example of `CheckpointConfig` looks for them:

    MNIST_Data/train/train-images-idx3-ubyte    train-labels-idx1-ubyte
    MNIST_Data/test/t10k-images-idx3-ubyte      t10k-labels-idx1-ubyte

LeNet5 wants 32x32: resize, as `create_dataset` in lenet5.py does.

IDX (http://yann.lecun.com/exdb/mnist): two zero bytes, the type (8 = unsigned byte), the number of
dimensions, each dimension as a big-endian 32-bit integer, then the elements in row-major order.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

UNSIGNED_BYTE = 8
TEST_EVERY = 5


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    """Return `array` as an IDX file's content."""
    head = struct.pack(f">HBB{array.ndim}I", 0, UNSIGNED_BYTE, array.ndim, *array.shape)
    return head + array.tobytes()


def enlarge(images: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Bring [n, 8, 8] images of 0..16 to [n, 28, 28] of 0..255: each pixel 3x3, a margin of 2."""
    grey = np.rint(images * (255 / 16)).astype(np.uint8)
    large = grey.repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(large, ((0, 0), (2, 2), (2, 2)))


def write_digits(directory: Path) -> Path:
    """Write the four files under `directory`, unless they are there already, and return `directory`.

    Every fifth image is for testing: 1,437 for training, 360 for testing. The content is the same every time.
    A file appears whole or not at all, so an interrupted call is simply repeated.
    """
    digits = load_digits()
    images, labels = enlarge(digits.images), digits.target.astype(np.uint8)
    testing = np.arange(len(images)) % TEST_EVERY == 0
    for part, stem, chosen in (("train", "train", ~testing), ("test", "t10k", testing)):
        (directory / part).mkdir(parents=True, exist_ok=True)
        _write(directory / part / f"{stem}-images-idx3-ubyte", idx_bytes(images[chosen]))
        _write(directory / part / f"{stem}-labels-idx1-ubyte", idx_bytes(labels[chosen]))
    return directory


def _write(path: Path, content: bytes) -> None:
    if path.exists():
        return
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


if __name__ == "__main__":
    print(write_digits(Path("MNIST_Data")).resolve())
