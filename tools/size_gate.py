"""Keep files and functions small enough to read: part of `make check`.

A file has at most 400 lines, a function at most 50 (docstrings not counted; hardly any up to 60). What
exceeds that stands in EXCEPTIONS with its reason, and an exception that is no longer needed is an error too.

    python tools/size_gate.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 50
EXCEPTIONS: dict[str, str] = {
    "src/swansong/protocol/messages.py": "declarations only: every message, event and effect",
}
"""Path, or path:function -> why it may be larger."""


def main() -> int:
    """Report every excess; 1 if there is one."""
    root = Path(__file__).parent.parent
    found = {
        place: text
        for folder in ("src", "tools", "examples", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
        for place, text in excesses(path, path.relative_to(root))
    }
    problems = [f"{place}: {text}" for place, text in found.items() if place not in EXCEPTIONS]
    problems += [f"{place}: listed as an exception, needs none" for place in EXCEPTIONS if place not in found]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


def excesses(path: Path, shown: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, what) for each excess of a file."""
    text = path.read_text()
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield str(shown), f"{lines} lines, at most {FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = function_lines(node)
            if size > FUNCTION_LINES:
                yield f"{shown}:{node.name}", f"{size} lines, at most {FUNCTION_LINES}"


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    size = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        size -= (first.end_lineno or first.lineno) - first.lineno + 1
    return size


if __name__ == "__main__":
    sys.exit(main())
