"""Running saves, at once or in the background: old checkpoints pruned after each, failures kept track of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swansong.config import AsyncMode
from swansong.errors import SaveError, SwansongWarning
from swansong.policy.keep import KeepPolicy
from swansong.store.background import Background
from swansong.store.capture import Staging
from swansong.store.checkpoint import Content, Kind, Point, Saved, SaveOptions, new_id, short
from swansong.store.files import Files
from swansong.store.remote import Remote
from swansong.store.series import Series
from swansong.store.task import Task, carry_out
from swansong.store.workspace import Workspace
from swansong.store.writer import Writer, save_error

OnError = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One checkpoint to be saved."""

    series: Series
    name: str
    """The file's full name."""
    content: Content
    point: Point
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A checkpoint that is on disk."""

    saved: Saved
    kind: Kind
    unpruned: str | None
    """Why older checkpoints are still there, though they should have gone."""


class Saver:
    """Saves one checkpoint at a time. What fails is raised, or warned of, at the latest in `wait`."""

    def __init__(
        self,
        files: Files,
        keep: KeepPolicy,
        options: SaveOptions,
        *,
        background: AsyncMode | None,
        on_error: OnError,
    ) -> None:
        """`background` is where saves run; None: in the caller's thread."""
        self.latest: Path | None = None
        """The newest checkpoint that is on disk, durably; not one of an exception, as in MindSpore."""
        self.step: int | None = None
        """Step of the last save that is done or under way; None if it failed."""
        self._files, self._keep, self._options, self._on_error = files, keep, options, on_error
        self._writer = Writer(files)
        threads = self._writer.options.threads
        self._remote = (
            Remote(self._writer.options, lambda memory: Staging(threads, allocate=memory.allocate))
            if background == "process"
            else None
        )
        self._own_staging = Staging(threads)
        self._background: Background[_Outcome] | None = Background("swansong-save") if background else None

    def save(self, request: Callable[[], Request]) -> None:
        """Save, or begin to, what `request` returns, after waiting for the save before.

        Raises SaveError, UnrepresentableError, NotSupportedError.
        """
        self.wait()
        self.guarded(lambda: self._begin(request()))

    def poll(self) -> None:
        """Raise the error of a background save that has failed meanwhile, or warn of it."""
        self.guarded(lambda: self._note(self._background.poll() if self._background is not None else None))

    def wait(self) -> None:
        """As `poll`, after waiting for the background save under way."""
        self.guarded(lambda: self._note(self._background.wait() if self._background is not None else None))

    def close(self) -> None:
        """Give memory back, and end the writer process. The Saver can be used again."""
        self._writer.close()
        self._staging.close()
        if self._remote is not None:
            self._remote.close()

    @property
    def _staging(self) -> Staging:
        return self._remote.staging if self._remote is not None else self._own_staging

    def _begin(self, request: Request) -> None:
        self.step = request.point.step
        with _as_save_error(request):
            seq = request.series.draw()
        if self._background is None:
            self._note(self._run(request, request.content, seq))
            return
        with _as_save_error(request):  # there may be no memory for a copy
            content, give_back = self._staging.capture(request.content)

        def job() -> _Outcome:
            try:
                return self._run(request, content, seq)
            finally:
                give_back()

        try:
            self._background.start(job)
        except BaseException:
            give_back()
            raise

    def _run(self, request: Request, content: Content, seq: int) -> _Outcome:
        task = Task(
            series=request.series,
            name=request.name,
            content=content,
            point=request.point,
            kind=request.kind,
            seq=seq,
            options=self._options,
            keep=self._keep,
        )
        with _as_save_error(request):
            done = self._remote.save(task) if self._remote is not None else carry_out(task, self._writer)
        return _Outcome(done.saved, request.kind, done.unpruned)

    def _note(self, outcome: _Outcome | None) -> None:
        """Take note of a save that is done. What it could not remove is no reason to end training."""
        if outcome is None:
            return
        if outcome.kind != "exception":
            self.latest = outcome.saved.path
        if outcome.unpruned is not None:
            warnings.warn(
                f"{outcome.saved.path}: saved, but older checkpoints could not be removed: "
                f"{outcome.unpruned}",
                SwansongWarning,
                stacklevel=5,
            )

    def guarded(self, action: Callable[[], None]) -> None:
        """Do something of which a SaveError is raised, or warned of, as a save's would be."""
        try:
            action()
        except SaveError as error:
            self.step = None
            if self._on_error == "raise":
                raise
            warnings.warn(
                f"this checkpoint was not saved, training goes on: {error}", SwansongWarning, stacklevel=5
            )
        except BaseException:
            self.step = None
            raise


def write_beside(space: Workspace, name: str, data: bytes) -> None:
    """Write a small file, mode 0600, into a directory of checkpoints, replacing one of that name in one step.

    Raises SaveError.
    """
    target = space.directory / name
    try:
        with space.reserve(name, short(new_id())) as place:
            space.files.write_small(place, data)
            space.files.rename(place, target)
        space.files.sync_directory(space.directory)
    except OSError as error:
        raise save_error(error, target, len(data)) from error


@contextmanager
def _as_save_error(request: Request) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path = request.series.directory / request.name
        raise save_error(error, path, request.content.nbytes) from error
