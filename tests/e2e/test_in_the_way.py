"""What lies in the way when state is to be saved at a fault, with real processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from array_job import job, trained, values

GOLDEN = Path(__file__).parent.parent / "golden" / "native_plain" / "run-3_7"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_leftover_temporary_directory_and_a_taken_name_are_left_alone_and_saved_beside(
    tmp_path: Path,
) -> None:
    with job(tmp_path / "c", 2) as run:
        run.begin()
        run.steps(2)
        leftover = run.directory / ".swansong" / "tmp" / "0123abcd-model"
        leftover.mkdir()
        (leftover / "c0-00000-00000001.safetensors").write_bytes(b"half a")
        taken = run.directory / "model-2"
        shutil.copytree(GOLDEN, taken)
        run.ranks[1].send(signal.SIGKILL)

        assert run.incident()["path"] == str(run.directory / "model-2_1")
        assert values(run.directory / "model-2_1") == {trained(2)}
        assert contents(taken) == contents(GOLDEN)
        assert contents(leftover) == {"c0-00000-00000001.safetensors": b"half a"}
