"""Where a run stands in its data, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from swansong.errors import LoadError
from swansong.torch.generators import GeneratorStates

_WHERE: Final = "position in the data"
_FIELDS: Final = ("epoch", "batch", "start", "workers", "order", "loader")


@dataclass(frozen=True, slots=True)
class Standing:
    """A boundary, read back from `Feed.state`."""

    epoch: int
    """From 1."""
    batch: int
    """How many batches of the epoch were taken."""
    start: GeneratorStates | None
    """The generators when the epoch began; None if `batch` is 0."""
    workers: GeneratorStates | None
    """The generators when persistent workers were started; None: there are none, or it was in this epoch."""
    order: int | None
    """Fingerprint of the first indices of the epoch, if known."""
    loader: Any
    """What the loader's own `state_dict` said, or None."""

    @classmethod
    def of(cls, state: object, check_generators: Callable[[object], object]) -> Standing:
        """Read what `Feed.state` gave. Raises LoadError for anything else."""
        if not isinstance(state, Mapping) or set(state) != set(_FIELDS):
            raise LoadError(f"{_WHERE}: wanted a dictionary with {', '.join(_FIELDS)}, found {_short(state)}")
        for field, least in (("epoch", 1), ("batch", 0), ("order", 0)):
            value = state[field]
            if not ((type(value) is int and value >= least) or (field == "order" and value is None)):
                raise LoadError(f"{_WHERE}: {field}: wanted an integer from {least}, found {_short(value)}")
        for field in ("start", "workers"):
            if state[field] is not None:
                check_generators(state[field])
        if state["batch"] and state["start"] is None:
            raise LoadError(
                f"{_WHERE}: start: wanted the generators' states {state['batch']} batches earlier"
            )
        return cls(**{field: state[field] for field in _FIELDS})


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, Mapping) else str(value)
    return f"{type(value).__name__} {text[:80]!r}"
