"""Remove every table row, guard and deadline of the protocol in turn; every removal must fail a test.

    python tools/mutate_protocol.py --jobs 2
    python tools/mutate_protocol.py --only 'incident.py:*' --results .cache/mutants.json
    python tools/mutate_protocol.py --only '*Processor._lease:*' --list

Each wrong program is tried in memory, against a copy of the repository: first by the machines' tests, then
in the simulation, with fixed seeds. What survives stands in tools/mutation_exceptions.toml with its reason.
It is an error if one survives that does not, if one that does is killed, or is there no more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from mutants import Mutant, mutants_of
from mutation_judge import Verdict, Workshop, judged

REPOSITORY: Final = Path(__file__).parent.parent
EXCEPTIONS: Final = Path(__file__).with_name("mutation_exceptions.toml")
MACHINES: Final = (
    "states",
    "controller",
    "processor",
    "incident",
    "savers",
    "members",
    "admission",
    "outbox",
)
"""Modules of `swansong.protocol` that decide; the wire and the handshake have tests of their own."""


def main() -> int:
    """Return 1 if the removals that survive are not those that are listed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default 1)")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only mutants whose names match")
    parser.add_argument("--results", type=Path, help="keep verdicts here; try again only what has changed")
    parser.add_argument("--json", action="store_true", help="print all verdicts as JSON")
    parser.add_argument("--list", action="store_true", help="print the names and try nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        workshop = Workshop(REPOSITORY, Path(directory))
        everything = [m for path in workshop.machine_files(MACHINES) for m in mutants_of(path)]
        mutants = [mutant for mutant in everything if matches(mutant.name, arguments.only)]
        if arguments.list:
            print(*(mutant.name for mutant in mutants), sep="\n")
            return 0
        verdicts = tried(workshop, mutants, arguments.jobs, Memory(arguments.results, workshop.root))
    if arguments.json:
        print(json.dumps({name: asdict(verdict) for name, verdict in verdicts.items()}, indent=1))
    problems = compared(verdicts, exceptions(EXCEPTIONS), arguments.only)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    killers = Counter(_kind(verdict) for verdict in verdicts.values())
    print(", ".join(f"{count} {kind}" for kind, count in killers.most_common()), file=sys.stderr)
    return bool(problems)


def matches(name: str, pattern: str) -> bool:
    """As a shell would, but for brackets: they are common in the names."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))


def _kind(verdict: Verdict) -> str:
    if not verdict.killed:
        return "survived"
    for start in ("tests", "seed"):
        if verdict.by.startswith(start):
            return f"killed by a {start.removesuffix('s')}"
    return "killed otherwise"


# -- trying -----------------------------------------------------------------------------------------------


class Memory:
    """Verdicts of earlier runs, in a file.

    One is good as long as the changed file is the same, and for a survivor as long as all sources and tests
    are.
    """

    def __init__(self, path: Path | None, root: Path) -> None:
        self._path = path
        self._all: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._all = json.loads(path.read_text())
        files = [*(root / "src").rglob("*.py"), *(root / "tests").rglob("*")]
        self._everything = _digest(sorted(path for path in files if path.is_file()))

    def recall(self, mutant: Mutant) -> Verdict | None:
        """What became of a mutant, if that is still known."""
        entry = self._all.get(mutant.name)
        if entry is None or entry["source"] != _digest([mutant.path]):
            return None
        if not entry["killed"] and entry["everything"] != self._everything:
            return None
        return Verdict(entry["killed"], entry["by"], entry["seconds"])

    def keep(self, mutant: Mutant, verdict: Verdict) -> None:
        """Remember it."""
        if self._path is not None:
            digests = {"source": _digest([mutant.path]), "everything": self._everything}
            self._all[mutant.name] = {**asdict(verdict), **digests}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f"{self._path.name}.tmp")
            temporary.write_text(json.dumps(self._all, indent=1))
            temporary.replace(self._path)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def tried(workshop: Workshop, mutants: Sequence[Mutant], jobs: int, memory: Memory) -> dict[str, Verdict]:
    """By name, what became of each. Raises SystemExit if the right program fails."""
    known = {mutant.name: memory.recall(mutant) for mutant in mutants}
    unknown = [mutant for mutant in mutants if known[mutant.name] is None]
    verdicts = {name: verdict for name, verdict in known.items() if verdict is not None}
    if unknown:
        ((_, unchanged),) = judged(workshop, [None], 1)
        if unchanged.killed:
            raise SystemExit(f"the unchanged program fails: {unchanged.by}")
    since = time.monotonic()
    for count, (mutant, verdict) in enumerate(judged(workshop, unknown, jobs), 1):
        if mutant is not None:
            verdicts[mutant.name] = verdict
            memory.keep(mutant, verdict)
        left = (time.monotonic() - since) / count * (len(unknown) - count)
        survivors = sum(not verdict.killed for verdict in verdicts.values())
        progress = f"{len(verdicts)} of {len(mutants)}, {survivors} survived, about {left / 60:.0f} min left"
        print(f"\r{progress}  ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {mutant.name: verdicts[mutant.name] for mutant in mutants}


# -- what may survive -------------------------------------------------------------------------------------


def exceptions(path: Path) -> dict[str, str]:
    """Mutant -> why it may survive. Raises ValueError for one without a reason, or listed twice."""
    listed: dict[str, str] = {}
    for group in tomllib.loads(path.read_text()).get("exception", []):
        for name in group["mutants"]:
            if not group["reason"].strip() or name in listed:
                raise ValueError(f"{path.name}: {name}: wanted one entry, with a reason")
            listed[name] = group["reason"]
    return listed


def compared(verdicts: Mapping[str, Verdict], listed: Mapping[str, str], only: str) -> list[str]:
    """What is wrong: survivors that are not listed, and entries of the list that are not needed."""
    problems = [
        f"survived: {name}" for name, verdict in verdicts.items() if not verdict.killed and name not in listed
    ]
    for name in listed:
        if name in verdicts and verdicts[name].killed:
            problems.append(f"listed as an exception, but killed by {verdicts[name].by}: {name}")
        elif name not in verdicts and matches(name, only):
            problems.append(f"listed as an exception, but there is no such mutant: {name}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
