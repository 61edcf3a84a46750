"""A fault's checkpoint as files that MindSpore loads: names by place, numbers in order, content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swansong.persist.boundary import BoundaryState, Record, pack, tensor_of
from swansong.persist.rank_files import RankFiles
from swansong.state.tensors import HostTensor
from swansong.store import naming
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.files import Files
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer


def files(directory: Path = Path("/nowhere"), **given) -> RankFiles:
    return RankFiles(**({"steps_per_epoch": 6, "numbered_in": str(directory)} | given))


@pytest.mark.parametrize(
    ("given", "step", "place"),
    [
        ({}, 1, (1, 1)),
        ({}, 6, (1, 6)),
        ({}, 7, (2, 1)),
        ({"steps_per_epoch": 1}, 7, (7, 1)),
        ({"first_step": 8, "first_epoch": 2}, 9, (3, 1)),
        ({"first_step": 6, "first_epoch": 1}, 9, (2, 3)),
        ({"first_step": 8, "first_epoch": 2}, 8, (2, 6)),
    ],
    ids=["first", "an epoch's last", "the next", "epochs of one step", "begun anew", "in an epoch", "before"],
)
def test_a_step_has_a_place(given, step, place):
    wanted = files(**given)
    assert wanted.place(step) == place
    assert wanted.name(step, 0) == "ttp_saved_checkpoints-{}_{}".format(*place)
    assert wanted.file_names(step)(3, 0, "x") == "rank_3/iteration-{}_{}.ckpt".format(*place)
    point = wanted.point(Point(step=step))
    assert (point.epoch, point.step_in_epoch) == place


def _tensor(name: str, value: float):
    return tensor_of(name, HostTensor.of(np.full(2, value, np.float32)))


def _record(step: int, value: float) -> Record:
    return Record(step, False, pack(BoundaryState(tensors=(_tensor("mean", value),))))


@pytest.mark.parametrize(
    ("records", "value", "reason"),
    [
        ({0: _record(7, 1.0), 3: _record(7, 2.0)}, 1.0, ""),
        ({3: _record(7, 2.0)}, 2.0, "rank 0 has no record of step 7"),
        ({0: _record(6, 1.0), 3: _record(7, 2.0)}, 2.0, "rank 0 has no record of step 7"),
    ],
    ids=["rank 0's", "rank 0 on another host", "rank 0 a step behind"],
)
def test_boundary_tensors_stand_in_the_file_and_rank_0_s_count(records, value, reason):
    shown = Content(tensors={"w": HostTensor.of(np.ones(3, np.float32))}, components={"key": ["w"]})
    given = files().whole(shown, records, 7, 3)
    assert given.tensors["mean"].array[0] == value
    assert given.components == {"key": ["w", "mean"]}
    assert [entry["what"] for entry in given.inexact] == (["boundary tensors"] if reason else [])
    assert not reason or reason in given.inexact[0]["reason"]
    counted = {"cur_epoch_num": 2, "cur_step_num": 1, "cur_rank": 3, "batch_num": 6, "global_step": 7}
    assert given.append_info == counted


def test_where_no_two_ranks_hold_the_same_each_has_its_own(tmp_path):
    shown = Content(tensors={"w": HostTensor.of(np.ones(3, np.float32))}, components={"key": ["w"]})
    given = files(own=True).whole(shown, {0: _record(7, 1.0), 3: _record(7, 2.0)}, 7, 3)
    assert [given.scope, given.tensors["mean"].array[0], given.inexact] == ["rank_3/", 2.0, ()]


def test_a_recorded_tensor_counts_where_it_was_shown_too():
    one = HostTensor.of(np.ones(2, np.float32))
    shown = Content(tensors={"w": one, "mean": one}, components={"key": ["w", "mean"]})
    given = files().whole(shown, {0: _record(7, 5.0)}, 7, 3)
    assert given.tensors["mean"].array[0] == 5.0
    assert given.components == {"key": ["w", "mean"]}


def test_what_is_appended_hides_no_parameter():
    shown = Content(
        tensors={"global_step": HostTensor.of(np.ones(1, np.int32))}, components={"key": ["global_step"]}
    )
    assert "global_step" not in files().whole(shown, {}, 7, 3).append_info


def test_numbers_are_above_those_of_both_directories(tmp_path):
    periodic = Series.fresh(tmp_path / "periodic", "net", Files())
    faults = Series.fresh(tmp_path / "faults", "net", Files())
    drawn = [periodic.draw(), periodic.draw()]
    wanted = files(periodic.directory)
    drawn.append(wanted.draw(faults))
    drawn.append(periodic.draw())
    assert drawn == [1, 2, 3, 4]
    content = Content(tensors={"w": HostTensor.of(np.ones(1))})
    options = SaveOptions(container="directory")
    name = naming.fault_name(1, 1)
    save(faults, Writer(Files()), name, content, Point(step=1), kind="fault", seq=9, options=options)
    assert wanted.draw(faults) == 10
    assert periodic.draw() == 11
