"""Draw the protocol's state diagrams from its tables into docs/protocol.md.

    python tools/protocol_diagrams.py            # rewrite the page
    python tools/protocol_diagrams.py --check    # exit 1 if the page differs from the tables

A test runs the check, so that page and code cannot drift apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from swansong.protocol.states import NEXT, STEP

PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"


def diagram(table: Mapping[tuple[StrEnum, StrEnum], StrEnum]) -> str:
    """A Mermaid state diagram; several events between the same two states share an arrow."""
    arrows: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for (state, event), target in table.items():
        arrows.setdefault((state, target), []).append(str(event))
    first = next(iter(table))[0]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [
        f"    {state.name} --> {target.name}: {'; '.join(events)}"
        for (state, target), events in arrows.items()
    ]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """The page with fresh diagrams between its markers. Raises ValueError if a marker is missing."""
    for name, table in (("controller", NEXT), ("processor", STEP)):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE}: wanted the markers {begin.strip()} and {end}")
        text = f"{head}{begin}{diagram(table)}\n{end}{tail}"
    return text


def main() -> int:
    """Rewrite the page, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if the page is out of date"
    )
    arguments = parser.parse_args()
    text = PAGE.read_text()
    fresh = drawn(text)
    if arguments.check and fresh != text:
        print(f"{PAGE.name} is out of date: run python tools/protocol_diagrams.py", file=sys.stderr)
        return 1
    if fresh != text:
        PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
