"""The flight recorders of one start of a job on this host, read by whoever outlives their ranks."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swansong.engine.record_places import place_of, ranks_in
from swansong.engine.recorder_reading import Recorded, read_recorder, sweep_recorders
from swansong.errors import RecordError

_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecorders:
    """Where they lie."""

    directory: Path
    """Of all recorders: in a memory file system."""
    job: str
    incarnation: str

    def read(self, rank: int) -> Recorded | None:
        """What a rank has recorded; None if it has no recorder here, or none that is whole."""
        path = place_of(self.directory, job=self.job, incarnation=self.incarnation, rank=rank)
        try:
            recorded = read_recorder(path)
        except RecordError:
            return None
        return recorded if recorded.whose.rank == rank else None

    def ranks(self) -> list[int]:
        """The ranks that have a recorder here."""
        return ranks_in(place_of(self.directory, job=self.job, incarnation=self.incarnation, rank=0).parent)

    def sweep_former(self) -> None:
        """Remove what earlier starts of the job have left here. Their controllers are gone by now."""
        with suppress(RecordError):
            sweep_recorders(self.directory, job=self.job, keep=self.incarnation)

    def sweep(self, timeout_s: float) -> bool:
        """Remove what is left of ranks that have ended, those that are about to end included; True if all is.

        For the controller, when the job is over.
        """
        ends = time.monotonic() + timeout_s
        while self.ranks():
            with suppress(RecordError):
                sweep_recorders(self.directory, job=self.job, keep="")
            if not self.ranks():
                break
            if time.monotonic() >= ends:
                return False
            time.sleep(_LOOK_S)
        return True
