"""Adapter: dictionaries of NumPy arrays, without any framework.

with swansong.arrays.protect(
    {"weights": weights}, rank=rank, world_size=4, directory="checkpoints", prefix="model",
    config=CheckpointConfig(save_checkpoint_steps=100), ttp="127.0.0.1:2000", replicas="all",
) as run:
    run.resume()
    while run.step < steps:
        gradient = ...                 # whatever exchanges it between the ranks
        with run.update():
            weights -= gradient
        run.step_end(seen=run.step)
"""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from swansong.config import CheckpointConfig
from swansong.engine.address import Address, parse_address
from swansong.engine.clock import UpdateClock, interrupted_by
from swansong.engine.token import job_token
from swansong.engine.watchdog import StallOptions
from swansong.errors import (
    ConfigError,
    NotSupportedError,
    SwansongWarning,
    TrainingInterrupted,
)
from swansong.persist import job, series_choice
from swansong.persist.loading import described, fill
from swansong.persist.periodic import Periodic
from swansong.persist.protection import Protection, Settings, whereabouts
from swansong.persist.rank import Boundary, LiveComponent, Records
from swansong.policy.checks import whole_number
from swansong.protocol.messages import FaultKind
from swansong.protocol.options import ProtocolOptions
from swansong.state.components import TensorShape, component_key
from swansong.state.tensors import HostTensor
from swansong.store import naming
from swansong.store.checkpoint import Content, Kind
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.saving import plain_skeleton
from swansong.store.workspace import Workspace

EVERYWHERE: Final = "all"
"""For `replicas`: every rank holds the same."""


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
    options: ProtocolOptions | None = None,
    stall: StallOptions | None = None,
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
    return Run(
        dict(arrays),
        directory=Path(directory).absolute(),
        prefix=naming.checked_prefix(prefix),
        rank=rank,
        world_size=world_size,
        config=config,
        address=parse_address(ttp) if ttp is not None else None,
        replicas=replicas,
        incarnation=incarnation,
        options=options or ProtocolOptions(),
        stall=stall or StallOptions(),
        key=key,
    )


class Run:
    """A protected training loop, made by `protect`. For the thread that trains."""

    def __init__(
        self,
        arrays: dict[str, NDArray[np.generic]],
        *,
        directory: Path,
        prefix: str,
        rank: int,
        world_size: int,
        config: CheckpointConfig | None,
        address: Address | None,
        replicas: str | None,
        incarnation: bytes | None,
        options: ProtocolOptions,
        stall: StallOptions,
        key: bytes | None,
    ) -> None:
        """See `protect`."""
        self._world_size = whole_number("world_size", world_size)
        self._rank = whole_number("rank", rank, least=0, wanted=f"0 to {world_size - 1}")
        if rank >= world_size:
            raise ConfigError(f"rank: wanted 0 to {world_size - 1}, got {rank}")
        self._whole = replicas == EVERYWHERE or world_size == 1
        if config is not None and not self._whole:
            raise NotSupportedError(
                "config: arrays that are not the same on all ranks (replicas='all') have no periodic "
                "checkpoints; give config=None"
            )
        self._arrays, self._config, self._replicas = arrays, config, replicas
        self._tensors = _tensors(arrays, "" if self._whole else f"{replicas or f'rank {rank}'}/")
        self._directory, self._prefix, self._address = directory, prefix, address
        self._incarnation = job.incarnation_of(incarnation, os.environ, world_size)
        material = key if key is not None or config is None else config.enc_key
        self._key = Key(material) if material is not None else None
        self._options, self._stall = options, stall
        self._files = Files()
        shapes = {name: TensorShape(t.dtype.name, t.shape) for name, t in self._tensors.items()}
        self._clock = UpdateClock(component_key(shapes, placement=replicas, rank=rank))
        self._records = Records(0)
        self._step = 0
        self._updated = False
        self._periodic: Periodic | None = None
        self._protection: Protection | None = None
        self._begun = False
        self.objects: dict[str, Any] = {}
        """After `resume`: what was given to `step_end` at the step that was loaded."""

    def __enter__(self) -> Self:
        if self._address is not None and self._replicas is None:
            _warn(
                f"rank {self._rank} is the only holder of its arrays, as far as is known (replicas=None): "
                "if its process is killed, nothing of the job after the last periodic checkpoint is left"
            )
        return self

    @property
    def step(self) -> int:
        """Steps completed since the start of training."""
        return self._step

    @property
    def protected(self) -> bool:
        """True if the state would be saved if something went wrong now; soon after all ranks have begun."""
        return self._protection is not None and self._protection.protected

    # -- the loop -------------------------------------------------------------------------------------

    def resume(self, *, allow_fresh: bool = False) -> int:
        """Load the newest checkpoint that verifies into the arrays; return its step, 0 if there is none.

        Before anything else; all ranks or none. Rank 0 chooses. Raises DamagedError if there are checkpoints
        and none is usable (unless `allow_fresh`), LoadError if this one does not fit the arrays.
        """
        if self._begun:
            raise ConfigError("resume: comes first, before updates, steps and saves")
        self._begin(resuming=True, allow_fresh=allow_fresh)
        return self._step

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around everything that writes the arrays in one step: one block per step.

        Waits here while a fault is dealt with. Raises TrainingInterrupted if the job ends: let it pass.
        """
        self._begin_if_need_be()
        if self._updated:
            raise ConfigError("update: one block per step; call step_end() after it")
        if self._protection is not None:
            self._protection.gate.enter((self._clock,))
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
        plain_skeleton(objects, "step_end")
        if not self._updated:
            with self.update():
                pass
        self._updated = False
        self._step += 1
        self._records.add(Boundary(self._step, described(self._holder, deepcopy(objects))))
        if self._protection is not None:
            self._protection.attend()
        if self._periodic is not None and self._periodic.due(self._step):
            self._save("periodic")
        if self._protection is not None:
            self._protection.note_step()

    def save(self) -> Path | None:
        """Save now, between steps; None on ranks other than 0, which leave it to rank 0.

        Raises SaveError, NotSupportedError for arrays that are not the same on all ranks.
        """
        self._begin_if_need_be()
        if not self._whole:
            raise NotSupportedError("save: only for arrays that are the same on all ranks (replicas='all')")
        return self._save("requested") if self._rank == 0 else None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around work that is no step, such as evaluation: no lack of progress in there is a stall."""
        self._begin_if_need_be()
        return self._protection.watchdog.phase(name) if self._protection is not None else nullcontext()

    def persist_and_stop(self) -> None:
        """Have the state of all ranks saved and the job ended, with exit code 0.

        Raises TrainingInterrupted, here and on the other ranks; let it pass.
        """
        self._begin_if_need_be()
        if self._protection is None:
            raise NotSupportedError("persist_and_stop: needs a controller (ttp=); save() saves without")
        release = self._protection.stop("requested by the training loop")
        if release is not None:
            raise interrupted_by(release)
        raise TrainingInterrupted("training ends, nothing was saved: the processor's thread has failed")

    # -- the end --------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if _went_well(error) and self._periodic is not None and self._periodic.missing_at_end(self._step):
                self._save("final")
        except BaseException as failure:
            self._end(failure)
            raise
        else:
            self._end(error)
        finally:
            if self._periodic is not None:
                self._periodic.close()

    def _end(self, error: BaseException | None) -> None:
        protection, well = self._protection, _went_well(error)
        if protection is None:
            if self._begun and self._rank == 0:
                job.forget(self._directory, self._incarnation, self._files)
            return
        release = protection.release
        interrupted = isinstance(error, TrainingInterrupted) and release is not None
        if well:
            release = protection.finished()
        elif error is not None and not interrupted:
            release = protection.raised(error)
            error.add_note(whereabouts(release))
        protection.close(orderly=release is None)
        if release is None or not (well or interrupted):
            return
        if release.cause is FaultKind.REQUESTED:
            raise SystemExit(0)  # a launcher is not to start the job again
        if well:
            raise interrupted_by(release)

    # -- the beginning --------------------------------------------------------------------------------

    def _begin_if_need_be(self) -> None:
        if not self._begun:
            self._begin(resuming=False, allow_fresh=False)

    def _begin(self, *, resuming: bool, allow_fresh: bool) -> None:
        facts = self._agree(resuming=resuming, allow_fresh=allow_fresh)
        if facts.checkpoint is not None:
            self.objects = fill(
                self._tensors, Path(facts.checkpoint), self._holder, key=self._key, nothing_else=self._whole
            )
        self._begun = True
        self._step = facts.step
        self._clock.reset(facts.step)
        self._records = Records(facts.step)
        if self._config is not None and self._rank == 0:
            self._periodic = self._periodically(self._config, facts)
        if self._address is not None:
            self._protection = self._protect(self._address, facts)
            self._protection.start()

    def _agree(self, *, resuming: bool, allow_fresh: bool) -> job.JobFacts:
        """Rank 0 finds out, and tells the others."""
        directory, incarnation = self._directory, self._incarnation
        if self._rank != 0:
            facts = job.learn(directory, incarnation, timeout_s=self._options.register_timeout_s)
            if facts.world_size != self._world_size:
                raise ConfigError(f"world_size: rank 0 has {facts.world_size}, this rank {self._world_size}")
            if facts.checkpoint is not None and not resuming:
                raise ConfigError("resume: rank 0 called it, so every rank must, before anything else")
            return facts
        arguments = (directory, self._prefix, incarnation, self._world_size, self._files)
        Workspace(directory, self._files).prepare()
        if resuming:
            facts = series_choice.resumed(*arguments, key=self._key, allow_fresh=allow_fresh)
        else:
            facts = series_choice.fresh(*arguments)
        if self._address is not None:
            job_token(directory, os.environ, create=True)  # before the others look for it
        if self._world_size > 1:
            job.announce(directory, incarnation, facts, self._files)
        return facts

    def _periodically(self, config: CheckpointConfig, facts: job.JobFacts) -> Periodic:
        if config.async_save:
            raise NotSupportedError("config: async_save is not available for arrays; use async_save=False")
        return Periodic(
            facts.series.series(self._directory, self._files),
            config.save_policy,
            config.keep_policy,
            key=self._key,
            start=facts.step,
            world_size=self._world_size,
        )

    def _protect(self, address: Address, facts: job.JobFacts) -> Protection:
        settings = Settings(
            address=address,
            token=job_token(self._directory, os.environ, create=False),
            incarnation=self._incarnation,
            rank=self._rank,
            world_size=self._world_size,
            directory=self._directory,
            series=facts.series,
            key=self._key,
            options=self._options,
            stall=self._stall,
            resume_command=shlex.join(sys.orig_argv),
        )
        component = LiveComponent("arrays", self._clock, lambda: self._tensors)
        return Protection(settings, (component,), self._records)

    # -- content --------------------------------------------------------------------------------------

    @property
    def _holder(self) -> str:
        return EVERYWHERE if self._whole else self._replicas or f"rank {self._rank}"

    def _save(self, kind: Kind) -> Path:
        series_of = self._periodic
        if series_of is None:
            raise NotSupportedError("save: needs a config, which says what to keep")
        last = self._records.last
        objects = last.objects if last is not None else described(self._holder, self.objects)
        content = Content(tensors=self._tensors, objects=dict(objects))
        with self._protection.pause() if self._protection is not None else nullcontext():
            return series_of.save(content, self._step, kind)


def _tensors(arrays: Mapping[str, NDArray[np.generic]], scope: str) -> dict[str, HostTensor]:
    """The arrays as tensors; `scope` begins their names where other ranks have others."""
    for name, array in arrays.items():
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise ConfigError(f"arrays: wanted NumPy arrays by name, got {type(array).__name__} at {name!r}")
        if not array.flags.writeable or not array.dtype.isnative:
            raise ConfigError(f"arrays[{name!r}]: wanted a writable array in native byte order")
    if not arrays:
        raise ConfigError("arrays: wanted at least one")
    return {scope + name: HostTensor.of(array, name=name) for name, array in arrays.items()}


def _went_well(error: BaseException | None) -> bool:
    return error is None or (isinstance(error, SystemExit) and not error.code)


def _warn(text: str) -> None:
    warnings.warn(text, SwansongWarning, stacklevel=3)
