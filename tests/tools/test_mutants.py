"""The script that removes rows, guards and deadlines finds them, and tells whether a test noticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
TOOLS = REPOSITORY / "tools"
PROTOCOL = REPOSITORY / "src/swansong/protocol"
sys.path.append(str(TOOLS))  # the script's modules lie beside it

from mutants import Mutant, mutants_of  # noqa: E402
from mutate_protocol import EXCEPTIONS, MACHINES, compared, exceptions, matches  # noqa: E402
from mutation_judge import Verdict  # noqa: E402

KILLED = Verdict(True, "a test", 1.0)
SURVIVED = Verdict(False, "", 1.0)


@pytest.fixture(scope="module")
def found() -> dict[str, Mutant]:
    """All mutants by name."""
    everything = [mutant for name in MACHINES for mutant in mutants_of(PROTOCOL / f"{name}.py")]
    by_name = {mutant.name: mutant for mutant in everything}
    assert len(by_name) == len(everything), "two mutants of one name"
    return by_name


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (
            "states.py:NEXT[Phase.FREEZING, On.CUT]=removed",
            "(Phase.FREEZING, On.CUT): Phase.SAVING, ",
            "",
        ),
        (
            "controller.py:Controller._bring_up_to_date:if(self.phase in WORKING)=False",
            "if self.phase in WORKING:",
            "if False:",
        ),
        (
            "controller.py:Controller._bring_up_to_date:and(peer.frozen)=True",
            "elif self.phase is Phase.TRAINING and peer.frozen:",
            "elif self.phase is Phase.TRAINING and True:",
        ),
        (
            "controller.py:Controller._take:case(self._is(incident, Phase.COMMITTING))#2=True",
            "case m.CommitFailed(incident, reason) if self._is(incident, Phase.COMMITTING):",
            "case m.CommitFailed(incident, reason) if (self._is(incident, Phase.COMMITTING), True)[1]:",
        ),
        (
            "members.py:Members.on:where(peer.connection == connection)=False",
            "if peer.connection == connection)",
            "if False)",
        ),
        (
            "processor.py:Processor._lease:moment(self._word_at + options.gate_lease_s)=never",
            "ends = self._word_at + options.gate_lease_s\n",
            "ends = float('inf')\n",
        ),
        (
            "controller.py:Controller._releasing:return(ends)=never",
            "job ended after an incident', now)\n        return ends",
            "job ended after an incident', now)\n        return None",
        ),
    ],
    ids=["row", "guard", "operand", "case", "comprehension", "moment", "returned moment"],
)
def test_known_removal_is_found_and_is_the_only_change(
    found: dict[str, Mutant], name: str, before: str, after: str
) -> None:
    mutant = found[name]
    unchanged = mutant.unchanged()
    assert before in unchanged
    assert mutant.text() == unchanged.replace(before, after, 1)


def test_mutants_of_every_kind_compile(found: dict[str, Mutant]) -> None:
    kinds = {re.split(r"[(\[]", name.split(":", 2)[-1])[0]: mutant for name, mutant in found.items()}
    expected = {"NEXT", "STEP", "if", "while", "case", "where", "any", "all", "and", "or", "value", "compare"}
    assert kinds.keys() == expected | {"moment", "return"}
    for mutant in kinds.values():
        mutant.compiled()


def test_every_exception_is_a_mutant(found: dict[str, Mutant]) -> None:
    assert exceptions(EXCEPTIONS).keys() <= found.keys()


def test_name_does_not_depend_on_line_numbers(tmp_path: Path) -> None:
    text = (PROTOCOL / "members.py").read_text()
    moved = tmp_path / "members.py"
    moved.write_text(text.replace("from __future__", "# a line\n\nfrom __future__"))
    assert [m.name for m in mutants_of(moved)] == [m.name for m in mutants_of(PROTOCOL / "members.py")]


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ({"a": "why"}, None),
        ({}, "survived: a"),
        ({"a": "why", "b": "why"}, "listed as an exception, but killed by a test: b"),
        ({"a": "why", "c": "why"}, "listed as an exception, but there is no such mutant: c"),
    ],
    ids=["as it should be", "not listed", "killed", "gone"],
)
def test_survivors_must_be_those_that_are_listed(listed: dict[str, str], problem: str | None) -> None:
    assert compared({"a": SURVIVED, "b": KILLED}, listed, "*") == ([problem] if problem else [])


def test_exception_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text('[[exception]]\nreason = " "\nmutants = ["a"]\n')
    with pytest.raises(ValueError, match="with a reason"):
        exceptions(path)


def test_brackets_in_a_pattern_are_brackets() -> None:
    assert matches("states.py:NEXT[a, b]=removed", "states.py:NEXT[a, *")


JUDGED = """
import sys
from pathlib import Path
sys.path.insert(0, "tools")
from mutants import mutants_of
from mutation_judge import Workshop, judged
workshop = Workshop(Path(), Path(sys.argv[1]))
(path,) = workshop.machine_files(["members"])
mutants = [mutant for mutant in mutants_of(path) if mutant.name == sys.argv[2]]
((_, verdict),) = judged(workshop, mutants, 1)
print(verdict.by)
"""


def test_removal_is_noticed_by_the_test_that_is_there_for_it(tmp_path: Path) -> None:
    name = "members.py:Members.dismiss:if(peer.connection is None)=False"
    command = [sys.executable, "-c", JUDGED, str(tmp_path / "copy"), name]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("::test_successor_does_not_miss_who_had_left")
