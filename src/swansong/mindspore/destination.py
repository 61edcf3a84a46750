"""Where a callback's checkpoints go, and what they are called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from swansong.errors import ConfigError, SwansongWarning
from swansong.mindspore.position import Place, Resumption
from swansong.policy.checks import shown
from swansong.store import naming
from swansong.store.checkpoint import new_id, short
from swansong.store.files import Files
from swansong.store.series import Series
from swansong.store.writer import save_error

Prefix = str | Callable[[Any], str]
Directory = str | Path | Callable[[Any], str | Path] | None

PATH_LIMIT: Final = 1024
"""Characters that MindSpore allows a directory's path."""


class Destination:
    """Prefix and directory, each fixed or a function of the callback parameters, and the series there.

    With a fixed prefix the prefix names the series; with a function, one callback's checkpoints are a series.
    """

    def __init__(self, prefix: Prefix, directory: Directory, files: Files) -> None:
        """Check both, and create a fixed directory that is missing: 0700, as MindSpore does.

        Raises ConfigError, NotADirectoryError.
        """
        self._files = files
        self._prefix_function = prefix if callable(prefix) else None
        self._directory_function = directory if callable(directory) else None
        self._prefix = "" if callable(prefix) else naming.checked_prefix(prefix)
        self.directory = Path() if callable(directory) else prepared_directory(directory, files)
        """Where checkpoints go now, resolved."""
        self._series_name = f"callback-{short(new_id())}" if callable(prefix) else self._prefix
        self._series: dict[Path, Series] = {}
        self._resumed: Resumption | None = None

    @property
    def known(self) -> bool:
        """False until a function has named the directory."""
        return self.directory.is_absolute()

    @property
    def fixed(self) -> bool:
        """True if neither prefix nor directory is a function."""
        return self._prefix_function is None and self._directory_function is None

    def restart(self, resumed: Resumption | None) -> None:
        """Begin a run: a new stem in an occupied directory, or, where it was resumed, the stem as it is."""
        self._series.clear()
        self._resumed = resumed

    def update(self, params: Any) -> None:
        """Ask the functions, as MindSpore does at the end of every step. Raises ConfigError."""
        if self._prefix_function is not None:
            self._prefix = naming.checked_prefix(self._prefix_function(params))
        if self._directory_function is not None:
            self.directory = checked_directory(self._directory_function(params))

    def series(self) -> Series:
        """The series in the directory of this step, begun if need be. Raises SaveError.

        Where somebody has removed the directory, or what swansong keeps in it, both are made again.
        """
        directory = self.directory
        try:
            if directory not in self._series:
                self._series[directory] = self._begin(directory)
            elif not self._series[directory].space.temporary.is_dir():
                self._series[directory].space.prepare()
                warnings.warn(
                    f"{directory}: it, or {naming.CONTROL} in it, was removed during training, and has been "
                    "made again; no earlier checkpoint there can be resumed from",
                    SwansongWarning,
                    stacklevel=5,
                )
        except OSError as error:
            raise save_error(error, directory, 0) from error
        return self._series[directory]

    def name(self, place: Place, suffix: str, *, on_exception: bool = False) -> str:
        """What the checkpoint of `place` is called."""
        if self._prefix_function is not None:
            return f"{self._prefix}{naming.BREAKPOINT if on_exception else ''}{suffix}"
        stem = self.series().stem
        return naming.position_name(stem, place.epoch, place.step_in_epoch, suffix, on_exception=on_exception)

    def graph_name(self) -> str:
        """What MindSpore calls the file with the graph."""
        return f"{self._prefix if self._prefix_function is not None else self.series().stem}-graph.meta"

    def _begin(self, directory: Path) -> Series:
        series = self._continued(directory)
        with suppress(OSError):  # what killed runs have left is in nobody's way: it goes another time
            series.sweep()
        return series

    def _continued(self, directory: Path) -> Series:
        resumed = self._resumed
        if resumed is not None and (resumed.directory, resumed.prefix) == (directory, self._series_name):
            return Series.resumed(resumed.found, self._files, directory=directory)
        series = Series.fresh(directory, self._series_name, self._files)
        if self._directory_function is not None:
            series = replace(series, stem=self._series_name)  # there MindSpore leaves the prefix as it is
        if resumed is not None and resumed.found.manifest is not None:
            # Whatever is looked for in both directories: what comes later counts as newer.
            origin = resumed.found.manifest
            series = replace(series, parent=origin.id, floor=max(series.floor, origin.seq))
        return series


def checked_directory(directory: object) -> Path:
    """Return a directory's path, resolved; it need not exist. Raises ConfigError, NotADirectoryError."""
    if not isinstance(directory, str | Path):
        raise ConfigError(f"directory: wanted a path as str or Path, got {shown(directory)}")
    text = str(directory)
    if not text.strip() or "\0" in text or len(text) > PATH_LIMIT:
        raise ConfigError(
            f"directory: wanted a path of 1 to {PATH_LIMIT} characters, not all blank, got {shown(text)}"
        )
    try:
        path = Path(text).resolve()
        in_the_way = path.exists() and not path.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead back to themselves
        raise ConfigError(f"directory: {shown(text)} cannot be used: {_reason(error)}") from error
    if in_the_way:
        raise NotADirectoryError(f"directory: {path} is there, and is not a directory")
    return path


def prepared_directory(directory: str | Path | None, files: Files) -> Path:
    """As `checked_directory`, and created if it is missing; None: the working directory."""
    path = checked_directory(Path.cwd() if directory is None else directory)
    try:
        files.ensure_directory(path, 0o700)
    except NotADirectoryError as error:
        raise NotADirectoryError(f"directory: {path} cannot be created: {_reason(error)}") from error
    except OSError as error:
        raise ConfigError(f"directory: {path} cannot be created: {_reason(error)}") from error
    return path


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
