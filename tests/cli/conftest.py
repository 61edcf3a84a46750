"""Checkpoints made by the real store, and the program run in this process or as one of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from swansong.cli.main import app
from swansong.state.tensors import HostTensor
from swansong.store.checkpoint import Content, Point, Saved, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer

ARRAYS = {
    "conv1.weight": np.arange(150, dtype=np.float32).reshape(6, 1, 5, 5),
    "global_step": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float64),
}


class Shelf:
    """A directory of checkpoints."""

    def __init__(self, path: Path, series: str = "net") -> None:
        self.path = path
        self._files = Files()
        self._series = Series.fresh(path, series, self._files)
        self._writer = Writer(self._files)

    def save(
        self,
        name: str,
        *,
        arrays: Mapping[str, np.ndarray] = ARRAYS,
        container: str = "ckpt",
        key: bytes | None = None,
        mode: str = "AES-GCM",
        kind: str = "periodic",
        step: int = 100,
        **content: Any,
    ) -> Saved:
        """Save a checkpoint at epoch 3, step 20 of it."""
        return save(
            self._series,
            self._writer,
            name,
            Content(tensors={n: HostTensor.of(a, name=n) for n, a in arrays.items()}, **content),
            Point(step=step, epoch=3, step_in_epoch=20),
            kind=kind,
            seq=self._series.draw(),
            options=SaveOptions(container=container, key=None if key is None else Key(key), mode=mode),
        )

    def flip(self, name: str, offset: int = 200) -> Path:
        """Change one bit of a file; return its path."""
        path = self.path / name
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
        return path

    def truncate(self, name: str, size: int = 100) -> Path:
        """Cut a file short; return its path."""
        path = self.path / name
        path.chmod(0o600)
        os.truncate(path, size)
        return path

    def foreign(self, name: str, **how: Any) -> Path:
        """A file that no manifest vouches for; return its path."""
        saved = self.save(f"about-to-lose-it{Path(name).suffix}", **how)
        return saved.path.rename(self.path / name)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """An empty directory to save checkpoints into."""
    return Shelf(tmp_path / "shelf")


@pytest.fixture
def swansong() -> Callable[..., Result]:
    """Run the program in this process; arguments become strings."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment, without what changes colours, widths and buffering."""
    drop = {
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "FORCE_COLOR",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
        "PYTHONUNBUFFERED",
    }
    return {name: value for name, value in os.environ.items() if name not in drop} | {
        "TERM": "xterm-256color"
    }


class Page:
    """What a process writes to a terminal."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer

    def __call__(self) -> str:
        """The rest. The process has ended."""
        os.close(self._writer)
        chunks = []
        try:
            while chunk := os.read(self._reader, 1 << 16):
                chunks.append(chunk)
        except OSError:
            pass  # how Linux says that the other end is closed
        return b"".join(chunks).decode()

    def until(self, text: str) -> str:
        """What is written next, up to a text."""
        seen = b""
        while text.encode() not in seen:
            assert select.select([self._reader], [], [], 30.0)[0], f"{text!r} did not come: {seen!r}"
            seen += os.read(self._reader, 1)
        return seen.decode()


@pytest.fixture
def terminal() -> Iterator[tuple[int, Page]]:
    """A terminal of 80 columns: its end for a process, and a function that reads what was written."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield writer, Page(reader, writer)
    os.close(reader)


@pytest.fixture
def process(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the program as a process of its own, its output captured unless `options` say otherwise."""

    def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "swansong.cli", *map(os.fsencode, map(str, arguments))]
        defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, "env": environment}
        return subprocess.run(command, check=False, **(defaults | options))

    return run


@pytest.fixture
def key_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a key file that only its owner can read; return its path."""

    def write(content: bytes, mode: int = 0o600) -> Path:
        path = tmp_path / "run.key"
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return write
