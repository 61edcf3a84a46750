"""How swansong saves, as a candidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.states import State, content
from benchmarks.turns import Candidate

from swansong.store.checkpoint import Point, SaveOptions
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.saving import save
from swansong.store.series import Series
from swansong.store.writer import Writer

NATIVE = "swansong"
SEALED = "swansong, AES-256-GCM"
_KEY = Key(bytes(range(32)))


def natives(arrays: State) -> list[Candidate]:
    """Native directories, without and with a key; one writer for all rounds, as a run has it."""
    shown, files = content(arrays), Files()
    writer = Writer(files)

    def of(options: SaveOptions) -> Callable[[Path], Callable[[], None]]:
        def prepare(directory: Path) -> Callable[[], None]:
            series = Series.fresh(directory, "bench", files)

            def run() -> None:
                save(
                    *(series, writer, "bench-1", shown, Point(step=1)),
                    kind="periodic",
                    seq=series.draw(),
                    options=options,
                )

            return run

        return prepare

    return [Candidate(NATIVE, of(SaveOptions())), Candidate(SEALED, of(SaveOptions(key=_KEY)))]
