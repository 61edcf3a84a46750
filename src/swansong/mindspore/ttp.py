"""MindIOTTPAdapter: what a rank's death or exception leaves is saved by those that remain."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mindspore import nn
from mindspore.train import Callback

from swansong.engine.address import resolve
from swansong.errors import ConfigError
from swansong.mindspore.backup import load_with_backup
from swansong.mindspore.destination import checked_directory
from swansong.mindspore.loading import checked_key, checked_mode
from swansong.mindspore.position import Counters, Resumption
from swansong.mindspore.ranks import Ranks
from swansong.mindspore.ttp_run import Installed, ProtectedRun
from swansong.mindspore.ttp_start import SERIES, Begin, shared_incarnation
from swansong.persist.session import Plan
from swansong.policy.checks import shown
from swansong.ttp_options import TTPOptions

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class MindIOTTPAdapter(Callback):  # type: ignore[misc]
    """Saves the state of a training job when something goes wrong, at the step that was reached.

        adapter = MindIOTTPAdapter("127.0.0.1", 2000, "faults")
        model.train(epochs, dataset, callbacks=[ModelCheckpoint(...), adapter])

    A process that is killed, an exception, SIGTERM, a lack of progress, or an operator's `swansong persist`:
    the ranks stop at a step that all agree on, one of those that hold the state writes it to
    `{ckpt_save_path}/ttp_saved_checkpoints-{epoch}_{step_in_epoch}/rank_{r}/iteration-{epoch}_{step_in_epoch}
    .ckpt`, which `mindspore.load_checkpoint` reads, and a manifest there makes it a checkpoint. `resume` with
    `ttp_directory` finds it.

    Rank 0's process starts the controller on `controller_ip:controller_port`. Each rank needs this callback,
    and all of them the same `ckpt_save_path`, which they must share. Its checkpoints belong to the series of
    the job's first ModelCheckpoint; without one, to series "ttp". `enc_key` and `enc_mode` encrypt them, as
    in CheckpointConfig.

    Ranks in data-parallel mode hold replicas: any of them can save for all. In other parallel modes each
    saves its own part, and one that is killed takes it along; that is said at the begin.

    The exception that ends training passes on, with a note that says where the state is. Raises ConfigError
    for a wrong argument; what keeps it from starting is raised when training begins.
    """

    def __init__(
        self,
        controller_ip: str,
        controller_port: int,
        ckpt_save_path: str | Path,
        *,
        options: TTPOptions | None = None,
        enc_key: bytes | None = None,
        enc_mode: str = "AES-GCM",
    ) -> None:
        super().__init__()
        if options is not None and not isinstance(options, TTPOptions):
            raise ConfigError(f"options: wanted TTPOptions or None, got {shown(options)}")
        self._options = options or TTPOptions()
        self._address = resolve(controller_ip, controller_port)
        if controller_port == 0:
            raise ConfigError("controller port: wanted 1 to 65535, got 0")
        self._directory = checked_directory(ckpt_save_path)
        self._key, self._mode = checked_key(enc_key), checked_mode(enc_mode)
        self._network: weakref.ref[nn.Cell] | None = None
        self._counters = Counters()
        self._depth = 0
        self._installed: Installed | None = None
        self._resumed: Resumption | None = None
        self._run: ProtectedRun | None = None
        self._sees_begins = False
        self._phases = ExitStack()

    # -- what MindSpore calls -------------------------------------------------------------------------

    def __enter__(self) -> MindIOTTPAdapter:
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        """Training has ended; with an exception, the state is saved before that passes on."""
        self._depth -= 1
        if self._depth == 0:
            self._leave(exception[1])

    def on_train_begin(self, run_context: Any) -> None:
        """Put the clock into the optimizers, before the network is compiled."""
        if self._options.enabled:
            self._prepare(run_context.original_args())

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """At the first: it is known by now where training begins, so this rank registers."""
        params = run_context.original_args()
        if self._options.enabled and self._run is None:
            self._register(params, done=int(params.cur_step_num))

    def on_train_step_begin(self, run_context: Any) -> None:
        """Pass the gate: wait while a fault is dealt with. Raises TrainingInterrupted if the job ends."""
        if not self._options.enabled:
            return
        params = run_context.original_args()
        run = self._run or self._register(params, done=int(params.cur_step_num) - 1)
        self._sees_begins = True
        if self._resumed is not None:
            self._resumed.settle(params.train_network)
        run.dispatch(self._counters.place(params).step - run.step)

    def on_train_step_end(self, run_context: Any) -> None:
        """Account for a step. Works also if it is all that is called, by a loop of one's own.

        Raises TrainingInterrupted once the job is to end.
        """
        if not self._options.enabled:
            return
        params = run_context.original_args()
        run = self._run or self._register(params, done=int(params.cur_step_num) - 1)
        place = self._counters.last = self._counters.place(params)
        run.boundary(place.step)
        if not self._sees_begins:
            run.dispatch(1)  # nobody will say when the next one begins

    def on_eval_begin(self, run_context: Any) -> None:
        """An evaluation during training is no stall."""
        if self._run is not None:
            self._phases.enter_context(self._run.phase("evaluate"))

    def on_eval_end(self, run_context: Any) -> None:
        """It is over."""
        self._phases.close()

    # -- what users call ------------------------------------------------------------------------------

    def wrapper_ttp_persist(self, func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Wrap a function that trains, so that its exceptions are dealt with, also those outside of
        `Model.train`. With `TTPOptions(enabled=False)`, `func` itself.
        """
        if not self._options.enabled:
            return func

        @functools.wraps(func)
        def protected(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                result = func(*args, **kwargs)
            except BaseException as error:
                self._leave(error)
                raise
            self._leave(None)
            return result

        return protected

    def persist_and_stop(self) -> None:
        """Have the state of all ranks saved and the job ended, with exit code 0.

        Between steps, in the thread that trains. Raises TrainingInterrupted, here and on the other ranks.
        """
        if self._run is None:
            raise ConfigError("persist_and_stop: training has not begun")
        self._run.persist_and_stop()

    @property
    def protected(self) -> bool:
        """True if the state would be saved if something went wrong now; soon after all ranks have begun."""
        return self._run is not None and self._run.protected

    @staticmethod
    def load_checkpoint_with_backup(
        ckpt_file_path: str | Path,
        strategy_file_path: str | Path | None,
        net: nn.Cell,
        *,
        dec_key: bytes | None = None,
        dec_mode: str = "AES-GCM",
    ) -> dict[str, Any]:
        """Load this rank's file into `net` or, if it is missing or damaged, that of a rank with a replica.

        The replica's file is `ckpt_file_path` with its number instead of this rank's in `rank_{r}`. Who has
        replicas is told by the strategy file of this rank; `strategy_file_path=None`: all ranks of the job.
        All ranks must call it, after `mindspore.communication.init`; they end up at one step, or it fails.

        Returns the weights by name. Raises ValueError that says what was tried if none loads.
        """
        return load_with_backup(ckpt_file_path, strategy_file_path, net, dec_key=dec_key, dec_mode=dec_mode)

    # -- a run ----------------------------------------------------------------------------------------

    def _prepare(self, params: Any) -> Installed:
        network = params.train_network
        self._installed = Installed(network)
        self._resumed = resumed = Resumption.pending(network)
        if resumed is not None:
            params.cur_step_num = resumed.step
        if resumed is not None or self._network is None or self._network() is not network:
            self._network = weakref.ref(network)
            self._counters = Counters()
        self._sees_begins = False
        return self._installed

    def _register(self, params: Any, *, done: int) -> ProtectedRun:
        """Begin to be protected, with all other ranks; `done` is MindSpore's count of completed steps."""
        installed = self._installed or self._prepare(params)
        if self._resumed is not None:
            self._resumed.check(params)
        self._counters.begin(params, self._resumed)
        ranks = Ranks.current()
        plan = Plan(
            directory=self._directory,
            prefix=SERIES,
            rank=ranks.rank,
            world_size=ranks.size,
            incarnation=shared_incarnation(ranks),
            address=self._address,
            config=None,
            key=self._key,
            options=self._options,
        )
        begin = Begin.of(params, self._counters, self._resumed, done=done)
        self._run = ProtectedRun(plan, self._address, params, installed, begin, self._mode)
        return self._run

    def _leave(self, error: BaseException | None) -> None:
        """Training has ended; what comes later is another run."""
        run, self._run, self._installed = self._run, None, None
        try:
            self._phases.close()
        finally:
            if run is not None:
                run.end(error)
