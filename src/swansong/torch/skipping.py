"""Going to the middle of an epoch: drawing and dropping what comes first, indices rather than samples."""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from swansong.errors import SwansongWarning
from swansong.torch.generators import GeneratorStates

LONG_SKIP_S: Final = 10.0
"""How long batches may be loaded and dropped before that is said."""


@dataclass(frozen=True, slots=True)
class Skip:
    """What came of dropping the first items of an iterator."""

    wanted: int = 0
    taken: int = 0
    """Fewer than wanted if the iterator ended."""
    draws: bool = False
    """Between the first and the last of them, one of the generators that everything shares was drawn from."""

    def reason(self) -> str | None:
        """Why what comes next may not be what an undisturbed run would have got; None if it is."""
        if not self.draws:
            return None
        return (
            "the data are drawn with the help of generators that the training loop draws from as well, batch "
            "by batch; what was drawn in between is not repeated, so if they decide the order, it is another"
        )


def skip(items: Iterator[Any], count: int, capture: Callable[[], GeneratorStates], *, loads: bool) -> Skip:
    """Drop the next `count` items, or as many as there are.

    `loads` says that each is a batch being loaded; if that takes long, one SwansongWarning says so. The first
    item may draw from the shared generators: its place among all that is drawn is known.
    """
    before: GeneratorStates = {}
    begun, warned = time.monotonic(), not loads
    for taken in range(count):
        if next(items, _END) is _END:
            return Skip(count, taken, taken > 1 and _shared(capture()) != before)
        if taken == 0:
            before = _shared(capture())
        if not warned and time.monotonic() - begun > LONG_SKIP_S:
            warned = True
            warnings.warn(
                f"resuming loads again the {count} batches that came before in this epoch ({taken + 1} in "
                f"{LONG_SKIP_S:.0f} s), to come to where it was. A map-style dataset without "
                "exact_augmentation, or a loader with state_dict() and load_state_dict(), goes there at once",
                SwansongWarning,
                stacklevel=5,
            )
    return Skip(count, count, count > 1 and _shared(capture()) != before)


class IndexWindow:
    """Stands in for a DataLoader's index sampler: its indices without the first `skip`, or none if `closed`.

    Drawing is exactly as lazy as without it: `iter` asks the sampler for its iterator at once and for
    nothing more.
    """

    def __init__(self, capture: Callable[[], GeneratorStates]) -> None:
        self._capture = capture
        self.inner: Iterable[Any] = ()
        self.skip = 0
        self.closed = False
        self.current: Indices | None = None
        """What the last `iter` gave; None if the loader did not ask."""

    def __iter__(self) -> Indices:
        inner = iter(self.inner)
        self.current = Indices(iter(()) if self.closed else inner, self.skip, self._capture)
        return self.current

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]  # a sampler without length raises here, as it should


class Indices:
    """The indices of one epoch. `order` tells this order from another."""

    def __init__(self, inner: Iterator[Any], count: int, capture: Callable[[], GeneratorStates]) -> None:
        self._items = self._noted(inner)
        self._pending = count
        self._capture = capture
        self._skipped = Skip()
        self.order: int | None = None
        """Fingerprint of the first index or list of indices; None before it is drawn or if it has none."""

    def __iter__(self) -> Indices:
        return self

    def __next__(self) -> Any:
        if self._pending:
            self.advance()
        return next(self._items)

    def advance(self) -> Skip:
        """Skip now, if that has not been done, and say what came of it."""
        if self._pending:
            count, self._pending = self._pending, 0
            self._skipped = skip(self._items, count, self._capture, loads=False)
        return self._skipped

    def _noted(self, inner: Iterator[Any]) -> Iterator[Any]:
        for index in inner:
            self.order = fingerprint(index)
            yield index
            break
        yield from inner


def fingerprint(index: object) -> int | None:
    """A number of 32 bits that other indices hardly have; None for objects that show only where they lie."""
    text = repr(index)
    return None if " at 0x" in text else zlib.crc32(text.encode("utf-8", "surrogatepass"))


_END: Final = object()


def _shared(states: GeneratorStates) -> GeneratorStates:
    """Without generators that have a name: those are restored, and only what owns them draws from them."""
    return {key: value for key, value in states.items() if key != "named"}
