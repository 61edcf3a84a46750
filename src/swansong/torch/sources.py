"""The kinds of loaders: how an epoch is begun, and how it is entered in the middle.

What is relied upon of PyTorch's `DataLoader` beyond its documentation, as of 2.13:

- an iterator takes its indices from `loader._index_sampler`, which is the attribute `batch_sampler` or, if
  that is None, `sampler`; both are ordinary entries of the loader's `__dict__`, which `iter(loader)` reads;
- `loader._iterator` holds the iterator of persistent workers, None before the first `iter(loader)`; a later
  one resets that iterator, and draws no seed for the workers again.

That they are there is checked for each loader. If an iterator then takes its indices from elsewhere, as that
of a subclass may, its first batches are loaded and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from swansong.errors import LoadError, NotSupportedError
from swansong.torch.generators import Generators, GeneratorStates
from swansong.torch.skipping import IndexWindow, Skip, skip
from swansong.torch.standing import Standing

_CHAIN: Final = ("batch_sampler", "sampler")


class Source(Protocol):
    """One kind of loader."""

    @property
    def order(self) -> int | None:
        """Fingerprint of the order of this epoch, if it is known by now."""

    @property
    def workers(self) -> GeneratorStates | None:
        """The states from which persistent workers were seeded; None if there are none."""

    def loader_state(self) -> Any:
        """What the loader itself says of its position, or None."""

    def check(self, at: Standing) -> list[str]:
        """Why training from there cannot be exact. Raises LoadError if `at` is not of this kind of loader."""

    def begin(self, start: GeneratorStates) -> Iterator[Any]:
        """The batches of a fresh epoch; the generators are at `start` now."""

    def enter(self, at: Standing, start: GeneratorStates) -> tuple[Iterator[Any], Skip]:
        """The batches after the first `at.batch` of the epoch that begins with the generators at `start`.

        The generators are left anywhere.
        """


def source_of(loader: Any, generators: Generators, *, exact_augmentation: bool) -> Source:
    """The kind of `loader`. Raises NotSupportedError for what cannot be iterated."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulSource(loader, generators)
    if isinstance(loader, DataLoader):
        return LoaderSource(loader, generators, exact_augmentation=exact_augmentation)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise NotSupportedError(f"a loader must be iterable; {type(loader).__qualname__} is not")
    return IterableSource(loader, generators)


def samplers_of(loader: Any) -> dict[str, Any]:
    """The loader's samplers, by where they are; each once."""
    found: dict[str, Any] = {}
    waiting = [("loader", loader)]
    while waiting:
        where, holder = waiting.pop(0)
        for name in _CHAIN:
            sampler = getattr(holder, name, None)
            if sampler is not None and all(sampler is not known for known in found.values()):
                found[f"{where}.{name}"] = sampler
                waiting.append((f"{where}.{name}", sampler))
    return found


def generators_of(loader: Any, named: Mapping[str, torch.Generator]) -> dict[str, torch.Generator]:
    """`named`, and those that the loader and its samplers draw from, each once, by where they are."""
    result = dict(named)
    for where, holder in {"loader": loader, **samplers_of(loader)}.items():
        generator = getattr(holder, "generator", None)
        known = (torch.default_generator, *result.values())
        if isinstance(generator, torch.Generator) and all(generator is not one for one in known):
            result[f"{where}.generator"] = generator
    return result


class IterableSource:
    """Anything that can be iterated: entered by drawing what comes first."""

    order: int | None = None
    workers: GeneratorStates | None = None

    def __init__(self, loader: Iterable[Any], generators: Generators) -> None:
        self._loader = loader
        self._generators = generators

    def loader_state(self) -> Any:
        return None

    def check(self, at: Standing) -> list[str]:
        return []

    def begin(self, start: GeneratorStates) -> Iterator[Any]:
        return iter(self._loader)

    def enter(self, at: Standing, start: GeneratorStates) -> tuple[Iterator[Any], Skip]:
        self._generators.restore(start)
        batches = iter(self._loader)
        return batches, skip(batches, at.batch, self._generators.capture, loads=True)


class StatefulSource:
    """A loader with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader.

    Its next `iter` is relied upon to go on where the loaded state was taken, or with the next epoch if that
    was at the end of one. It is called with the generators at the epoch's start. torchdata's, given a state
    from an epoch's end, seeds its workers twice, so that a shuffle by the shared generators is another than
    undisturbed; within an epoch it is not.
    """

    order: int | None = None
    workers: GeneratorStates | None = None

    def __init__(self, loader: Any, generators: Generators) -> None:
        self._loader = loader
        self._generators = generators
        self._begun = False

    def loader_state(self) -> Any:
        # Not before it is iterated: torchdata's loader would begin an epoch then, and draw for it.
        return self._loader.state_dict() if self._begun else None

    def check(self, at: Standing) -> list[str]:
        if at.batch and at.loader is None:
            raise LoadError(
                f"the position in the data was saved from a loader without state_dict(), but "
                f"{type(self._loader).__qualname__} has one; resume with a loader of the kind that was saved"
            )
        return []

    def begin(self, start: GeneratorStates) -> Iterator[Any]:
        self._begun = True
        return iter(self._loader)

    def enter(self, at: Standing, start: GeneratorStates) -> tuple[Iterator[Any], Skip]:
        self._generators.restore(start)
        if at.loader is not None:
            self._loader.load_state_dict(at.loader)
        return self.begin(start), Skip()


class LoaderSource:
    """A `DataLoader`: entered by skipping indices, so that nothing is loaded in vain.

    With an IterableDataset, or in worker processes with `exact_augmentation`, what is skipped is loaded.
    """

    def __init__(self, loader: DataLoader[Any], generators: Generators, *, exact_augmentation: bool) -> None:
        missing = {"_iterator", "batch_sampler", "sampler"} - set(vars(loader))
        if missing:
            raise NotSupportedError(
                f"{type(loader).__qualname__} is no DataLoader as PyTorch 2.13 has it (this is PyTorch "
                f"{torch.__version__}): it has no {', '.join(sorted(missing))}. Use one as it is there, or a "
                "loader with state_dict() and load_state_dict()"
            )
        self._loader = loader
        self._generators = generators
        replays = exact_augmentation and loader.num_workers > 0
        self._loads = replays or isinstance(loader.dataset, IterableDataset)
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        self._window = IndexWindow(generators.capture)
        self.workers: GeneratorStates | None = None

    @property
    def order(self) -> int | None:
        return None if self._window.current is None else self._window.current.order

    def loader_state(self) -> Any:
        return None

    def check(self, at: Standing) -> list[str]:
        number = self._loader.num_workers
        if number == 0:
            return []
        reasons = []
        if not self._loader.in_order:
            reasons.append("the loader has in_order=False: batches come in the order in which they are ready")
        if self._persistent and at.epoch > 1:
            reasons.append(
                f"random numbers drawn in the loader's {number} persistent worker processes: new ones begin "
                "with the same seeds, but not where those of the run that saved stood"
            )
        elif at.batch and not self._loads:
            reasons.append(
                f"random numbers drawn in the loader's {number} worker processes: new ones begin with the "
                "same seeds as in this epoch, but not where they stood (exact_augmentation=True loads the "
                "skipped batches once more, and is exact)"
            )
        return reasons

    def begin(self, start: GeneratorStates) -> Iterator[Any]:
        if self._persistent and self._loader._iterator is None:
            self.workers = start
        with self._through():
            return iter(self._loader)

    def enter(self, at: Standing, start: GeneratorStates) -> tuple[Iterator[Any], Skip]:
        if self._persistent:
            self._seed_workers(at.workers)
            self.workers = at.workers or start
        self._generators.restore(start)
        with self._through(skipping=0 if self._loads else at.batch):
            batches = iter(self._loader)
        indices = self._window.current
        if indices is None or self._loads:
            return batches, skip(batches, at.batch, self._generators.capture, loads=True)
        return batches, indices.advance()

    def _seed_workers(self, seeded: GeneratorStates | None) -> None:
        """Start persistent workers anew from the seed they had; None: they had this epoch's.

        An undisturbed run resets its iterator at an epoch's start; so must this one, or it draws another
        seed. So the iterator is made first, for an epoch without indices.
        """
        self._loader._iterator = None
        if seeded is not None:
            self._generators.restore(seeded)
            with self._through(closed=True):
                next(iter(self._loader), None)

    @contextmanager
    def _through(self, *, skipping: int = 0, closed: bool = False) -> Iterator[None]:
        """Meanwhile, an iterator that the loader makes takes its indices through the window."""
        window, attributes = self._window, vars(self._loader)
        window.skip, window.closed, window.current = skipping, closed, None
        name = "sampler" if attributes.get("batch_sampler") is None else "batch_sampler"
        own = window.inner = attributes[name]
        # Not by assignment: a DataLoader refuses a new sampler, for good reason if it were to stay.
        attributes[name] = window
        try:
            yield
        finally:
            attributes[name] = own
            window.skip, window.closed = 0, False
