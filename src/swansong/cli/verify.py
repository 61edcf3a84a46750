"""`swansong verify`: are the bytes those that were committed?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from swansong.cli import output, text
from swansong.cli.keys import read_key
from swansong.cli.options import AsJson, Debug, KeyFile
from swansong.cli.progress import ReadingBar
from swansong.store import clock, verify
from swansong.store.catalog import Found
from swansong.store.verify import Problem, Report


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of them.")],
    key_file: KeyFile = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Check every byte against what was saved, of a checkpoint or of all in a directory.

    No key is needed for that. With one, it is also proved that the content was sealed with it. The verdicts:
    ok, damaged, unproven (the key does not fit), unverified (there is no manifest, so only the structure
    could be checked). Exit code 1 if anything is damaged or unproven, or nothing could be verified.

    \b
    Examples:
      swansong verify checkpoints
      swansong verify checkpoints/lenet-3_100.ckpt --key-file run.key
    """
    key = read_key(key_file)
    stopwatch = clock.SystemClock().monotonic
    began = stopwatch()
    states: Counter[str] = Counter()
    targets = verify.targets(path)
    with ReadingBar(sum(found.nbytes for found in targets if found.committed)) as bar:

        def checked(found: Found, problems: list[Problem]) -> None:
            state = _state(found, problems)
            states[state] += 1
            if not as_json:
                with bar.paused():
                    _print(found, state, problems)

        report = verify.verify(path, key=key, progress=bar.advance, checked=checked)
    if as_json:
        output.print_json(_document(report))
    else:
        _print_verdict(report, states, stopwatch() - began)
    return int(not report.ok)


def _state(found: Found, problems: list[Problem]) -> str:
    if not problems:
        return "ok" if found.committed else "unverified"
    return "unproven" if all(problem.about_key for problem in problems) else "damaged"


def _print(found: Found, state: str, problems: list[Problem]) -> None:
    output.print_line(
        output.state_cell(state, 10), f"  {text.size(found.nbytes):>10}  ", output.cell(found.name)
    )
    for problem in problems:
        output.print_line(output.cell(problem.what.removeprefix(f"{found.path}: ")), indent=4)


def _print_verdict(report: Report, states: Counter[str], seconds: float) -> None:
    speed = text.size(report.checked_bytes / seconds) if seconds > 0 else "-"
    proof = {None: "", True: "; all authenticated", False: "; not all authenticated"}[report.authenticated]
    output.print_line(
        output.cell(
            ", ".join(f"{count:,} {state}" for state, count in states.items()), _verdict_style(report)
        ),
        f"; {text.size(report.checked_bytes)} read in {seconds:.1f} s ({speed}/s){proof}",
    )


def _verdict_style(report: Report) -> str:
    return "bold green" if report.ok else "bold red"


def _document(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "checked_bytes": report.checked_bytes,
        "checkpoints": report.checkpoints,
        "authenticated": report.authenticated,
        "problems": [
            {name: value for name, value in asdict(problem).items() if name != "about_key"}
            for problem in report.problems
        ],
    }
