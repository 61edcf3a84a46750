"""The examples' data: written once, the same every time, read by MindSpore as MNIST."""

import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import pytest

pytestmark = pytest.mark.mindspore

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import digits  # noqa: E402
import lenet5  # noqa: E402


def files(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_digits_are_the_same_every_time_and_written_once(tmp_path):
    first = digits.write_digits(tmp_path / "a")
    assert files(first) == files(digits.write_digits(tmp_path / "b"))
    times = {path: path.stat().st_mtime_ns for path in first.rglob("*-ubyte")}
    digits.write_digits(first)
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*-ubyte")} == times
    assert len(times) == 4


def test_an_interrupted_writing_of_digits_is_completed(tmp_path):
    whole = files(digits.write_digits(tmp_path / "a"))
    (tmp_path / "a" / "test" / "t10k-labels-idx1-ubyte").unlink()
    assert files(digits.write_digits(tmp_path / "a")) == whole


def test_the_batches_are_what_lenet5_takes(tmp_path):
    path = digits.write_digits(tmp_path)
    train, test = (lenet5.create_dataset(path, part=part) for part in ("train", "test"))
    image, label = next(train.create_tuple_iterator(num_epochs=1, output_numpy=True))
    assert (image.shape, image.dtype, label.shape, label.dtype) == (
        (16, 1, 32, 32),
        "float32",
        (16,),
        "int32",
    )
    assert (train.get_dataset_size(), test.get_dataset_size()) == (1437 // 16, -(-360 // 16))
    net, _ = lenet5.create_model()
    assert net(ms.Tensor(image)).shape == (16, 10)
    assert (ms.get_seed(), ds.config.get_seed()) == (lenet5.SEED, lenet5.SEED)
