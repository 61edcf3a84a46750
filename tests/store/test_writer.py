"""The writer: the same bytes however they are written, and nothing left of what failed."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash

from store_support import KEY, Watched, plain_layout
from swansong.errors import DiskFullError, SaveError
from swansong.state.tensors import HostTensor
from swansong.store import writer as module
from swansong.store.crypt import PieceMac, SealedEncoding, Unsealed
from swansong.store.layout import Layout, Segment
from swansong.store.pieces import PIECE, Plain
from swansong.store.source import PlainFile, open_regular, read
from swansong.store.writer import RUN, Writer, WriterOptions, Written, free_bytes

SALT = bytes(range(16))
NOISE = np.frombuffer(np.random.default_rng(3).bytes(2 * PIECE + 4097), np.uint8)
HOW = {
    "one thread": WriterOptions(threads=1, direct=False),
    "two threads, direct": WriterOptions(threads=2, direct_from_bytes=0),
    "four threads": WriterOptions(threads=4, direct=False),
    "four threads, direct": WriterOptions(threads=4, direct_from_bytes=0),
}


def crc_trailer(crc: int) -> bytes:
    return b"crc_num" + crc.to_bytes(10, "big")


def layout_of(size: int, *, trailer: bool) -> Layout:
    """`size` bytes of noise in segments of odd lengths."""
    cuts = [0, min(size, 1000), min(size, PIECE - 3), size]
    parts = [HostTensor.of(NOISE[a:b]) for a, b in pairwise(cuts)]
    options: dict[str, Any] = {"trailer": crc_trailer, "trailer_size": 17} if trailer else {}
    return Layout.of([Segment(part, "t") for part in parts], **options)


def fits(path: Path, written: Written, want: bytes) -> bool:
    """Content, size and digests are those of `want`."""
    stored = path.read_bytes()
    digests = [xxhash.xxh3_128_hexdigest(want[at : at + PIECE]) for at in range(0, len(want), PIECE)]
    return stored == want and written.size == len(want) and written.digests == digests


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module")
def writers() -> Iterator[dict[str, Writer]]:
    """One writer of each kind, used for every file, so that all but the first find used buffers."""
    made = {name: Writer(Watched(), options) for name, options in HOW.items()}
    yield made
    for writer in made.values():
        writer.close()


@pytest.mark.parametrize(
    ("size", "trailer"),
    [
        *((size, False) for size in (0, 1, 4096, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 4097)),
        *((size, True) for size in (0, 1, PIECE - 17, PIECE - 5, PIECE, PIECE + 100)),
    ],
    ids=lambda value: f"trailer {value}" if isinstance(value, bool) else str(value),
)
def test_bytes_and_digests_do_not_depend_on_threads_or_the_page_cache(
    tmp_path: Path, writers: dict[str, Writer], size: int, trailer: bool
) -> None:
    layout = layout_of(size, trailer=trailer)
    want = NOISE[:size].tobytes()
    if trailer:
        want += crc_trailer(zlib.crc32(want))
    for name, writer in writers.items():
        path = tmp_path / name
        written = writer.write(path, layout, Plain())
        assert fits(path, written, want), name
        assert written.direct == ("direct" in name)
        assert written.macs is None
        path.unlink()


@pytest.mark.parametrize("size", [0, 1, PIECE - 16, PIECE - 15, 2 * PIECE], ids=str)
def test_encrypted_pieces_do_not_depend_on_threads_or_the_page_cache(
    tmp_path: Path, writers: dict[str, Writer], size: int
) -> None:
    layout, macs = layout_of(size, trailer=False), set()
    for name, writer in writers.items():
        path = tmp_path / name
        written = writer.write(path, layout, SealedEncoding(KEY, SALT), mac=PieceMac(KEY, SALT))
        stored = path.read_bytes()
        assert fits(path, written, stored), name
        descriptor = open_regular(path)
        source = Unsealed(PlainFile(descriptor, name), KEY, SALT)
        assert read(source, 0, source.size) == NOISE[:size].tobytes()
        macs.add((stored[:1000], *(written.macs or ())))
        module.os.close(descriptor)
        path.unlink()
    assert len(macs) == 1
    assert len(written.macs or ()) == len(written.digests)


def test_codes_are_asked_for_each_stored_piece_with_its_place(tmp_path: Path) -> None:
    asked: list[tuple[int, bool, int]] = []

    def mac(index: int, last: bool, stored: np.ndarray) -> str:
        asked.append((index, last, len(stored)))
        return f"code {index}"

    written = Writer(Watched(), HOW["one thread"]).write(
        tmp_path / "f", layout_of(PIECE + 5, trailer=False), Plain(), mac=mac
    )
    assert asked == [(0, False, PIECE), (1, True, 5)]
    assert written.macs == ["code 0", "code 1"]


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
def test_tensors_of_any_strides_are_gathered_across_the_edges_of_pieces(
    tmp_path: Path, how: WriterOptions
) -> None:
    base = NOISE[: 3 * 2_500_000 * 4].view(np.float32).reshape(3, 2_500_000)
    small = np.arange(24, dtype=np.complex64).reshape(2, 3, 4)
    layout = plain_layout(b"x", base.T, small[:, ::2].transpose(2, 1, 0), np.array(5, np.int16), base[:, :0])
    want = (
        b"x" + base.T.tobytes() + small[:, ::2].transpose(2, 1, 0).tobytes() + np.array(5, np.int16).tobytes()
    )
    assert fits(tmp_path / "f", Writer(Watched(), how).write(tmp_path / "f", layout, Plain()), want)


def test_memory_is_bounded_by_the_buffers_whatever_the_state(tmp_path: Path) -> None:
    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    state = np.ones((100, 500_000), np.float32)
    layout = plain_layout(state[:50], state[50:, ::-1])
    writer = Writer(Watched(), WriterOptions(threads=2))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = memory("VmRSS:")
    written = writer.write(tmp_path / "f", layout, SealedEncoding(KEY, SALT))
    assert written.size > 200_000_000
    assert memory("VmHWM:") - before < 100_000_000


def test_buffers_are_taken_once_and_used_again(tmp_path: Path) -> None:
    writer = Writer(Watched(), WriterOptions(threads=2, direct=False))
    layout = layout_of(2 * PIECE, trailer=False)
    with mock.patch.object(module.mmap, "mmap", wraps=module.mmap.mmap) as taken:
        for number in range(3):
            writer.write(tmp_path / f"{number}", layout, SealedEncoding(KEY, SALT))
        first = taken.call_count
        writer.write(tmp_path / "small", plain_layout(b"x"), Plain())
        assert taken.call_count == first <= 4
        writer.close()
        writer.write(tmp_path / "again", layout, Plain())
        assert taken.call_count > first


# -- modes and order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "want"), [({}, 0o400), ({"mode": 0o640}, 0o640)], ids=["default", "given"])
def test_a_file_is_its_owners_alone_until_it_is_done(
    tmp_path: Path, files: Watched, mode: dict[str, int], want: int
) -> None:
    path, seen = tmp_path / "f", set()

    def look(call: str, _: tuple[Any, ...]) -> None:
        if call not in ("create", "sync", "close"):
            seen.add(stat.S_IMODE(path.stat().st_mode))

    files.before = look
    Writer(files).write(path, layout_of(PIECE + 1, trailer=False), Plain(), **mode)
    assert seen == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == want


def test_space_is_reserved_first_and_all_is_synced_last(tmp_path: Path, files: Watched) -> None:
    Writer(files, WriterOptions(threads=1, direct_from_bytes=0)).write(
        tmp_path / "f", layout_of(PIECE + 1, trailer=False), Plain()
    )
    calls = [call for call, _ in files.calls]
    assert calls == [
        *("create", "preallocate", "open_direct", *["write"] * (PIECE // RUN + 1)),
        *("truncate", "set_mode", "sync"),
        *("close", "close"),
    ]
    assert files.calls[1][1][1] == PIECE + 4096


@pytest.mark.parametrize(
    ("size", "options", "direct"),
    [
        (1 << 20, WriterOptions(), True),
        ((1 << 20) - 1, WriterOptions(), False),
        (1 << 20, WriterOptions(direct=False), False),
        (1, WriterOptions(direct_from_bytes=0), True),
    ],
    ids=["large", "small", "not wanted", "small but wanted"],
)
def test_small_files_go_through_the_page_cache(
    tmp_path: Path, size: int, options: WriterOptions, direct: bool
) -> None:
    written = Writer(Watched(), options).write(tmp_path / "f", layout_of(size, trailer=False), Plain())
    assert written.direct is direct


def test_where_direct_writing_is_refused_the_page_cache_serves(tmp_path: Path, files: Watched) -> None:
    with mock.patch.object(Watched, "open_direct", return_value=None):
        written = Writer(files).write(tmp_path / "f", layout_of(PIECE + 1, trailer=False), Plain())
    assert not written.direct
    assert fits(tmp_path / "f", written, NOISE[: PIECE + 1].tobytes())


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize(
    "call", ["create", "preallocate", "write", "second write", "truncate", "set_mode", "sync"]
)
def test_whatever_the_system_refuses_fails_the_file_and_leaves_nothing(
    tmp_path: Path, files: Watched, how: WriterOptions, call: str
) -> None:
    second: Callable[..., bool] = lambda fd, data, offset: offset == PIECE  # noqa: E731
    files.fail(
        call.split()[-1], OSError(errno.EIO, "Input/output error"), second if " " in call else lambda *_: True
    )
    writer, path, open_before = Writer(files, how), tmp_path / "f", descriptors()
    with pytest.raises(SaveError, match=r"f: not saved: Input/output error") as caught:
        writer.write(path, layout_of(2 * PIECE, trailer=False), Plain())
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.path == str(path)
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == open_before
    files.before = lambda *_: None
    assert fits(path, writer.write(path, plain_layout(b"next"), Plain()), b"next")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["create", "preallocate", "write", "sync"])
def test_no_space_says_what_was_needed_and_what_is_free(
    tmp_path: Path, files: Watched, call: str, number: int
) -> None:
    files.fail(call, OSError(number, "No space"))
    with pytest.raises(DiskFullError, match=r"1,000,000 bytes were needed, [\d,]+ are free") as caught:
        Writer(files).write(tmp_path / "f", layout_of(1_000_000, trailer=False), Plain())
    assert caught.value.needed == 1_000_000
    assert caught.value.free > 0
    assert isinstance(caught.value, OSError)


class Broken:
    """An encoding that fails for one piece."""

    scheme, plain_piece = "broken", PIECE

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def stored_size(self, plain_size: int) -> int:
        return plain_size

    def encode(self, index: int, last: bool, plain: np.ndarray, out: np.ndarray) -> int:
        if index == 1:
            raise self.error
        return Plain().encode(index, last, plain, out)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
@pytest.mark.parametrize("error", [MemoryError("buffers"), KeyboardInterrupt(), ValueError("odd")], ids=repr)
def test_any_other_error_of_any_thread_passes_after_cleaning_up(
    tmp_path: Path, how: WriterOptions, error: BaseException
) -> None:
    before = descriptors()
    with pytest.raises(type(error)) as caught:
        Writer(Watched(), how).write(tmp_path / "f", layout_of(2 * PIECE, trailer=False), Broken(error))
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


def test_a_trailer_that_cannot_be_made_fails_the_file(tmp_path: Path) -> None:
    def broken(crc: int) -> bytes:
        raise RuntimeError("no trailer")

    with pytest.raises(RuntimeError, match="no trailer"):
        Writer(Watched()).write(tmp_path / "f", plain_layout(b"x", trailer=broken, trailer_size=17), Plain())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"precious")
    with pytest.raises(SaveError, match="File exists"):
        Writer(Watched()).write(tmp_path / "f", plain_layout(b"x"), Plain())
    assert (tmp_path / "f").read_bytes() == b"precious"


def test_free_space_that_cannot_be_told_is_none(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0
    assert free_bytes(tmp_path / "missing") == 0


def test_direct_writes_that_are_refused_late_go_through_the_page_cache(tmp_path: Path) -> None:
    files = Watched()
    direct: list[int] = []

    def before(call: str, arguments: tuple[Any, ...]) -> None:
        if call == "write" and fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(arguments[0])
            raise OSError(errno.EINVAL, "no direct writes here")

    files.before = before
    content = os.urandom(PIECE + 12345)
    layout = Layout.of([Segment(content)])
    written = Writer(files, WriterOptions(threads=1)).write(tmp_path / "file", layout, Plain())

    assert direct
    assert not written.direct
    assert (tmp_path / "file").read_bytes() == content
