"""A training loop's run from its beginning to its end: what is the same whatever it trains with.

An adapter tells what the loop does (where it begins, boundaries, how it ends) and shows what it holds; a
session agrees with the other ranks, records, saves by policy, and stands by the protection. For the thread
that trains.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from swansong.config import CheckpointConfig
from swansong.engine.address import Address
from swansong.engine.clock import Gate, interrupted_by
from swansong.engine.tls import client_tls
from swansong.engine.token import job_token
from swansong.errors import ConfigError, NotSupportedError, SwansongWarning, TrainingInterrupted
from swansong.persist import former, job
from swansong.persist.agreement import Start, agree, agree_on
from swansong.persist.job import JobFacts
from swansong.persist.periodic import Periodic
from swansong.persist.protection import Protection, Settings, whereabouts
from swansong.persist.rank import LiveComponent
from swansong.persist.records import RecordPlaces, Records
from swansong.persist.saver import OnError
from swansong.policy.checks import whole_number
from swansong.protocol.messages import FaultKind
from swansong.store.checkpoint import Content, Kind
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.latest import Examine
from swansong.store.verify import usable
from swansong.ttp_options import TTPOptions

Cells = Mapping[str, memoryview]
"""Component key -> where its clock is to live, so that it outlives the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a user wants for a loop. Raises ConfigError for a rank that is none of the world's."""

    directory: Path
    """Of the checkpoints, absolute."""
    prefix: str
    rank: int
    world_size: int
    incarnation: bytes
    address: Address | None
    """Of the controller; None: periodic checkpoints only."""
    config: CheckpointConfig | None
    """None: no periodic checkpoints."""
    key: Key | None
    options: TTPOptions
    on_error: OnError = "raise"
    """What becomes of a periodic save that fails."""

    def __post_init__(self) -> None:
        size = whole_number("world_size", self.world_size)
        wanted = f"0 to {size - 1}"
        if whole_number("rank", self.rank, least=0, wanted=wanted) >= size:
            raise ConfigError(f"rank: wanted {wanted}, got {self.rank}")

    @property
    def controlled(self) -> bool:
        """True if there is, or will be, a controller."""
        return self.address is not None and self.options.enabled


class Session:
    """One run of one loop."""

    def __init__(self, plan: Plan, content: Callable[[], Content]) -> None:
        """`content` shows what a periodic checkpoint of this moment consists of."""
        self.plan = plan
        self.step = 0
        """Steps completed since the start of training."""
        self._content = content
        self._files = Files()
        self._facts: JobFacts | None = None
        self._records = Records(0)
        self._periodic: Periodic | None = None
        self._protection: Protection | None = None

    # -- the beginning --------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """True once it is known where the run begins."""
        return self._facts is not None

    def agree(self, *, resuming: bool, allow_fresh: bool = False, examine: Examine = usable) -> JobFacts:
        """Find out, with the other ranks, where the run begins. Raises as `agreement.agree` does."""
        start = replace(self._start, examine=examine)
        return agree(start, self._files, resuming=resuming, allow_fresh=allow_fresh)

    def agree_on(self, find: Callable[[], JobFacts]) -> JobFacts:
        """The same, where `find` tells it to rank 0. Raises as `agreement.agree_on` does."""
        return agree_on(self._start, self._files, find)

    @property
    def _start(self) -> Start:
        plan = self.plan
        return Start(
            directory=plan.directory,
            prefix=plan.prefix,
            incarnation=plan.incarnation,
            rank=plan.rank,
            world_size=plan.world_size,
            controlled=plan.controlled,
            key=plan.key,
            crash_loop_limit=plan.options.crash_loop_limit or 0,
            patience_s=plan.options.protocol().register_timeout_s,
            await_former=self._await_former,
        )

    def _await_former(self) -> None:
        plan, options = self.plan, self.plan.options.protocol()
        try:
            token = job_token(plan.directory, os.environ, create=False)
        except ConfigError:
            return  # there was no earlier start
        tls = client_tls(plan.options.ssl_context)
        patience_s = options.commit_timeout_s + (options.budget_s or options.needed_timeout_s)
        if plan.address is not None and not former.outlasted(
            plan.address, token, plan.incarnation, tls, timeout_s=patience_s
        ):
            warn(
                f"the controller of an earlier start still serves at {plan.address} after {patience_s:g} s; "
                "what it may yet save will not be resumed from"
            )

    def begin(
        self, facts: JobFacts, keys: Iterable[str], components: Callable[[Cells], tuple[LiveComponent, ...]]
    ) -> None:
        """Training begins at what `facts` say, which is loaded by now.

        `keys` are those of the components that this rank holds; `components` makes them.
        """
        plan = self.plan
        self._facts, self.step = facts, facts.step
        if plan.config is not None and plan.rank == 0:
            self._periodic = Periodic(
                facts.series.series(plan.directory, self._files),
                plan.config.save_policy,
                plan.config.keep_policy,
                key=plan.key,
                start=facts.step,
                world_size=plan.world_size,
                background=plan.config.background,
                on_error=plan.on_error,
            )
        if plan.address is None or not plan.controlled:
            components({})
            self._records = Records(facts.step)
            return
        settings = self._settings(plan.address, facts)
        recorder = settings.records.create(plan.rank, list(keys), warn)
        cells = {} if recorder is None else {key: recorder.cells(key) for key in recorder.whose.keys}
        self._records = Records(facts.step, recorder)
        self._protection = Protection(settings, components(cells), self._records, recorder)
        self._protection.start()

    def _settings(self, address: Address, facts: JobFacts) -> Settings:
        plan = self.plan
        return Settings(
            address=address,
            token=job_token(plan.directory, os.environ, create=False),
            incarnation=plan.incarnation,
            rank=plan.rank,
            world_size=plan.world_size,
            directory=plan.directory,
            series=facts.series,
            key=plan.key,
            options=plan.options.protocol(),
            stall=plan.options.stall,
            resume_command=facts.resume_command,
            records=RecordPlaces.of(
                plan.options.recorder, plan.directory, facts.series.name, plan.incarnation
            ),
            tls=plan.options.ssl_context,
        )

    # -- the loop -------------------------------------------------------------------------------------

    @property
    def gate(self) -> Gate | None:
        """What updates pass; None without protection."""
        return self._protection.gate if self._protection is not None else None

    @property
    def protected(self) -> bool:
        """True if the state would be saved if something went wrong now; soon after all ranks have begun."""
        return self._protection is not None and self._protection.protected

    def boundary(self, payload: bytes | None, *, due: bool | None = None, steps: int = 1) -> None:
        """A step is complete (or several), and `payload` is its packed boundary state. Saves if that is due.

        None: what was recorded provisionally still holds.
        `due` says so where ranks must agree on it; None: by the policy. Raises TrainingInterrupted once the
        job is to end, RecordTooLargeError, SaveError.
        """
        self.step += steps
        protection = self._protection
        if protection is not None:
            if payload is None:
                self._records.confirm()
            else:
                self._records.add(self.step, payload)
            protection.attend()
        if self._periodic is not None:
            self._periodic.poll()
            if self._periodic.due(self.step) if due is None else due:
                self._save(self._periodic, "periodic")
        if protection is not None:
            protection.watchdog.note_step(time.monotonic())

    @property
    def unsaved(self) -> bool:
        """True on rank 0 if the policy wants the present step saved should training end here."""
        return self._periodic is not None and self._periodic.missing_at_end(self.step)

    def provisional(self, payload: bytes) -> None:
        """What the next boundary will say of this rank, packed, if all goes well."""
        if self._protection is not None:
            self._records.add_provisional(self.step + 1, payload)

    def save(self) -> Path | None:
        """Save now, between steps, durably; None on ranks other than 0. Raises SaveError."""
        if self.plan.rank != 0:
            return None
        if self._periodic is None:
            raise NotSupportedError("save: needs a config, which says what to keep")
        self._save(self._periodic, "requested")
        return self._periodic.wait()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around work that is no step, such as evaluation: no lack of progress in there is a stall."""
        return self._protection.watchdog.phase(name) if self._protection is not None else nullcontext()

    def persist_and_stop(self) -> None:
        """Have the state of all ranks saved and the job ended, with exit code 0.

        Raises TrainingInterrupted, here and on the other ranks.
        """
        if self._protection is None:
            raise NotSupportedError("persist_and_stop: needs a controller (ttp=); save() saves without")
        release = self._protection.stop("requested by the training loop")
        if release is not None:
            raise interrupted_by(release)
        raise TrainingInterrupted("training ends, nothing was saved: the processor's thread has failed")

    def _save(self, periodic: Periodic, kind: Kind) -> None:
        with self._protection.pause() if self._protection is not None else nullcontext():
            periodic.save(self._content, self.step, kind)

    # -- the end --------------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """Training has ended, with an exception or without: see to the last checkpoint, and to the others.

        To be called once, from `__exit__`. Raises what makes a good end a bad one: SaveError,
        TrainingInterrupted; SystemExit(0) after a stop that was asked for, so that a launcher does not start
        the job again.
        """
        try:
            if went_well(error) and self._periodic is not None and self.unsaved:
                self._save(self._periodic, "final")
                self._periodic.wait()
        except BaseException as failure:
            self._part(failure)
            raise
        else:
            self._part(error)
        finally:
            if self._periodic is not None:
                self._periodic.close()

    def _part(self, error: BaseException | None) -> None:
        protection, well = self._protection, went_well(error)
        if protection is None:
            if self._facts is not None and self.plan.rank == 0:
                job.forget(self.plan.directory, self.plan.incarnation, self._files)
            return
        release = protection.release
        interrupted = isinstance(error, TrainingInterrupted) and release is not None
        if well:
            release = protection.finished()
        elif error is not None and not interrupted:
            release = protection.raised(error)
            error.add_note(whereabouts(release, self.plan.directory))
        protection.close(orderly=release is None)
        if release is None or not (well or interrupted):
            return
        if release.cause is FaultKind.REQUESTED:
            raise SystemExit(0)
        if well:
            raise interrupted_by(release)


def went_well(error: BaseException | None) -> bool:
    """True for an end that is no failure."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


def warn(text: str) -> None:
    """Tell whoever wrote the loop."""
    warnings.warn(text, SwansongWarning, stacklevel=3)
