"""The main incidents message by message, as the golden transcripts have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.sim_stories import STORIES, told

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("name", STORIES)
def test_story_is_the_one_that_is_kept(name: str) -> None:
    """`python tools/simulate.py --stories` writes them anew; read what has changed."""
    assert told(STORIES[name]) == (GOLDEN / f"transcript_{name}.txt").read_text()
