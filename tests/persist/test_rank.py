"""One rank's live state: where it says that it stands, and what it writes on an order."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swansong.engine.clock import Gate, UpdateClock
from swansong.engine.processor import StateMovedError
from swansong.engine.recorder import RecorderOptions
from swansong.engine.watchdog import StallOptions, Watchdog
from swansong.errors import ClockNotReadableError, SaveError
from swansong.persist import places
from swansong.persist.boundary import BoundaryState, pack, tensor_of
from swansong.persist.committer import Committer
from swansong.persist.rank import Counted, LiveComponent, LiveRank
from swansong.persist.rank_files import RankFiles
from swansong.persist.records import RecordPlaces, Records
from swansong.protocol import messages as m
from swansong.protocol.messages import Action, FaultKind, Outcome
from swansong.state.tensors import HostTensor
from swansong.state.tree import Flat
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.saving import plain_skeleton
from swansong.store.series import Series

INCIDENT = "0123abcd-1f-1"


class Live:
    """A rank of one array, trained by the test."""

    def __init__(self, directory: Path, start: int = 0, rank_files: RankFiles | None = None) -> None:
        self.rank_files = rank_files
        self.array = np.zeros(1000, np.float32)
        self.clock = UpdateClock("key", step=start)
        self.places = RecordPlaces.of(
            RecorderOptions(directory=directory.parent, slot_bytes=4096), directory, "model", bytes(16)
        )
        self.recorder = self.places.create(3, ["key"], pytest.fail)
        self.records = Records(start, self.recorder)
        self.gate = Gate(lease_s=30.0)
        self.watchdog = Watchdog(StallOptions(), time.monotonic())
        self.outcomes: list[m.Release] = []
        self.said: list[str] = []
        self.series = Series.fresh(directory, "model", Files())
        component = LiveComponent(
            "arrays", self.clock, lambda: Flat({"w": HostTensor.of(self.array)}, {}, None)
        )
        self.rank = LiveRank(
            3,
            (component,),
            self.records,
            self.gate,
            self.watchdog,
            self.places.here,
            directory=directory,
            stem="model",
            key=None,
            rank_files=rank_files,
            on_outcome=self.outcomes.append,
            on_depart=lambda: None,
            say=self.said.append,
        )

    def update(self) -> None:
        self.gate.enter([self.clock])
        with self.clock.window():
            self.array += 1

    def boundary(self, step: int, **objects: Any) -> None:
        self.records.add(step, pack(BoundaryState(shared=plain_skeleton(objects, "objects"))))

    def save(self, step: int, progress: Callable[[int], None] = lambda nbytes: None) -> Path:
        """Carry out an order, and commit it."""
        committer = Committer(
            self.series,
            self.places.here,
            world_size=4,
            key=None,
            resume_command="",
            rank_files=self.rank_files,
        )
        committer.prepare(INCIDENT, step)
        try:
            self.rank.save(m.StartSave(INCIDENT, 1, step, ("key",)), progress, lambda: False)
            return Path(committer.commit(m.Commit(INCIDENT, step, ((1, 3, ("key",)),), FaultKind.LOST)))
        finally:
            committer.discard(INCIDENT)


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return Live(tmp_path)


def test_it_is_settled_at_a_boundary_and_between_update_and_boundary_it_is_not(live: Live) -> None:
    state = live.rank.read_state()
    assert (state.boundary, state.settled, state.held["key"].step) == (None, True, 0)
    live.update()
    state = live.rank.read_state()
    assert (state.boundary, state.settled, state.held["key"].step) == (None, False, 1)
    live.boundary(1)
    state = live.rank.read_state()
    assert (state.boundary, state.settled, state.main) == (1, True, "in step 2")


def test_inside_an_update_it_is_whole_at_no_step(live: Live) -> None:
    live.gate.enter([live.clock])
    with live.clock.window():
        state = live.rank.read_state()
    assert (state.held["key"].step, state.settled) == (None, False)


def test_who_has_thrown_will_not_change_any_more(live: Live) -> None:
    live.update()
    live.rank.ended = "ended by ValueError"
    assert live.rank.read_state().settled


def test_after_resuming_nothing_is_new_before_the_first_boundary(tmp_path: Path) -> None:
    state = Live(tmp_path, start=7).rank.read_state()
    assert (state.boundary, state.settled, state.held["key"].step) == (None, True, 7)


def test_values_are_digested_anew_after_each_update_only(live: Live) -> None:
    first = live.rank.read_state().held["key"].values
    assert live.rank.read_state().held["key"].values == first
    live.update()
    assert live.rank.read_state().held["key"].values not in ("", first)


def test_the_stack_is_that_of_the_main_thread(live: Live) -> None:
    assert "test_the_stack_is_that_of_the_main_thread" in live.rank.read_state().stack


def test_what_is_saved_is_the_array_with_the_objects_of_its_step(live: Live) -> None:
    live.update()
    live.boundary(1, seen=1)
    wrote: list[int] = []
    with open_checkpoint(live.save(1, wrote.append)) as checkpoint:
        assert (checkpoint.read("w").array == 1).all()
        assert checkpoint.objects == {"seen": 1}
        assert checkpoint.manifest is not None
        assert checkpoint.manifest.inexact == []
    assert wrote == sorted(wrote)
    assert wrote[-1] >= live.array.nbytes


def test_without_a_boundary_of_that_step_the_objects_before_stand_in_and_that_is_said(live: Live) -> None:
    live.update()
    live.boundary(1, seen=1)
    live.update()
    with open_checkpoint(live.save(2)) as checkpoint:
        assert (checkpoint.read("w").array == 2).all()
        assert checkpoint.objects == {"seen": 1}
        assert checkpoint.manifest is not None
        (entry,) = checkpoint.manifest.inexact
    assert entry["what"] == "shared objects"
    assert "step 2" in entry["reason"]


def test_another_step_than_the_one_ordered_is_not_written(live: Live) -> None:
    live.update()
    with pytest.raises(StateMovedError, match="step 2"):
        live.save(2)


def test_a_state_that_moves_while_it_is_written_is_no_part(live: Live) -> None:
    live.update()
    live.boundary(1)
    with pytest.raises(StateMovedError, match="not at step 1 any more"):
        live.save(1, lambda nbytes: live.update() if live.clock.read().step == 1 else None)
    place = places.staging(live.series.directory, "model", INCIDENT)
    assert not place.exists()


def test_what_it_does_not_hold_it_does_not_write(live: Live) -> None:
    with pytest.raises(SaveError, match="holds 0 of 1"):
        live.rank.save(m.StartSave(INCIDENT, 1, 0, ("other",)), lambda nbytes: None, lambda: False)


def test_a_part_that_is_not_wanted_any_more_is_given_up(tmp_path: Path) -> None:
    files = Counted(lambda nbytes: None, lambda: True)
    descriptor = files.create(tmp_path / "file")
    with pytest.raises(SaveError, match="not wanted"):
        files.write(descriptor, np.zeros(8, np.uint8), 0)
    files.close(descriptor)


def release(action: Action, path: str = "") -> m.Release:
    return m.Release(incident=INCIDENT, outcome=Outcome.SAVED, action=action, path=path, reason="no holder")


def test_the_end_of_the_job_is_told_and_closes_the_gate_for_good(live: Live) -> None:
    live.rank.wake(release(Action.STOP))
    assert live.outcomes == [release(Action.STOP)]
    with pytest.raises(Exception, match="no holder"):
        live.gate.enter([live.clock])


@pytest.mark.parametrize(
    ("path", "said"), [("/c/model-1", "training goes on"), ("", "was not saved: no holder")]
)
def test_an_incident_after_which_training_goes_on_is_said(live: Live, path: str, said: str) -> None:
    live.rank.wake(release(Action.RESUME, path))
    assert said in live.said[0]
    assert live.outcomes == []


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_closed_gate_is_no_stall(live: Live, closed: bool) -> None:
    now = time.monotonic()
    live.watchdog.note_step(now)
    if closed:
        live.rank.close_gate()
    faults = [live.rank.watch(now + later) for later in (25.0, 50.0, 70.0, 80.0)]

    assert [fault.kind for fault in faults if fault is not None] == ([] if closed else [FaultKind.STALLED])


def test_as_files_for_mindspore_it_writes_one_ckpt_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    live = Live(tmp_path, rank_files=RankFiles(steps_per_epoch=6, numbered_in=str(tmp_path)))
    live.update()
    mean = tensor_of("mean", HostTensor.of(np.full(2, 5.0, np.float32)))
    live.records.add(1, pack(BoundaryState(shared=plain_skeleton({"said": 1}, "objects"), tensors=(mean,))))

    path = live.save(1)
    assert path == tmp_path / "ttp_saved_checkpoints-1_1"
    assert [str(file.relative_to(path)) for file in path.rglob("*.*")] == [
        "manifest.json",
        "rank_3/iteration-1_1.ckpt",
    ]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.manifest is not None
        assert {name: t.array[0] for name, t in checkpoint.read_all().items()} == {"w": 1.0, "mean": 5.0}
        assert checkpoint.objects == {"said": 1}
        assert checkpoint.append_info["global_step"] == 1
        assert [entry["what"] for entry in checkpoint.manifest.inexact] == ["boundary tensors"]
        assert (checkpoint.manifest.epoch, checkpoint.manifest.step_in_epoch) == (1, 1)


def test_a_clock_that_cannot_be_read_yet_is_left_out_until_it_can(live: Live, monkeypatch: Any) -> None:
    def busy() -> None:
        raise ClockNotReadableError("a kernel is under way")

    live.update()
    live.boundary(1)
    with monkeypatch.context() as patched:
        patched.setattr(live.clock, "read", busy)
        state = live.rank.read_state()
        live.rank.ended = "ended by RuntimeError"
        assert [state.held, state.settled, live.rank.read_state().settled] == [{}, False, False]
    assert live.rank.read_state().settled
