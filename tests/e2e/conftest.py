"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from torch_job import SIZE, Zygote, torch_job
from torch_logs import Log


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """A process that forks ranks of PyTorch jobs."""
    forks = Zygote()
    try:
        yield forks
    finally:
        forks.close()


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Log]]:
    """What the ranks of a PyTorch job say that nobody disturbs, by their number."""
    known: dict[int, list[Log]] = {}

    def logs(size: int = SIZE) -> list[Log]:
        if size not in known:
            with torch_job(tmp_path_factory.mktemp("undisturbed"), zygote=zygote, size=size) as run:
                assert run.codes() == [0] * size, run.errors(0)
                assert run.steps() == []
                known[size] = run.logs()
        return known[size]

    return logs
