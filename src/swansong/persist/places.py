"""Where the processes of a job meet in a directory of checkpoints, besides the checkpoints themselves.

.swansong/job-{incarnation, 8 digits}.json   what rank 0 tells the others, see `persist.job`
.swansong/controller.log                     what controllers had to say
.swansong/incidents/{incident}.json          reports
.swansong/tmp/{id8}-{stem}                   parts of an incident; everybody derives it from the incident
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from swansong.store import naming
from swansong.store.checkpoint import short

INCIDENTS: Final = "incidents"
"""Directory of the reports."""


def checkpoint_id(incident: str) -> str:
    """Id of the checkpoint that comes of an incident: 32 hexadecimal digits, the same for all who know it."""
    return hashlib.blake2b(incident.encode(), digest_size=16, person=b"swansong/1 part").hexdigest()


def recorder_job(directory: Path, series: str) -> str:
    """What flight recorders call a job: the same for each of its starts, unlike any other's on a host."""
    return hashlib.blake2b(
        f"{directory}\0{series}".encode(), digest_size=8, person=b"swansong/1 rec"
    ).hexdigest()


def staging(directory: Path, stem: str, incident: str) -> Path:
    """Where the parts of an incident go. The committer makes it."""
    name = naming.temporary(short(checkpoint_id(incident)), stem)
    return directory / naming.CONTROL / naming.TEMPORARY / name


def job_file(directory: Path, incarnation: bytes) -> Path:
    """What rank 0 tells the others of a start of the job."""
    return directory / naming.CONTROL / f"job-{incarnation.hex()[:8]}.json"


def controller_log(directory: Path) -> Path:
    """What controllers had to say."""
    return directory / naming.CONTROL / "controller.log"


def incident_file(directory: Path, incident: str) -> Path:
    """The report of an incident."""
    return directory / naming.CONTROL / INCIDENTS / f"{incident}.json"


def incident_files(directory: Path) -> list[Path]:
    """The reports in a directory of checkpoints, the latest first."""
    found = [path for path in (directory / naming.CONTROL / INCIDENTS).glob("*.json") if path.is_file()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
