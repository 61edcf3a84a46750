"""What the tests of the store have in common: content, files that can be watched and stopped, clocks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Container, Content, Point, Saved, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.layout import Layout, Segment
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.source import check_range
from swansong.store.writer import Writer, WriterOptions

KEY = Key(bytes(range(100, 132)))
OTHER_KEY = Key(b"another key of 32 bytes, not it.")
SUFFIX: dict[str, str] = {"ckpt": ".ckpt", "safetensors": ".safetensors", "directory": ""}
CONTAINERS = tuple(SUFFIX)


@dataclass
class Memory:
    """Bytes as a Source."""

    data: bytes
    path: str = "memory"
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        check_range(self, offset, len(out))
        self.reads.append((offset, len(out)))
        out[:] = np.frombuffer(self.data, np.uint8, len(out), offset)


class Watched(Files):
    """Real files. `before` and `after` see each mutating call and its arguments; they may raise or wait."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda call, arguments: None
        self.after: Callable[[str, tuple[Any, ...]], None] = lambda call, arguments: None

    def fail(self, call: str, error: BaseException, when: Callable[..., bool] = lambda *_: True) -> None:
        """Let every call of that name for whose arguments `when` is true raise `error`."""

        def before(name: str, arguments: tuple[Any, ...]) -> None:
            if name == call and when(*arguments):
                raise error

        self.before = before

    def interrupt_after(self, call: str, when: Callable[..., bool] = lambda *_: True) -> None:
        """Raise KeyboardInterrupt once such a call has been done, as a signal between two bytecodes would."""

        def after(name: str, arguments: tuple[Any, ...]) -> None:
            if name == call and when(*arguments):
                raise KeyboardInterrupt

        self.after = after


def _watch(name: str) -> None:
    def method(self: Watched, *arguments: Any, **options: Any) -> Any:
        self.calls.append((name, arguments))
        self.before(name, arguments)
        result = getattr(Files, name)(self, *arguments, **options)
        self.after(name, arguments)
        return result

    setattr(Watched, name, method)


for _name in (
    *("make_directory", "create", "open_direct", "preallocate", "write", "truncate", "set_mode", "sync"),
    *("sync_directory", "rename", "unlink", "remove_directory", "close", "lock", "write_hint"),
):
    _watch(_name)


@dataclass
class FakeClock:
    """A clock that goes only when told."""

    now: float = 1_000_000.0
    wall_offset: float = 0.0

    def wall(self) -> float:
        return self.now + self.wall_offset

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def tensors(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, HostTensor]:
    """float32 tensors of known random content."""
    chance = np.random.default_rng(seed)
    wanted = shapes or {"weight": (40, 30), "bias": (30,)}
    return {
        name: HostTensor.of(chance.normal(size=shape).astype(np.float32)) for name, shape in wanted.items()
    }


def commit(series: Series, name: str, *, seed: int = 0, **how: Any) -> Saved:
    """Save small content. `how`: container, key, mode, crc, kind, step, writer, time; fields of Content."""
    options = SaveOptions(**{k: how.pop(k) for k in ("container", "key", "mode", "crc") if k in how})
    kind, step = how.pop("kind", "periodic"), how.pop("step", 1)
    writer, time = how.pop("writer", None) or Writer(series.space.files), how.pop("time", None)
    content = Content(**{"tensors": tensors(seed), **how})
    return save(
        series,
        writer,
        name,
        content,
        Point(step=step),
        kind=kind,
        seq=series.draw(),
        options=options,
        time=time,
    )


def named(container: Container | str, number: int = 1, stem: str = "run") -> str:
    """A checkpoint's name in that container."""
    return f"{stem}-1_{number}{SUFFIX[container]}"


def same(got: Mapping[str, HostTensor], want: Mapping[str, HostTensor]) -> bool:
    """Equal names, types, shapes and bits."""
    return got.keys() == want.keys() and all(
        got[name].dtype == want[name].dtype
        and got[name].shape == want[name].shape
        and np.ascontiguousarray(got[name].array).tobytes()
        == np.ascontiguousarray(want[name].array).tobytes()
        for name in want
    )


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything below `path` by relative name; None for directories."""
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() and not p.is_symlink() else None
        for p in sorted(path.rglob("*"))
    }


def visible(path: Path) -> set[str]:
    """Names in a directory that a user sees."""
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(".swansong")}


def flip(path: Path, offset: int = -1, bit: int = 0) -> None:
    """Flip one bit of a file in place; by default in its middle."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if offset == -1 else offset] ^= 1 << bit
    overwrite(path, bytes(raw))


def overwrite(path: Path, data: bytes) -> None:
    """Put other content into a file, as another tool would: mode and inode stay."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(mode & 0o777)


def plain_layout(*pieces: bytes | NDArray[Any], **options: Any) -> Layout:
    """A layout of those bytes and arrays."""
    return Layout.of(
        [
            Segment(piece) if isinstance(piece, bytes) else Segment(HostTensor.of(piece), f"t{i}")
            for i, piece in enumerate(pieces)
        ],
        **options,
    )


def hkdf(material: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """HKDF-SHA256 by the text of RFC 5869, sections 2.2 and 2.3."""
    pseudo_random = hmac.new(salt, material, hashlib.sha256).digest()
    okm, block = b"", b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.new(pseudo_random, block + info + bytes([counter]), hashlib.sha256).digest()
        okm += block
    return okm[:length]


def buffered(files: Files, threads: int = 1) -> Writer:
    """A writer through the page cache."""
    return Writer(files, WriterOptions(threads=threads, direct=False))
