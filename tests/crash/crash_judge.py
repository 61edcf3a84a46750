"""What is required of a disk after a crash, asked of the real code on a real directory.

1. The newest save that returned, or a later one, loads whole: every tensor, the step, the objects.
2. Whatever verifies is one save, not a mixture.
3. Nothing under a checkpoint's name is anything but a whole checkpoint: no damage, no file without manifest.
4. A new run finds that newest checkpoint, sweeps without harm to it, saves under the same name as the save
   that may have been cut short, prunes; then the new one loads whole, and nothing is left over.

The first and second are docs/format.md, section 8; the third is what "committed by one rename" means.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from crash.crash_model import Crash, Tree
from crash.crash_scenarios import DIRECTORY, SERIES, Scenario
from swansong.policy.keep import KeepAll, KeepLast
from swansong.state.tensors import HostTensor
from swansong.store import catalog, naming
from swansong.store.catalog import Found
from swansong.store.files import Files
from swansong.store.latest import choose
from swansong.store.opening import open_checkpoint
from swansong.store.series import Series
from swansong.store.verify import usable

State: TypeAlias = frozenset[tuple[str, bytes | None]]
"""All of a tree but the temporary things: what is in the temporary directory is removed unread."""
CONTINUED = 4
"""New runs that are tried on one such state, with different temporary things."""
TEMPORARY = f"{DIRECTORY}/{naming.CONTROL}/{naming.TEMPORARY}/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found in one state of the disk."""

    whole: frozenset[int]
    """Numbers of the saves that load whole."""
    faults: tuple[str, ...]
    """What must not be."""

    @property
    def newest(self) -> int:
        """The highest number of a save that loads whole; 0: none."""
        return max(self.whole, default=0)


def materialise(tree: Tree, root: Path) -> Path:
    """Make a state of the disk a real directory, `root`."""
    root.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
    return root


class Judge:
    """Judges states of one scenario. States that were seen before cost nothing. Uses up `scratch`."""

    def __init__(self, scenario: Scenario, scratch: Path) -> None:
        self._scenario, self.scratch = scenario, scratch
        self._looked: dict[State, Outcome] = {}
        self._continued: dict[State, dict[frozenset[str], list[str]]] = {}
        self._count = 0

    def violations(self, crash: Crash, *, go_on: bool = True) -> list[str]:
        """What is wrong with a state, in words. With `go_on`, a new run is tried on it, too."""
        visible = frozenset(item for item in crash.tree.items() if not item[0].startswith(TEMPORARY))
        if visible not in self._looked:
            root = self._materialise(crash.tree)
            self._looked[visible] = self.look(root / DIRECTORY)
            shutil.rmtree(root)
        outcome = self._looked[visible]
        found = [*outcome.faults, *self._missing(outcome, crash.returned)]
        if go_on and not found:
            tried = self._continued.setdefault(visible, {})
            temporary = frozenset(_temporary(crash.tree))
            if temporary not in tried and len(tried) < CONTINUED:
                root = self._materialise(crash.tree)
                tried[temporary] = self._go_on(root / DIRECTORY, outcome.whole)
                shutil.rmtree(root)
            found += tried.get(temporary, ())
        return found

    def violations_at(self, root: Path, returned: int) -> list[str]:
        """The same for a real directory, which a process has left. Goes on in it."""
        outcome = self.look(root / DIRECTORY)
        found = [*outcome.faults, *self._missing(outcome, returned)]
        return found or self._go_on(root / DIRECTORY, outcome.whole)

    def _missing(self, outcome: Outcome, returned: int) -> list[str]:
        """What was promised and is not there."""
        if outcome.newest < returned:
            return [f"save {returned} had returned, the newest that loads is {outcome.newest}"]
        names = len(set(self._scenario.names[:returned]))
        keep = self._scenario.keep
        kept = min(names, keep.count) if isinstance(keep, KeepLast) else names
        if len(outcome.whole) < kept:
            return [f"after save {returned} {kept} are kept, but only {sorted(outcome.whole)} load"]
        return []

    def _materialise(self, tree: Tree) -> Path:
        self._count += 1
        return materialise(tree, self.scratch / f"state-{self._count}")

    def look(self, directory: Path) -> Outcome:
        """What a directory of checkpoints holds, and what it should not."""
        if not directory.is_dir():
            return Outcome(frozenset(), ())
        entries = [found for found in catalog.scan(directory) if found.state != "incomplete"]
        strange = {entry.name for entry in directory.iterdir()} - {found.name for found in entries}
        faults = [f"{name} is visible and no checkpoint" for name in sorted(strange - {naming.CONTROL})]
        whole: set[int] = set()
        for found in entries:
            problem = usable(found, self._scenario.key) if found.committed else found.problem
            if problem is not None:
                faults.append(f"{found.name} is visible and not whole, but {found.state}: {problem}")
                continue
            number, wrong = self._compare(found)
            whole.add(number)
            faults += wrong
        return Outcome(frozenset(whole), tuple(faults))

    def _compare(self, found: Found) -> tuple[int, list[str]]:
        """The number of the save that a checkpoint says it is, and what differs from that."""
        with open_checkpoint(found.path, key=self._scenario.key, mode=self._scenario.mode) as opened:
            number = opened.objects["number"]
            want = self._scenario.content(number)
            wrong = []
            if opened.manifest is None or opened.manifest.step != number:
                wrong.append(f"{found.name} verifies as save {number}, but its step is another")
            for what, wanted, got in (
                ("tensors", want.tensors, opened.read_all()),
                ("rest", want.rest, {name: opened.read(name) for name in opened.rest}),
            ):
                if _plain(wanted) != _plain(got):
                    wrong.append(
                        f"{found.name} verifies as save {number}, but its {what} are not that save's"
                    )
        return number, wrong

    def _go_on(self, directory: Path, whole: frozenset[int]) -> list[str]:
        """A new run on what the crash has left."""
        scenario, files = self._scenario, Files()
        before = choose([directory], SERIES, key=scenario.key).newest
        if (before is None) != (not whole):
            return [f"saves {sorted(whole)} load, but a new run would begin from {before}"]
        series = (
            Series.resumed(before, files) if before is not None else Series.fresh(directory, SERIES, files)
        )
        series.sweep()
        outcome = self.look(directory)
        if outcome.faults or outcome.whole != whole:
            return [f"before sweeping {sorted(whole)} loaded, then {sorted(outcome.whole)}", *outcome.faults]
        if left := sorted(entry.name for entry in series.space.temporary.iterdir()):
            return [f"sweeping has left {left}"]
        number = len(scenario.names) + 1
        saved = scenario.save(series, number, scenario.names[-1])
        outcome = self.look(directory)
        if outcome.faults or outcome.newest != number:
            return [f"the next save does not load; the newest is {outcome.newest}", *outcome.faults]
        series.prune(KeepLast(1) if isinstance(scenario.keep, KeepAll) else scenario.keep, saved.id)
        series.sweep()
        outcome = self.look(directory)
        if outcome.faults or outcome.newest != number:
            return [f"after pruning the newest is {outcome.newest}", *outcome.faults]
        return _leftovers(directory)


def _temporary(tree: Tree) -> Iterator[str]:
    """The temporary things of a tree; of lock files that guard nothing, one stands for all."""
    names = {name for name in tree if name.startswith(TEMPORARY)}
    idle = sorted(
        name for name in names if name.endswith(naming.LOCK) and name.removesuffix(naming.LOCK) not in names
    )
    return iter(names - set(idle[1:]))


def _plain(tensors: dict[str, HostTensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.dtype.name, t.shape, t.array.tobytes()) for name, t in tensors.items()}


def _leftovers(directory: Path) -> list[str]:
    """Whatever no checkpoint needs."""
    needed = {f"{naming.CONTROL}", f"{naming.CONTROL}/{naming.TEMPORARY}"}
    needed |= {f"{naming.CONTROL}/{naming.series_lock(SERIES)}"}
    for found in catalog.scan(directory):
        if found.manifest is None or found.manifest_path is None:
            continue
        base = found.path if found.path.is_dir() else directory
        needed |= {str(p.relative_to(directory)) for p in (found.path, found.manifest_path)}
        for file in (base / record.name for record in found.manifest.files):
            places = {file, file.parent} - {directory}
            needed |= {str(path.relative_to(directory)) for path in places}
    there = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    return [f"left over: {sorted(there - needed)}"] if there != needed else []
