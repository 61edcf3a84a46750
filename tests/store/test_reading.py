"""Work that threads share: who does it, what is told of errors, and how an interrupt ends it."""

from __future__ import annotations

import subprocess
import sys
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash

from store_support import KEY, Memory
from swansong.errors import DamagedError, DigestMismatchError
from swansong.store.crypt import SealedEncoding, Unsealed
from swansong.store.manifest import FileRecord
from swansong.store.pieces import PIECE
from swansong.store.reading import Run, check, in_parallel, in_pieces, read_runs
from swansong.store.source import PlainFile
from swansong.store.verified import Verified

CONTENT = np.random.default_rng(5).integers(0, 255, 1000, np.uint8).tobytes()
STEP = 64


def verified(data: bytes = CONTENT) -> Verified:
    digests = [xxhash.xxh3_128_hexdigest(CONTENT[start : start + STEP]) for start in range(0, 1000, STEP)]
    record = FileRecord(name="memory", size=1000, piece=STEP, digests=digests)
    return Verified(Memory(data), record, lambda start, stop: [])


def runs(source: Any, *cuts: int) -> tuple[list[Run], bytearray]:
    """The whole content in runs that end at `cuts`, and where they go."""
    memory = bytearray(1000)
    edges = [0, *cuts, 1000]
    target = np.frombuffer(memory, np.uint8)
    given = [Run(f"t{a}", source, a, target[a:b]) for a, b in pairwise(edges)]
    return given, memory


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("cuts", [(), (1, 2, 3), (64, 640), (63, 65, 999)], ids=str)
def test_runs_of_any_length_are_filled_and_each_piece_is_read_once(
    threads: int, cuts: tuple[int, ...]
) -> None:
    source = verified()
    given, memory = runs(source, *cuts)
    read_runs(given, threads=threads)
    assert memory == CONTENT
    assert sorted(source.stored.reads) == [(at, min(STEP, 1000 - at)) for at in range(0, 1000, STEP)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_damage_is_that_of_the_first_tensor_in_the_first_damaged_piece(threads: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[500] ^= 1
    damaged[900] ^= 1
    given, memory = runs(verified(bytes(damaged)), 460, 470, 480)
    with pytest.raises(DigestMismatchError) as error:
        read_runs(given[::-1], threads=threads)
    assert (error.value.offset, error.value.tensor) == (448, "t0")
    assert not any(memory[448:512])


def test_what_has_no_pieces_is_read_all_the_same() -> None:
    given, memory = runs(Memory(CONTENT), 10, 500)
    assert not in_pieces(given[0].source)
    read_runs(given)
    assert memory == CONTENT
    check([Memory(CONTENT)])


def test_a_sealed_piece_is_opened_in_the_buffer_that_it_was_read_into() -> None:
    encoding, buffer = SealedEncoding(KEY, bytes(16)), np.zeros(PIECE, np.uint8)
    length = encoding.encode(0, True, np.frombuffer(CONTENT, np.uint8), buffer)
    stored = bytearray(buffer[:length])
    plain = Unsealed(Memory(bytes(stored)), KEY, bytes(16)).read_piece(0, buffer)
    assert np.shares_memory(plain, buffer)
    assert plain.tobytes() == CONTENT
    stored[3] ^= 1
    with pytest.raises(DamagedError, match="does not authenticate"):
        Unsealed(Memory(bytes(stored)), KEY, bytes(16)).read_piece(0, buffer)


def test_check_meets_every_piece(tmp_path: Any) -> None:
    check([verified()], threads=3)
    with pytest.raises(DigestMismatchError):
        check([verified(), verified(CONTENT[:-1] + b"!")], threads=3)


def test_no_job_is_begun_after_one_has_failed_and_the_first_failure_is_told() -> None:
    begun: list[int] = []
    together = threading.Barrier(3, timeout=20)

    def work(number: int, _: Any) -> None:
        begun.append(number)
        together.wait()  # all three are at work
        raise ValueError(number)

    with pytest.raises(ValueError, match=r"^0$"):
        in_parallel(range(100), work, threads=3)
    assert sorted(begun) == [0, 1, 2]
    assert not readers()


INTERRUPTED = """
import signal, threading
from swansong.store.reading import in_parallel

stopped, done = threading.Event(), []

def work(number, _):
    if number == 0:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    stopped.wait(0.002)
    done.append(number)

try:
    in_parallel(range(10_000), work, threads=2)
except KeyboardInterrupt:
    finished = len(done)
    for thread in threading.enumerate():
        if "swansong" in thread.name:  # it was starting at that moment
            thread.join(20)
    print(finished < 10_000, threading.active_count(), len(done) == finished)
"""


def test_an_interrupt_ends_the_threads_with_what_they_have_in_hand() -> None:
    # In a process of its own: others may have changed what the signal does in this one.
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("True 1 True\n", "")


def test_few_jobs_take_no_threads() -> None:
    names: list[str] = []
    in_parallel(range(3), lambda number, _: names.append(threading.current_thread().name), threads=4)
    assert names == [threading.current_thread().name] * 3
    in_parallel([], lambda number, _: names.append(""), threads=4)
    assert len(names) == 3


def test_a_plain_file_is_read_in_pieces(tmp_path: Any) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with (tmp_path / "file").open("rb") as file:
        source = PlainFile(file.fileno(), "file")
        assert in_pieces(source)
        given, memory = runs(source, 500)
        read_runs(given)
    assert memory == CONTENT


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "swansong" in thread.name]
