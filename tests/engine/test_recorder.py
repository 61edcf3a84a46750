"""The flight recorder: what it holds, who may read it, and what it refuses."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash

from child_process import forked
from swansong.engine import recorder_reading
from swansong.engine.clock import UNKNOWN, ExternalClock, Reading, UpdateClock
from swansong.engine.record_places import is_alive, place_of
from swansong.engine.recorder import Recorder, RecorderOptions
from swansong.engine.recorder_layout import MAX_SLOT_BYTES, PREFIX, Layout, Whose
from swansong.engine.recorder_reading import read_recorder, sweep_recorders
from swansong.errors import ConfigError, RecordError, RecordTooLargeError, SwansongWarning

SLOT = 1000


@pytest.fixture
def options(tmp_path: Path) -> RecorderOptions:
    return RecorderOptions(directory=tmp_path, slot_bytes=SLOT)


@pytest.fixture
def recorder(options: RecorderOptions) -> Iterator[Recorder]:
    with made(options) as recorder:
        yield recorder


def made(options: RecorderOptions, rank: int = 3, incarnation: str = "first") -> Recorder:
    return Recorder.create(options, job="job", incarnation=incarnation, rank=rank, keys=("a", "b"))


def test_a_recorder_is_read_as_it_was_written(recorder: Recorder) -> None:
    a = UpdateClock("a", step=4, cells=recorder.cells("a"))
    ExternalClock("b", read_begun=lambda: 5, read_done=lambda: 5, step=5, cells=recorder.cells("b"))
    a.queue()
    a.begin()
    before = time.monotonic()
    for step in (3, 4):
        recorder.write_boundary(step, f"boundary {step}".encode())
    after = time.monotonic()
    recorder.write_provisional(5, b"")
    recorder.set_phase("wertet aus: Prüfung")

    for found in (read_recorder(recorder.path), recorder.recorded()):
        assert found.whose == recorder.whose
        assert (found.whose.rank, found.whose.pid) == (3, os.getpid())
        assert is_alive(found.whose.pid, found.whose.start_time)
        assert found.clocks == {"a": Reading(5, 5, 4), "b": Reading(5, UNKNOWN, UNKNOWN)}
        assert [(r.step, r.payload) for r in found.boundaries] == [(4, b"boundary 4"), (3, b"boundary 3")]
        assert found.provisional is not None
        assert (found.provisional.step, found.provisional.payload) == (5, b"")
        assert found.phase == "wertet aus: Prüfung"
        assert before <= found.boundary_times[0] <= found.boundary_times[1] <= after


def test_a_recorder_to_which_nothing_was_written_is_empty(recorder: Recorder) -> None:
    found = read_recorder(recorder.path)
    assert (found.boundaries, found.provisional, found.phase, found.boundary_times) == ((), None, "", ())
    assert found.clocks == {"a": Reading(0, 0, 0), "b": Reading(0, 0, 0)}


def test_a_provisional_record_holds_until_the_next_boundary_also_after_going_back(recorder: Recorder) -> None:
    recorder.write_boundary(7, b"7")
    recorder.write_provisional(8, b"8?")
    assert recorder.recorded().provisional is not None
    recorder.write_boundary(2, b"2")
    assert recorder.recorded().provisional is None
    assert [record.step for record in recorder.recorded().boundaries] == [2, 7]
    recorder.write_provisional(3, b"3?")
    found = recorder.recorded().provisional
    assert found is not None
    assert found.step == 3


def test_a_boundary_is_found_by_its_step(recorder: Recorder) -> None:
    for step in (1, 2, 3):
        recorder.write_boundary(step, bytes([step]))
    found = recorder.recorded()
    assert [record and record.payload for record in map(found.at, (1, 2, 3))] == [None, b"\2", b"\3"]


def test_the_times_of_the_last_128_boundaries_are_kept(recorder: Recorder) -> None:
    for step in range(1, 301):
        recorder.write_boundary(step, b"")
    times = read_recorder(recorder.path).boundary_times
    assert len(times) == 128
    assert list(times) == sorted(times)


def test_a_kill_between_a_boundarys_time_and_the_count_leaves_the_times_before(recorder: Recorder) -> None:
    for step in range(1, 301):
        recorder.write_boundary(step, b"")
    times = recorder.recorded().boundary_times
    count = recorder._count[0]
    recorder.write_boundary(301, b"")
    recorder._count[0] = count  # as if it had not come to that
    assert recorder.recorded().boundary_times == times


def test_long_words_for_a_phase_are_cut(recorder: Recorder) -> None:
    recorder.set_phase("é" * 500)
    assert read_recorder(recorder.path).phase == "é" * 96


def test_all_its_memory_is_there_from_the_start_and_nobody_else_can_look_in(recorder: Recorder) -> None:
    status = recorder.path.stat()
    assert status.st_size >= 4 * SLOT
    assert status.st_blocks * 512 >= status.st_size
    assert status.st_mode & 0o777 == 0o600
    assert recorder.path.parent.stat().st_mode & 0o777 == 0o700


# -- larger than a slot


def test_boundary_state_over_the_slots_size_is_an_error_that_says_what_to_do(recorder: Recorder) -> None:
    recorder.write_boundary(1, bytes(SLOT))
    with pytest.raises(
        RecordTooLargeError, match=r"rank 3, step 2: .* 1001 bytes .* 1000 bytes; .*raise"
    ) as raised:
        recorder.write_boundary(2, bytes(SLOT + 1))
    assert (raised.value.nbytes, raised.value.limit) == (SLOT + 1, SLOT)
    assert [record.step for record in recorder.recorded().boundaries] == [1]


def test_spilled_state_is_said_and_readable_in_its_process_only(options: RecorderOptions) -> None:
    with made(replace(options, spill=True)) as recorder:
        with pytest.warns(
            SwansongWarning, match=r"rank 3: boundary state of 2000 bytes .* lost with the process"
        ):
            recorder.write_boundary(1, b"x" * 2000)
        for step in (2, 3, 4):
            recorder.write_boundary(step, b"%d" % step * 2000)
        recorder.write_provisional(5, b"small")
        own, others = recorder.recorded(), read_recorder(recorder.path)
        assert [(r.step, r.payload) for r in own.boundaries] == [(4, b"4" * 2000), (3, b"3" * 2000)]
        assert [(r.step, r.nbytes, r.payload) for r in others.boundaries] == [
            (4, 2000, None),
            (3, 2000, None),
        ]
        assert own.provisional == others.provisional
        assert len(recorder._spilled) == 2


# -- whose it is


def test_a_second_recorder_of_one_rank_is_refused_and_the_first_is_unharmed(
    recorder: Recorder, options: RecorderOptions
) -> None:
    recorder.write_boundary(1, b"mine")
    with pytest.raises(RecordError, match="there is one already; do two processes claim this rank") as raised:
        made(options)
    assert raised.value.path == str(recorder.path)
    assert read_recorder(recorder.path).boundaries[0].payload == b"mine"


def test_a_forked_child_may_neither_write_nor_remove(recorder: Recorder) -> None:
    recorder.write_boundary(1, b"parent")

    def child() -> None:
        for write in (lambda: recorder.write_boundary(2, b"child"), lambda: recorder.set_phase("child")):
            with pytest.raises(RecordError, match=r"its child .* may not write"):
                write()
        recorder.remove()

    assert forked(child) == 0
    assert [record.payload for record in read_recorder(recorder.path).boundaries] == [b"parent"]


def test_an_orderly_end_removes_file_and_directory_and_an_error_leaves_them(options: RecorderOptions) -> None:
    with made(options, rank=0) as one, made(options, rank=1) as two:
        one.remove()
        assert two.path.exists()
    assert not two.path.parent.exists()
    with pytest.raises(ZeroDivisionError), made(options) as third:
        raise ZeroDivisionError
    assert third.path.exists()
    third.remove()
    third.remove()


def test_clocks_go_on_after_the_file_is_removed(recorder: Recorder) -> None:
    clock = UpdateClock("a", cells=recorder.cells("a"))
    recorder.remove()
    clock.skip()
    assert clock.read().step == 1


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        pytest.param(
            lambda place: place.mkdir(0o755), "wanted one of user .* with mode 0700", id="open-to-others"
        ),
        pytest.param(lambda place: place.symlink_to("/tmp"), "Not a directory", id="symbolic-link"),
        pytest.param(lambda place: place.write_text(""), "Not a directory", id="file"),
    ],
)
def test_a_directory_that_is_not_ours_alone_is_refused(
    prepare: Callable[[Path], object], message: str, options: RecorderOptions
) -> None:
    place = place_of(options.directory, job="job", incarnation="first", rank=3).parent
    prepare(place)
    with pytest.raises(RecordError, match=message):
        made(options)


def test_a_symbolic_link_in_the_files_place_is_not_followed(options: RecorderOptions, tmp_path: Path) -> None:
    path = place_of(options.directory, job="job", incarnation="first", rank=3)
    path.parent.mkdir(0o700)
    target = tmp_path / "target"
    path.symlink_to(target)
    with pytest.raises(RecordError, match="there is one already"):
        made(options)
    assert not target.exists()
    with pytest.raises(RecordError, match="symbolic links"):
        read_recorder(path)


def test_memory_that_is_short_is_said_with_numbers_and_no_file_stays(
    options: RecorderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RecordError, match=r"\d+ bytes wanted, \d+ free: No space left .* lower slot_bytes"):
        made(options)
    assert not list(options.directory.rglob("rank-*"))


@pytest.mark.parametrize("value", ["", "a/b", "..", "a" * 65, "é", "a b"])
@pytest.mark.parametrize("name", ["job", "incarnation"])
def test_names_that_are_no_part_of_a_file_name_are_refused(
    name: str, value: str, options: RecorderOptions
) -> None:
    given = {"job": "job", "incarnation": "first", name: value}
    with pytest.raises(ConfigError, match=f"{name}: wanted 1 to 64 letters, digits and hyphens"):
        Recorder.create(options, rank=0, keys=(), **given)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, MAX_SLOT_BYTES + 1])
def test_a_slot_size_that_cannot_be_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="slot_bytes: wanted"):
        RecorderOptions(slot_bytes=value)


# -- what cannot be read


def test_a_file_cut_short_anywhere_is_an_error(recorder: Recorder) -> None:
    recorder.write_boundary(1, b"state")
    content = recorder.path.read_bytes()
    for length in [*range(400), *range(400, len(content), 997), len(content) - 1]:
        os.truncate(recorder.path, length)
        with pytest.raises(RecordError, match=str(recorder.path)):
            read_recorder(recorder.path)
    os.truncate(recorder.path, len(content))


def forged(path: Path, **changes: object) -> bytes:
    """A header that is right in form."""
    whose = msgspec.to_builtins(read_recorder(path).whose) | changes
    packed = msgspec.msgpack.encode(whose)
    return PREFIX.pack(b"swansrec", 1, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"slot_bytes": 0}, "slots of 0 bytes", id="no-slots"),
        pytest.param({"slot_bytes": -64}, "slots of -64 bytes", id="negative-slots"),
        pytest.param({"slot_bytes": 1 << 62}, "slots of 4611686018427387904 bytes", id="huge-slots"),
        pytest.param(
            {"slot_bytes": MAX_SLOT_BYTES}, r"wanted \d+ bytes by its header", id="slots-beyond-the-end"
        ),
        pytest.param({"keys": ["k"] * 100_000}, r"wanted \d+ bytes by its header", id="many-components"),
        pytest.param({"pid": "one"}, "the header is malformed", id="wrong-type"),
        pytest.param({"keys": None}, "the header is malformed", id="missing-list"),
    ],
)
def test_no_length_or_type_in_a_header_is_believed(
    changes: dict[str, object], message: str, recorder: Recorder
) -> None:
    header = forged(recorder.path, **changes)
    content = recorder.path.read_bytes()
    recorder.path.write_bytes(header + content[len(header) :])
    with pytest.raises(RecordError, match=message):
        read_recorder(recorder.path)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        pytest.param(0, bytes(8), "no flight recorder, or one whose process died", id="no-header-yet"),
        pytest.param(8, b"\2", "wanted version 1, found 2", id="another-version"),
        pytest.param(12, b"\xff\xff\xff\xff", "header of 4294967295 bytes", id="huge-header"),
        pytest.param(16, b"\0", "the header is damaged", id="digest"),
        pytest.param(30, b"\0", "the header is damaged", id="content"),
    ],
)
def test_a_damaged_header_is_named(at: int, data: bytes, message: str, recorder: Recorder) -> None:
    with recorder.path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    with pytest.raises(RecordError, match=message):
        read_recorder(recorder.path)


def test_nonsense_in_counters_and_times_is_no_error(recorder: Recorder) -> None:
    recorder.write_boundary(1, b"state")
    layout = Layout.of(recorder.whose)
    for filling in (b"\xff", b"\x7f"):
        with recorder.path.open("r+b") as file:
            file.seek(layout.status)
            file.write(filling * (layout.records - layout.status))
        found = read_recorder(recorder.path)
        assert found.boundaries[0].payload == b"state"
        assert all(reading.step is None or reading.step >= 0 for reading in found.clocks.values())
        assert len(found.boundary_times) <= 128


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda path: None, "No such file", id="nothing"),
        pytest.param(lambda path: os.mkfifo(path, 0o600), "wanted a regular file", id="pipe"),
        pytest.param(lambda path: path.mkdir(), "wanted a regular file", id="directory"),
        pytest.param(lambda path: path.write_bytes(b""), "cut short at 0 bytes", id="empty"),
    ],
)
def test_what_is_no_recorder_is_refused_without_waiting(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    place = tmp_path / "swansong-job-first"
    place.mkdir(0o700)
    make(place / "rank-0")
    with pytest.raises(RecordError, match=message):
        read_recorder(place / "rank-0")


# -- sweeping


def dead(options: RecorderOptions, rank: int, incarnation: str, *, job: str = "job") -> Path:
    """The recorder of a process that has ended."""
    keys = ("a",)
    assert not forked(
        lambda: Recorder.create(options, job=job, incarnation=incarnation, rank=rank, keys=keys)
    )
    return place_of(options.directory, job=job, incarnation=incarnation, rank=rank)


def test_recorders_of_dead_incarnations_are_swept_and_no_others(options: RecorderOptions) -> None:
    gone = [dead(options, rank, "old") for rank in (0, 1)]
    older = dead(options, 0, "older")
    own = dead(options, 0, "present")
    partly = dead(options, 0, "partly")
    others = dead(options, 0, "old", job="job2")
    with made(options, rank=1, incarnation="partly") as living:
        swept = sweep_recorders(options.directory, job="job", keep="present")
        assert swept == [gone[0].parent, older.parent]
        assert not any(path.parent.exists() for path in (*gone, older))
        assert all(path.exists() for path in (own, partly, others, living.path))


def test_a_recorder_that_was_never_finished_is_swept(options: RecorderOptions) -> None:
    path = dead(options, 0, "old")
    path.write_bytes(bytes(path.stat().st_size))
    assert sweep_recorders(options.directory, job="job", keep="present") == [path.parent]


def test_what_may_live_in_another_container_is_not_swept(
    options: RecorderOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead(options, 0, "old")
    monkeypatch.setattr(recorder_reading, "host_name", lambda: "elsewhere#12345678")
    assert sweep_recorders(options.directory, job="job", keep="present") == []
    assert path.exists()


def test_files_of_others_in_a_directory_are_left_alone(options: RecorderOptions) -> None:
    path = dead(options, 0, "old")
    (path.parent / "notes").write_text("mine")
    assert sweep_recorders(options.directory, job="job", keep="present") == []
    assert (path.parent / "notes").read_text() == "mine"


def test_a_directory_that_cannot_be_swept_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="No such file"):
        sweep_recorders(tmp_path / "nowhere", job="job", keep="present")


def test_a_process_that_ended_but_was_not_waited_for_is_not_alive() -> None:
    from swansong.engine.processes import start_time

    pid = os.fork()
    if pid == 0:
        os._exit(0)
    started = start_time(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(pid, started)
    os.waitpid(pid, 0)
    assert not is_alive(pid, started)
    assert is_alive(os.getpid(), start_time(os.getpid()))
    assert not is_alive(os.getpid(), start_time(os.getpid()) + 1)


def test_whose_is_a_message_of_fixed_shape() -> None:
    assert [field.name for field in msgspec.structs.fields(Whose)] == [
        "job",
        "incarnation",
        "rank",
        "host",
        "pid",
        "start_time",
        "keys",
        "slot_bytes",
    ]
