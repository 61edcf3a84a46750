"""A model under torch.compile: killed and resumed, it ends with the bits of the one that is not compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from array_job import free_port
from torch_job import Zygote, fault, torch_job
from torch_logs import differing, joined, starts, steps_lost


def test_a_compiled_model_loses_no_step_and_no_bit_by_a_kill(
    tmp_path: Path, zygote: Zygote, undisturbed: Any
) -> None:
    planned, port, logs = fault("SIGKILL", "before update", 6, 1), free_port(), []
    for number in range(2):
        with torch_job(
            tmp_path, planned, zygote=zygote, size=2, port=port, start=number, compiled="aot_eager"
        ) as run:
            codes = run.codes()
            assert len(starts(run.logs())) == 1, run.errors(0)
            assert run.incident()["outcome"] == "saved"
            logs.append(run.logs())

    assert codes == [0, 0]
    together = joined(*logs)
    assert [start.step for start in starts(together)] == [0, 6]
    assert steps_lost(together) == [0]
    assert differing(undisturbed(2), together) == []
