"""The position of a run in its data: told at every boundary, and taken up again exactly there.

## What is restored when

The order of an epoch follows from the generators' states when it began; what training draws from them
afterwards does not change it. So a position has both ends: the states at the epoch's start and the number of
batches taken since. To take it up, the generators are put to the epoch's start, the iterator is made and
advanced, and only then are they put to the states of the boundary: whatever is drawn next, in augmentation
or in the model, is what an undisturbed run would have drawn.

As the second set of states belongs to whoever saved it, `load` takes a callable that restores it, and calls
it exactly once: for a position within an epoch (its end included) when the first batch is asked for,
between advancing and loading that batch; for one between epochs before `epochs` or `batches` does anything.
What the loop's own code draws before that, going through the beginning of the epoch again, does no harm.

## What cannot be exact

`load` returns reasons for what is known to be inexact: random numbers drawn in worker processes, whose
generators are out of reach. They can only be repeated by loading what was loaded (`exact_augmentation=True`),
and not at all if the workers have lived through earlier epochs. A dataset whose samples depend on the index
alone, or on the loader's seed and the index, is exact in any case; so is one that draws in the main process.

Not seen, and not restored: generators of the user's own in samplers and datasets, other than torch.Generator
objects that are the `generator` of a loader or sampler or are given by name. If they decide an epoch's order,
its first indices differ, and that is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from swansong.errors import ConfigError, SwansongWarning
from swansong.torch.generators import Generators, GeneratorStates
from swansong.torch.skipping import Skip
from swansong.torch.sources import generators_of, samplers_of, source_of
from swansong.torch.standing import Standing

NOT_POSITIONED: Final = (
    "the position in the data: the loop iterates its loader by itself, so a resumed run begins the data of "
    "the epoch anew. Take the batches from run.batches() to go on where they stopped"
)
"""What is to be said of a loop in which no `Feed` was `begun`."""


class Feed:
    """A loader, and how far a run has come in it.

    `loader` may be a DataLoader, anything with `state_dict` and `load_state_dict` (torchdata's
    StatefulDataLoader), or any iterable of batches. Of a map-style dataset nothing is loaded in order to skip
    it; other data are loaded and dropped, and a SwansongWarning says so if that takes long. A loader with
    states of its own is trusted with them; its state is taken at every boundary.

    `generators` are torch.Generator objects to be captured with the others, by name. `exact_augmentation`
    loads what was skipped also in worker processes, so that their generators are as they were.

    Samplers with `set_epoch` are told the epoch, from 0 as is PyTorch's custom.
    """

    def __init__(
        self,
        loader: Any,
        *,
        generators: Mapping[str, torch.Generator] | None = None,
        exact_augmentation: bool = False,
    ) -> None:
        self.generators = Generators(generators_of(loader, generators or {}))
        """Everything random, to be captured and restored by the caller along with `state`."""
        self._samplers = samplers_of(loader).values()
        self._source = source_of(loader, self.generators, exact_augmentation=exact_augmentation)
        self._epoch = 1
        self._batch = 0
        self._start: GeneratorStates | None = None
        self._begun = False
        self._loaded: tuple[Standing, dict[str, Any]] | None = None
        self._restore: Callable[[], object] | None = None
        self._allow_reshuffle = False
        self._inexact: list[str] = []

    @property
    def epoch(self) -> int:
        """The epoch of the next batch or, at its end, of the last one; from 1."""
        return self._epoch

    @property
    def batch_in_epoch(self) -> int:
        """How many batches of the epoch were taken; 0 between epochs."""
        return self._batch

    @property
    def begun(self) -> bool:
        """True once a batch was asked for. If it stays False, the loop iterates by itself: NOT_POSITIONED."""
        return self._begun

    @property
    def awaiting(self) -> bool:
        """True from `load` until the generators are restored: until then they are not those of `state`."""
        return self._restore is not None

    @property
    def inexact(self) -> tuple[str, ...]:
        """Why what follows may differ from an undisturbed run; complete once the first batch is there."""
        return tuple(self._inexact)

    def epochs(self, count: int) -> Iterator[int]:
        """Go through the epochs up to number `count`, from where the run stands. Yields the epoch, from 1.

        An epoch whose batches were all taken, but whose end was not reached, comes once more, without
        batches: what the loop does after an epoch is still to be done.
        """
        while self._epoch <= count:
            if self._batch == 0:
                self._arrive()
            epoch = self._epoch
            yield epoch
            if self._epoch == epoch:
                self._arrive()
                self._next_epoch()

    def batches(self) -> Iterator[Any]:
        """The batches of the epoch that are left. A loop that broke off an epoch gets the next one."""
        self.leave()
        batches = self._open()
        for batch in batches:
            self._batch += 1
            yield batch
        self._next_epoch()

    def leave(self) -> None:
        """The loop takes no more batches of this epoch, if it has taken any since `load`."""
        if self._batch and self._loaded is None:
            self._next_epoch()

    def state(self) -> dict[str, Any]:
        """The position at a boundary: before the next batch is asked for. For `load`; plain values.

        `start` and `workers` are the same objects at every boundary of an epoch.
        """
        if self._loaded is not None:
            return self._loaded[1]
        workers = self._source.workers
        return {
            "epoch": self._epoch,
            "batch": self._batch,
            "start": self._start,
            "workers": None if workers is self._start else workers,
            "order": self._source.order if self._batch else None,
            "loader": self._source.loader_state(),
        }

    def load(
        self, state: object, *, restore: Callable[[], object] | None = None, allow_reshuffle: bool = False
    ) -> list[str]:
        """Go on from `state` with the next batch; return reasons why that is not exact, as far as known.

        `restore` is to restore the generators to the same boundary; see the module's documentation. What it
        returns is not looked at: `Generators.check` says before what it will leave out. With a state that is
        no position, raises LoadError, and nothing is changed.

        If the data turn out to come in another order when the first batch is asked for, ConfigError is raised
        there, unless `allow_reshuffle`: then just as many batches are skipped.
        """
        at = Standing.of(state, self.generators.check)
        reasons = self._source.check(at)
        self._loaded = (at, dict(state))  # type: ignore[call-overload]  # a mapping, as `of` has checked
        self._epoch, self._batch, self._start = at.epoch, at.batch, at.start
        self._restore, self._allow_reshuffle = restore, allow_reshuffle
        self._inexact = reasons
        return list(reasons)

    def _open(self) -> Iterator[Any]:
        self._begun = True
        if self._batch == 0:
            self._arrive()
        for sampler in self._samplers:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(self._epoch - 1)
        start = self._start if self._batch else None
        if start is None:
            start = self.generators.capture()
        if self._loaded is None:
            self._start = start
            return self._source.begin(start)
        at = self._loaded[0]
        batches, skipped = self._source.enter(at, start)
        self._judge(at, skipped)
        if at.batch:
            self._arrive()
        self._start, self._loaded = start, None
        return batches

    def _judge(self, at: Standing, skipped: Skip) -> None:
        """Raise ConfigError if the data are not those that were begun, unless that is allowed."""
        order = self._source.order
        found = ""
        if skipped.taken < skipped.wanted:
            found = f"there are only {skipped.taken} batches"
        elif None not in (at.order, order) and at.order != order:
            found = "the epoch begins with other samples"
        if found and not self._allow_reshuffle:
            raise ConfigError(
                f"the data cannot go on after batch {at.batch} of epoch {at.epoch}: {found}. Dataset, batch "
                "size, number of ranks or seeds are not those of the run that saved, or a sampler has a "
                "generator of its own. With allow_reshuffle=True training goes on all the same, not exactly"
            )
        for reason in filter(None, (found, skipped.reason())):
            self._inexact.append(reason)
            warnings.warn(f"resumed within epoch {at.epoch}: {reason}", SwansongWarning, stacklevel=4)

    def _arrive(self) -> None:
        """The run has come to the boundary: everything drawn from here on counts."""
        if self._restore is not None:
            restore, self._restore = self._restore, None
            restore()

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._batch = 0
        self._start = None
        self._loaded = None
