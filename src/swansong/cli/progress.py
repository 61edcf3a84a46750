"""A progress bar for long reading, on standard error and only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from swansong.cli.text import size


class _Speed(ProgressColumn):
    """Bytes per second, in the units of the column of bytes."""

    def render(self, task: Task) -> Text:
        return Text(f"{size(task.speed)}/s" if task.speed else "", justify="right")


class ReadingBar:
    """Shows how many of `total` bytes were read, while its `with` block lasts; leaves nothing behind."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        looked_at = sys.stderr is not None and sys.stderr.isatty() and console.is_interactive
        self._progress = Progress(
            BarColumn(bar_width=None),
            DownloadColumn(binary_units=True),
            _Speed(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not looked_at,
        )
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, nbytes: int) -> None:
        """Count bytes that were read."""
        self._progress.advance(self._task, nbytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something else is printed to the same terminal."""
        self._progress.stop()
        yield
        self._progress.start()
