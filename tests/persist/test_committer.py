"""What the store does for a controller: a place, one checkpoint of the parts, a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swansong.engine.recorders import HostRecorders
from swansong.errors import SaveError
from swansong.persist import places
from swansong.persist.committer import GENERATION, Committer
from swansong.protocol import messages as m
from swansong.protocol.messages import FaultKind, Outcome
from swansong.state.tensors import HostTensor
from swansong.store import catalog, parts
from swansong.store.checkpoint import Content, Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.opening import open_checkpoint
from swansong.store.parts import PartId
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer

INCIDENT = "0123abcd-1f-1"


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return Series.fresh(tmp_path / "c", "model", Files())


def committer(series: Series, key: Key | None = None) -> Committer:
    host = recorders(series)
    return Committer(series, host, world_size=2, key=key, resume_command="python train.py")


def recorders(series: Series) -> HostRecorders:
    """Those of this host, among the checkpoints' own directories."""
    return HostRecorders(directory=series.directory.parent, job="job", incarnation="1")


def content(value: float, name: str = "weights", **given: object) -> Content:
    tensors = {name: HostTensor.of(np.full(5, value, np.float32))}
    return Content(tensors=tensors, components={"key": [name]}, **given)  # type: ignore[arg-type]


def write(series: Series, rank: int, what: Content, *, attempt: int = 1, key: Key | None = None) -> None:
    """What a rank does on an order to save: it knows nothing but the incident."""
    place = places.staging(series.directory, series.stem, INCIDENT)
    identity = places.checkpoint_id(INCIDENT)
    parts.write_part(place, identity, Writer(Files()), what, PartId(GENERATION, attempt, rank), key=key)


def order(step: int, *of: tuple[int, int], cause: FaultKind = FaultKind.LOST) -> m.Commit:
    return m.Commit(INCIDENT, step, tuple((attempt, rank, ("key",)) for attempt, rank in of), cause)


def test_parts_of_several_ranks_become_one_checkpoint_and_their_place_goes(series: Series) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0, "a"))
    write(series, 1, content(2.0, "b"), attempt=2)
    path = Path(store.commit(order(7, (1, 0), (2, 1))))

    assert path == series.directory / "model-7"
    with open_checkpoint(path) as checkpoint:
        assert {name: tensor.array[0] for name, tensor in checkpoint.read_all().items()} == {
            "a": 1.0,
            "b": 2.0,
        }
        assert checkpoint.manifest is not None
        assert (checkpoint.manifest.step, checkpoint.manifest.world_size) == (7, 2)
        assert (checkpoint.manifest.run, checkpoint.manifest.kind) == (series.run, "fault")
    assert list(series.space.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (FaultKind.LOST, "fault"),
        (FaultKind.RAISED, "fault"),
        (FaultKind.STALLED, "fault"),
        (FaultKind.SIGNALLED, "preemption"),
        (FaultKind.REQUESTED, "requested"),
    ],
)
def test_the_cause_gives_the_kind(series: Series, cause: FaultKind, kind: str) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0))
    store.commit(order(7, (1, 0), cause=cause))

    (found,) = catalog.scan(series.directory)
    assert found.manifest is not None
    assert found.manifest.kind == kind


def test_a_checkpoint_of_this_run_and_step_counts_as_done(series: Series) -> None:
    options = SaveOptions(container="directory")
    periodic = save(
        series,
        Writer(Files()),
        "model-7",
        content(1.0),
        Point(step=7),
        kind="periodic",
        seq=1,
        options=options,
    )
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0))

    assert store.commit(order(7, (1, 0))) == str(periodic.path)
    assert len(catalog.scan(series.directory)) == 1
    assert list(series.space.temporary.iterdir()) == []


def test_another_run_s_checkpoint_of_that_name_is_left_alone(series: Series) -> None:
    other = replace(series, run="of another start")
    options = SaveOptions(container="directory")
    for name in ("model-7", "model-7_1"):
        save(other, Writer(Files()), name, content(9.0), Point(step=7), kind="fault", seq=1, options=options)
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0))

    assert store.commit(order(7, (1, 0))) == str(series.directory / "model-7_2")
    with open_checkpoint(series.directory / "model-7") as checkpoint:
        assert checkpoint.read("weights").array[0] == 9.0


def test_what_no_order_names_is_not_committed(series: Series) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(9.0), attempt=1)
    write(series, 1, content(1.0), attempt=2)
    path = Path(store.commit(order(7, (2, 1))))

    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read("weights").array[0] == 1.0


def test_a_missing_part_is_an_error_and_nothing_is_visible(series: Series) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0, "a"))
    with pytest.raises(SaveError, match="the part of rank 1"):
        store.commit(order(7, (1, 0), (1, 1)))

    assert [found for found in catalog.scan(series.directory) if found.state == "committed"] == []
    store.discard(INCIDENT)
    assert list(series.space.temporary.iterdir()) == []


def test_a_place_that_is_asked_for_again_keeps_its_parts(series: Series) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0))
    store.prepare(INCIDENT, 6)

    assert store.commit(order(6, (1, 0))) == str(series.directory / "model-6")


def test_with_a_key_parts_and_checkpoint_are_sealed(series: Series) -> None:
    key = Key(bytes(32))
    store = committer(series, key)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0), key=key)
    path = Path(store.commit(order(7, (1, 0))))

    with open_checkpoint(path, key=key) as checkpoint:
        assert checkpoint.read("weights").array[0] == 1.0


def report(path: str = "", outcome: Outcome = Outcome.NOTHING) -> m.Report:
    fault = m.Fault(kind=FaultKind.RAISED, rank=1, what="ValueError: no", traceback="Traceback ...", step=7)
    return m.Report(
        incident=INCIDENT,
        faults=(fault,),
        outcome=outcome,
        step=7 if path else None,
        path=path,
        reason="" if path else "nobody is left",
        reports={},
        savers={"key": 0} if path else {},
        notes=("rank 1 was slow",),
        seconds={"detect": 0.0, "freeze": 0.5, "choose": 0.0, "save": 2.0},
    )


def test_the_report_has_every_key_that_is_promised(series: Series) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    inexact = {"what": "objects", "reason": "no boundary was reached"}
    write(series, 0, content(1.0, inexact=(inexact,)))
    path = store.commit(order(7, (1, 0)))
    store.report(report(path, Outcome.SAVED))

    document = json.loads(places.incident_file(series.directory, INCIDENT).read_text())
    promised = "id kind first_fault ranks step outcome reason path inexact seconds savers resume_command"
    assert set(promised.split()) <= document.keys()
    assert (document["id"], document["kind"], document["outcome"]) == (INCIDENT, "raised", "saved")
    assert document["path"] == path
    assert inexact in document["inexact"]
    assert document["first_fault"]["what"] == "ValueError: no"
    assert document["seconds"] == {"detect": 0.0, "freeze": 0.5, "choose": 0.0, "save": 2.0, "commit": None}
    assert document["resume_command"] == "python train.py"


def test_a_report_of_nothing_saved_removes_the_place(series: Series) -> None:
    store = committer(series)
    store.prepare(INCIDENT, 7)
    write(series, 0, content(1.0))
    store.report(report())

    document = json.loads(places.incident_file(series.directory, INCIDENT).read_text())
    assert (document["path"], document["reason"]) == (None, "nobody is left")
    assert list(series.space.temporary.iterdir()) == []
