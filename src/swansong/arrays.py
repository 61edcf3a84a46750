"""Dictionaries of NumPy arrays, protected: for any loop that trains in place, without a framework.

with swansong.arrays.protect(
    {"weights": weights}, directory="checkpoints", prefix="model", rank=rank, world_size=4,
    ttp="127.0.0.1:2000", replicas="all",
) as run:
    run.resume()
    while run.step < 1000:
        gradients = ...
        with run.update():
            weights -= rate * gradients
        run.step_end()
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from swansong.config import CheckpointConfig
from swansong.engine.address import parse_address
from swansong.engine.clock import UpdateClock
from swansong.errors import ConfigError, NotSupportedError
from swansong.persist import job
from swansong.persist.boundary import BoundaryState, pack
from swansong.persist.loading import Kept, described, fill
from swansong.persist.rank import LiveComponent
from swansong.persist.session import Cells, Plan, Session, warn
from swansong.state.components import TensorShape, component_key
from swansong.state.tensors import HostTensor
from swansong.state.tree import Flat
from swansong.store import naming
from swansong.store.checkpoint import Content
from swansong.store.crypt import Key
from swansong.store.saving import plain_skeleton
from swansong.ttp_options import TTPOptions

EVERYWHERE: Final = "all"
"""For `replicas`: every rank holds equal arrays."""


def protect(
    arrays: Mapping[str, NDArray[np.generic]],
    *,
    directory: str | Path,
    prefix: str,
    rank: int = 0,
    world_size: int = 1,
    config: CheckpointConfig | None = None,
    ttp: str | None = None,
    replicas: str | None = None,
    incarnation: bytes | None = None,
    options: TTPOptions | None = None,
    key: bytes | None = None,
) -> Run:
    """Protect arrays that a loop in this process trains; use as `with protect(...) as run:`.

    `arrays` are written in place and never replaced; any shape, any dtype of docs/format.md, native byte
    order. `config` says when to save and what to keep (None: no periodic checkpoints). `ttp` is HOST:PORT of
    the controller, on rank 0's host (None: periodic checkpoints only). `replicas` says who else holds equal
    arrays: "all" ranks, or a name that exactly the ranks of one group give; None: nobody, as far as is known.
    `incarnation` is 16 random bytes, the same on all ranks and new at each start of the job; by default from
    SWANSONG_INCARNATION. `key` encrypts; by default that of `config`.

    Only arrays with `replicas="all"`, or of a single rank, have periodic checkpoints.

    Raises ConfigError for arguments that cannot be, NotSupportedError.
    """
    material = key if key is not None or config is None else config.enc_key
    plan = Plan(
        directory=Path(directory).absolute(),
        prefix=naming.checked_prefix(prefix),
        rank=rank,
        world_size=world_size,
        incarnation=job.incarnation_of(incarnation, os.environ, world_size),
        address=parse_address(ttp) if ttp is not None else None,
        config=config,
        key=Key(material) if material is not None else None,
        options=options or TTPOptions(),
    )
    return Run(dict(arrays), plan, replicas)


class Run:
    """A protected training loop, made by `protect`. For the thread that trains."""

    def __init__(self, arrays: dict[str, NDArray[np.generic]], plan: Plan, replicas: str | None) -> None:
        """See `protect`."""
        self._plan, self._replicas = plan, replicas
        self._whole = replicas == EVERYWHERE or plan.world_size == 1
        if plan.config is not None and not self._whole:
            raise NotSupportedError(
                "config: arrays that are not the same on all ranks (replicas='all') have no periodic "
                "checkpoints; give config=None"
            )
        self._holder = EVERYWHERE if self._whole else replicas or f"rank {plan.rank}"
        self._tensors = _tensors(arrays, "" if self._whole else f"{self._holder}/")
        shapes = {name: TensorShape(t.dtype.name, t.shape) for name, t in self._tensors.items()}
        self._component = component_key(shapes, placement=replicas, rank=plan.rank)
        self._clock = UpdateClock(self._component)
        self._session = Session(plan, self._content)
        self._updated = False
        self._said: dict[str, Any] = {}
        """What the end of the last step was given."""
        self.objects: dict[str, Any] = {}
        """After `resume`: what was given to `step_end` at the step that was loaded."""

    def __enter__(self) -> Self:
        if self._plan.controlled and self._replicas is None:
            warn(
                f"rank {self._plan.rank} is the only holder of its arrays, as far as is known "
                "(replicas=None): if its process is killed, nothing of the job after the last periodic "
                "checkpoint is left"
            )
        return self

    @property
    def step(self) -> int:
        """Steps completed since the start of training."""
        return self._session.step

    @property
    def protected(self) -> bool:
        """True if the state would be saved if something went wrong now; soon after all ranks have begun."""
        return self._session.protected

    # -- the loop -------------------------------------------------------------------------------------

    def resume(self, *, allow_fresh: bool = False) -> int:
        """Load the newest checkpoint that verifies into the arrays; return its step, 0 if there is none.

        Before anything else; all ranks or none. Rank 0 chooses. Raises DamagedError if there are checkpoints
        and none is usable (unless `allow_fresh`), CrashLoopError, LoadError if it does not fit the arrays.
        """
        if self._session.begun:
            raise ConfigError("resume: comes first, before updates, steps and saves")
        self._begin(resuming=True, allow_fresh=allow_fresh)
        return self.step

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around everything that writes the arrays in one step: one block per step.

        Waits here while a fault is dealt with. Raises TrainingInterrupted if the job ends: let it pass.
        """
        self._begin_if_need_be()
        if self._updated:
            raise ConfigError("update: one block per step; call step_end() after it")
        gate = self._session.gate
        if gate is not None:
            gate.enter((self._clock,))
        else:
            self._clock.queue()
        with self._clock.window():
            yield
        self._updated = True

    def step_end(self, **objects: Any) -> None:
        """A step is complete: remember `objects` (copied; plain values, nested), and save if that is due.

        They are what else a resumed run needs, the same on all ranks that hold replicas. Raises
        TrainingInterrupted, UnrepresentableError, SaveError.
        """
        recorded = plain_skeleton(described(self._holder, objects), "step_end")
        if not self._updated:
            with self.update():
                pass
        self._updated = False
        self._said = deepcopy(objects)
        state = BoundaryState(shared=recorded) if self._whole else BoundaryState(own=recorded)
        self._session.boundary(pack(state))

    def save(self) -> Path | None:
        """Save now, between steps; None on ranks other than 0, which leave it to rank 0.

        Raises SaveError, NotSupportedError for arrays that are not the same on all ranks.
        """
        self._begin_if_need_be()
        if not self._whole:
            raise NotSupportedError("save: only for arrays that are the same on all ranks (replicas='all')")
        return self._session.save()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around work that is no step, such as evaluation: no lack of progress in there is a stall."""
        self._begin_if_need_be()
        return self._session.phase(name)

    def persist_and_stop(self) -> None:
        """Have the state of all ranks saved and the job ended, with exit code 0.

        Raises TrainingInterrupted, here and on the other ranks; let it pass.
        """
        self._begin_if_need_be()
        self._session.persist_and_stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.end(error)

    # -- the beginning --------------------------------------------------------------------------------

    def _begin_if_need_be(self) -> None:
        if not self._session.begun:
            self._begin(resuming=False, allow_fresh=False)

    def _begin(self, *, resuming: bool, allow_fresh: bool) -> None:
        plan = self._plan
        with Kept() as kept:
            facts = self._session.agree(resuming=resuming, allow_fresh=allow_fresh, examine=kept.examine)
            if facts.checkpoint is not None:
                found = kept.open(Path(facts.checkpoint), plan.key)
                self.objects = fill(self._tensors, found, self._holder, nothing_else=self._whole)
        self._said = self.objects

        def components(cells: Cells) -> tuple[LiveComponent, ...]:
            self._clock = UpdateClock(self._component, step=facts.step, cells=cells.get(self._component))
            shown = Flat(self._tensors, {}, None)
            return (LiveComponent("arrays", self._clock, lambda: shown),)

        self._session.begin(facts, [self._component], components)

    def _content(self) -> Content:
        return Content(tensors=self._tensors, objects=described(self._holder, self._said))


def _tensors(arrays: Mapping[str, NDArray[np.generic]], scope: str) -> dict[str, HostTensor]:
    """The arrays as tensors that show their memory; `scope` begins their names where other ranks have others.

    Raises ConfigError for what is no array, none that can be written in place, or none at all.
    """
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise ConfigError(f"arrays: wanted NumPy arrays by name, got {type(array).__name__} at {name!r}")
        if not array.flags.writeable or not array.dtype.isnative:
            raise ConfigError(f"arrays[{name!r}]: wanted a writable array in native byte order")
    if not arrays:
        raise ConfigError("arrays: wanted at least one")
    return {scope + name: HostTensor.of(array, name=name) for name, array in arrays.items()}
