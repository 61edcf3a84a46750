"""docs/scenarios.md lists every situation, and no test that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "scenarios.md"
NUMBERS = range(1, 40)

CELL = re.compile(r"`(?P<path>tests/[\w/]+\.py)::(?P<name>test_\w+)`|later: [\w ,]+")
"""One place in the last column."""


def rows() -> dict[int, list[str]]:
    """Number -> places, of every row."""
    found: dict[int, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        number, _, where = (
            [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else ("", "", "")
        )
        if number.isdecimal():
            assert int(number) not in found, f"situation {number} is there twice"
            found[int(number)] = where.split("<br>")
    return found


def functions_of(path: Path) -> set[str]:
    """Names of a file's test functions, without importing it."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_situation_has_its_row_in_order() -> None:
    assert list(rows()) == list(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_test_that_is_named_exists(number: int) -> None:
    for place in rows()[number]:
        match = CELL.fullmatch(place)
        assert match, f"situation {number}: {place!r} is neither a test nor a promise"
        if match["path"]:
            path = REPOSITORY / match["path"]
            assert path.is_file(), f"situation {number}: there is no {match['path']}"
            assert match["name"] in functions_of(path), (
                f"situation {number}: {match['path']} has no {match['name']}"
            )


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parent.glob("simulation/test_scenarios*.py")), ids=lambda path: path.stem
)
def test_every_situation_of_the_simulation_is_in_the_table(path: Path) -> None:
    named = {place for places in rows().values() for place in places}
    missing = {
        f"`tests/simulation/{path.name}::{name}`" for name in functions_of(path) if name.startswith("test_")
    } - named
    assert not missing
