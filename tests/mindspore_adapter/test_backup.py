"""load_checkpoint_with_backup: this rank's file, or that of a rank which holds the same."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

import tiny_training as tiny
from swansong.errors import SwansongWarning
from swansong.mindspore import MindIOTTPAdapter
from swansong.mindspore.ranks import Ranks
from ttp_support import fails_at

pytestmark = pytest.mark.mindspore
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A fault's checkpoint by rank 0 of a job, at step 8; and what it holds."""
    directory = tmp_path_factory.mktemp("saved")
    fails_at(directory, 8)
    return directory / "ttp/ttp_saved_checkpoints-2_2"


def load(path: Path, strategy: Path | None = None, **how) -> tuple[dict, ms.Model]:
    model = tiny.model(seed=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwansongWarning)
        weights = MindIOTTPAdapter.load_checkpoint_with_backup(path, strategy, model.train_network, **how)
    return weights, model


def file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}" / "net.ckpt"


def plain(saved: Path, directory: Path, *ranks: int, step: int = 8) -> None:
    """MindSpore's own checkpoints, one of each rank, without manifests."""
    weights = ms.load_checkpoint(str(saved / "rank_0/iteration-2_2.ckpt"))
    listed = [{"name": name, "data": value} for name, value in weights.items() if name != "global_step"]
    listed.append({"name": "global_step", "data": ms.Tensor(np.array([step], np.int32))})
    for rank in ranks:
        file(directory, rank).parent.mkdir(parents=True)
        ms.save_checkpoint(listed, str(file(directory, rank)))


def cut(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size - 7)


def flip(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_own_file_is_loaded_if_it_is_sound(saved):
    weights, model = load(saved / "rank_0/iteration-2_2.ckpt")
    assert int(weights["global_step"].asnumpy()[0]) == 8
    want = ms.load_checkpoint(str(saved / "rank_0/iteration-2_2.ckpt"))
    got = {p.name: p.asnumpy() for p in model.train_network.get_parameters()}
    assert all(np.array_equal(got[name], want[name].asnumpy()) for name in got)


def test_a_rank_that_saved_nothing_gets_the_saver_s_file(saved):
    weights, _ = load(saved / "rank_1/iteration-2_2.ckpt")
    assert int(weights["global_step"].asnumpy()[0]) == 8


@pytest.mark.parametrize("damage", [cut, Path.unlink], ids=["cut off", "missing"])
def test_a_replica_s_file_stands_in(saved, tmp_path, damage):
    plain(saved, tmp_path, 0, 2)
    damage(file(tmp_path, 0))
    assert "fc.weight" in load(file(tmp_path, 0))[0]


def test_a_flipped_bit_is_found_where_a_manifest_vouches_for_the_file(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    flip(tmp_path / "copy/rank_0/iteration-2_2.ckpt")
    with pytest.raises(ValueError, match="digest"):
        load(tmp_path / "copy/rank_0/iteration-2_2.ckpt")


@pytest.mark.parametrize(
    ("other", "says"),
    [((0, 7), "different steps.*rank 0: 8, rank 1: 7"), ((1, -1), "nothing could be loaded on rank 1")],
    ids=["at another step", "with nothing"],
)
def test_what_another_rank_has_loaded_must_fit(saved, monkeypatch, other, says):
    class Two(Ranks):
        def gather(self, values):
            return [tuple(int(value) for value in values), other]

    monkeypatch.setattr(Ranks, "current", lambda: Two(0, 2))
    with pytest.raises(ValueError, match=says):
        load(saved / "rank_0/iteration-2_2.ckpt")


def test_if_the_replica_s_file_is_damaged_too_the_error_lists_both(saved, tmp_path):
    plain(saved, tmp_path, 0, 2)
    cut(file(tmp_path, 0))
    cut(file(tmp_path, 2))
    with pytest.raises(ValueError, match="tried") as raised:
        load(file(tmp_path, 0))
    assert str(file(tmp_path, 0)) in str(raised.value)
    assert str(file(tmp_path, 2)) in str(raised.value)


def test_the_first_sound_replica_counts_and_later_damage_does_not_matter(saved, tmp_path):
    plain(saved, tmp_path, 0, 1, 2)
    cut(file(tmp_path, 0))
    cut(file(tmp_path, 2))
    assert "fc.weight" in load(file(tmp_path, 0))[0]


@pytest.mark.parametrize("path", ["rank_0/net.ckpt", "net.ckpt"], ids=["no replica", "no rank in the path"])
def test_without_any_file_the_error_says_so(tmp_path, path):
    with pytest.raises(ValueError, match="no rank is known that holds the same"):
        load(tmp_path / path)


def test_an_encrypted_file_needs_its_key_and_mode(tmp_path):
    fails_at(tmp_path, 8, enc_key=KEY, enc_mode="AES-CBC")
    path = tmp_path / "ttp/ttp_saved_checkpoints-2_2/rank_3/iteration-2_2.ckpt"
    assert "fc.weight" in load(path, dec_key=KEY, dec_mode="AES-CBC")[0]
    with pytest.raises(ValueError, match="encrypted"):
        load(path)


def strategy_file(path: Path, layouts: dict[str, tuple[list[int], list[int]]]) -> Path:
    """A strategy file: name -> (device matrix, tensor map)."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    strategies = ParallelStrategyMap()
    strategies.current_stage = 0
    for name, (devices, placed) in layouts.items():
        item = strategies.parallel_layout_item.add()
        item.param_name = name
        item.parallel_layouts.dev_matrix.add().dim.extend(devices)
        item.parallel_layouts.tensor_map.add().dim.extend(placed)
        item.parallel_layouts.param_split_shape.add().dim.extend([1])
        item.parallel_layouts.indices_offset.add().dim.extend([1])
        item.parallel_layouts.field = 0
        item.parallel_layouts.opt_weight_shard_step = 0
        item.parallel_layouts.opt_weight_shard_size = 0
    path.write_bytes(strategies.SerializeToString())
    return path


def test_a_strategy_file_tells_who_holds_the_same_of_everything(saved, tmp_path):
    """Of two by two ranks, 0 and 2 hold the same part of the weight; the bias is held by all."""
    plain(saved, tmp_path, 1, 2)
    strategy = strategy_file(
        tmp_path / "strategy.ckpt", {"fc.weight": ([2, 2], [0, -1]), "fc.bias": ([2, 2], [-1])}
    )
    file(tmp_path, 1).unlink()
    file(tmp_path, 1).write_bytes(b"that of a rank with another part")
    assert "fc.weight" in load(file(tmp_path, 0), strategy)[0]
    file(tmp_path, 2).unlink()
    with pytest.raises(ValueError, match="tried") as raised:
        load(file(tmp_path, 0), strategy)
    assert str(file(tmp_path, 1)) not in str(raised.value)


def test_a_damaged_strategy_file_is_named(saved, tmp_path):
    strategy = tmp_path / "strategy.ckpt"
    strategy.write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match=r"strategy\.ckpt"):
        load(file(tmp_path, 0), strategy)
