"""ModelCheckpoint: MindSpore's callback, saving durably."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from mindspore import nn
from mindspore.train import Callback

from swansong import config as framework_free
from swansong.errors import ConfigError, SwansongWarning
from swansong.mindspore.config import CheckpointConfig
from swansong.mindspore.content import RunRecord, appended, content_of, forgotten, irreproducible
from swansong.mindspore.destination import Destination, Directory, Prefix
from swansong.mindspore.interruption import UpdateWatch, interrupted_place
from swansong.mindspore.parameters import is_split
from swansong.mindspore.position import Counters, Place, Resumption, steps_per_epoch, warn_of_skipping
from swansong.mindspore.ranks import Ranks, Writers, sharing
from swansong.mindspore.seeds import Seeds, gathered_seeds
from swansong.persist.saver import OnError, Request, Saver, write_beside
from swansong.policy.checks import shown
from swansong.policy.save import Never, SavePoint
from swansong.store.checkpoint import Kind, Point, SaveOptions
from swansong.store.clock import Clock, SystemClock
from swansong.store.crypt import Key
from swansong.store.files import Files
from swansong.store.series import Series


class ModelCheckpoint(Callback):  # type: ignore[misc]
    """Saves checkpoints of `Model.train` or `Model.fit` as its configuration says.

    Names, the suffix in an occupied directory, the forced save at the end and `{prefix}-graph.meta` in graph
    mode are MindSpore's. A save that returned survives a power cut, and the one before it goes only then.
    A callback can be used again: it counts on if the same network is trained further, and begins anew with
    another one. After `resume` it continues the series that was resumed.

    Data-parallel ranks that share the directory are one series, which the lowest of them writes.

    `prefix` is a str, or a function of the callback parameters that returns one (then names are
    `{prefix}.ckpt`). `directory` is a path, a function that returns one, or None: the working directory at
    construction. `on_error="raise"` ends training when a save fails, at that step, or at the next if it ran
    in the background; "warn" warns (SwansongWarning) and tries again at the next due step.

    Raises ConfigError for a wrong argument, NotADirectoryError.
    """

    clock: ClassVar[Clock] = SystemClock()
    """Tells the time to a policy by seconds."""

    def __init__(
        self,
        prefix: Prefix = "CKP",
        directory: Directory = None,
        config: framework_free.CheckpointConfig | None = None,
        *,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__()
        self._config = _checked_config(config)
        if on_error not in get_args(OnError):
            raise ConfigError(f"on_error: wanted 'raise' or 'warn', got {shown(on_error)}")
        self._files = Files()
        self._destination = Destination(prefix, directory, self._files)
        self._saver = Saver(
            self._files,
            self._config.keep_policy,
            _options(self._config),
            background=self._config.background,
            on_error=on_error,
        )
        self._counters = Counters()
        self._watch = UpdateWatch()
        self._network: weakref.ref[nn.Cell] | None = None
        self._asked_s = self.clock.monotonic()
        self._asked_step = self._start_step = 0
        self._depth = 0
        self._warned_of_seeds = False
        self._forget_run()

    # -- what MindSpore calls -------------------------------------------------------------------------

    def __enter__(self) -> ModelCheckpoint:
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        """End with training, however it ends; with `exception_save`, save what an exception left."""
        self._depth -= 1
        if self._depth > 0 or self._params is None:
            return  # an evaluation during training, or one by itself
        try:
            if exception[1] is not None:
                self._on_exception(exception[1])
        finally:
            self._forget_run()
            self._saver.close()

    def on_train_begin(self, run_context: Any) -> None:
        """Find out who writes. Ranks agree on it here, so each must have this callback."""
        self._begin_run(run_context.original_args())

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """At the first: MindSpore says at which epoch it begins."""
        self._begin_counting(run_context.original_args())

    def on_train_step_begin(self, run_context: Any) -> None:
        """At the first: the data pipeline exists, and what `resume` set for it can be undone."""
        network = self._network() if self._network is not None else None
        if self._resumed is not None and network is not None:
            self._resumed.settle(network)  # not the callback parameters' network: sinking wraps that

    def step_end(self, run_context: Any) -> None:
        """Save if it is due. Raises SaveError, also for a save in the background that has failed since."""
        params = run_context.original_args()
        self._begin_counting(params)
        self._saver.poll()
        self._destination.update(params)
        self._save_graph(params)
        place = self._counters.last = self._counters.place(params)
        if self._config.exception_save:
            self._watch.boundary(params)
        now = self.clock.monotonic()
        at = SavePoint(
            step=place.step, last_saved_step=self._asked_step, now_s=now, last_saved_s=self._asked_s
        )
        if place.step != self._asked_step and self._config.save_policy.wants(at):
            self._asked_step, self._asked_s = place.step, now
            self._save(place, "periodic")

    def end(self, run_context: Any) -> None:
        """Save the last step unless it is saved already, and wait until everything is on disk."""
        params = run_context.original_args()
        self._begin_counting(params)
        self._saver.wait()
        place = self._counters.place(params)
        if isinstance(self._config.save_policy, Never) or place.step in (self._saver.step, self._start_step):
            return
        self._asked_step = place.step
        self._save(place, "final")
        self._saver.wait()

    def on_eval_step_end(self, run_context: Any) -> None:
        """Evaluation saves nothing."""

    def on_eval_end(self, run_context: Any) -> None:
        """Evaluation saves nothing."""

    @property
    def latest_ckpt_file_name(self) -> str:
        """Path of the newest checkpoint that this callback has saved, durably; "" before the first."""
        return str(self._saver.latest or "")

    def series(self) -> Series | None:
        """The series of the run that has begun, on the rank that writes; None if functions name its files.

        Raises SaveError.
        """
        return self._destination.series() if self._destination.fixed else None

    # -- a run ----------------------------------------------------------------------------------------

    def _forget_run(self) -> None:
        """Let go of everything that belongs to one call of `Model.train`."""
        self._params: Any = None
        self._counting = False
        self._resumed: Resumption | None = None
        self._writers: Writers | None = None
        self._seeds: tuple[Seeds, ...] = ()
        self._inexact: tuple[Mapping[str, Any], ...] = ()

    def _begin_run(self, params: Any) -> None:
        network = params.train_network
        self._params = params
        self._asked_step = self._start_step = 0
        self._resumed = resumed = Resumption.pending(network)
        self._seeds = gathered_seeds(Ranks.current())
        if self._destination.known:
            self._agree()
        self._saver.step = None
        self._warn_of_what_comes(resumed)
        if resumed is not None:
            params.cur_step_num = resumed.step
        else:
            warn_of_skipping(params)
        if resumed is not None or self._network is None or self._network() is not network:
            self._network = weakref.ref(network)
            self._counters = Counters()
            self._destination.restart(resumed)
            self._graph_saved = False

    def _warn_of_what_comes(self, resumed: Resumption | None) -> None:
        """Say at the begin what could not be mended any more when it is noticed."""
        unset = any(seed is None for seeds in self._seeds for seed in seeds)
        if unset and not self._warned_of_seeds and not isinstance(self._config.save_policy, Never):
            self._warned_of_seeds = True
            warnings.warn(
                "mindspore.set_seed was not called: a run resumed from these checkpoints cannot go on in the "
                "order of the data; call it before network and data set are built",
                SwansongWarning,
                stacklevel=4,
            )
        manifest = resumed.found.manifest if resumed is not None else None
        if manifest is not None and manifest.key is not None and self._config.enc_key is None:
            warnings.warn(
                f"{manifest.name} is encrypted, but this run saves without a key; give enc_key",
                SwansongWarning,
                stacklevel=4,
            )

    def _begin_counting(self, params: Any) -> None:
        """Once per run, as soon as the epoch is known. Also where MindSpore's begin was left out."""
        if self._counting:
            return
        if self._params is None:
            self._begin_run(params)
        else:
            if self._resumed is not None:
                self._resumed.check(params)
            self._counters.begin(params, self._resumed)
            self._asked_step = self._start_step = int(params.cur_step_num) + self._counters.step_offset
            self._watch.boundary(params)
        self._inexact = irreproducible(params.train_network) + forgotten(params.get("list_callback") or ())
        if self._counters.restarted:
            reason = f"training began again at epoch 1 after {self._start_step} steps"
            self._inexact += ({"what": "order of the data", "reason": reason},)
        self._counting = True

    def _agree(self) -> Writers:
        """Find out who writes: once per run, by all ranks at the same place."""
        if self._writers is None:
            self._writers = sharing(Ranks.current(), self._destination.directory, self._files)
            self._writers.check_redundancy(self._config.remove_redundancy)
        return self._writers

    # -- saving ---------------------------------------------------------------------------------------

    def _save(self, place: Place, kind: Kind, inexact: tuple[Mapping[str, Any], ...] = ()) -> None:
        if self._agree().writes:
            self._saver.save(lambda: self._request(self._params, place, kind, inexact))

    def _request(
        self, params: Any, place: Place, kind: Kind, inexact: tuple[Mapping[str, Any], ...]
    ) -> Request:
        writers = self._agree()
        writers.check_split(is_split(params.train_network), self._config.integrated_save)
        on_exception = kind == "exception"
        record = RunRecord(
            seeds=self._seeds,
            steps_per_epoch=steps_per_epoch(params),
            sink=bool(params.get("dataset_sink_mode")),
        )
        return Request(
            series=self._destination.series(),
            name=self._destination.name(place, f".{self._config.format}", on_exception=on_exception),
            content=content_of(
                params.train_network,
                None if on_exception else self._config.saved_network,
                appended(self._config.append_dict, place),
                record,
                self._inexact + inexact,
            ),
            point=Point(
                step=place.step,
                epoch=place.epoch,
                step_in_epoch=place.step_in_epoch,
                world_size=writers.ranks.size,
            ),
            kind=kind,
        )

    def _save_graph(self, params: Any) -> None:
        """Once per run: MindSpore's own description of the graph, which exists in graph mode only."""
        if self._graph_saved or not self._agree().writes:
            return
        self._graph_saved = True
        graph = params.train_network.get_func_graph_proto()
        if graph:
            where = self._destination
            self._saver.guarded(lambda: write_beside(where.series().space, where.graph_name(), graph))

    # -- exceptions -----------------------------------------------------------------------------------

    def _on_exception(self, error: BaseException) -> None:
        """Finish what is under way. The exception goes on to the user; what fails here is noted on it."""
        actions = [self._saver.wait]
        if self._config.exception_save and self._counting:
            actions += [self._save_interrupted, self._saver.wait]
        for action in actions:
            try:
                action()
            except Exception as failure:  # noqa: BLE001 - it must not hide the exception that ends training
                error.add_note(f"swansong: {type(failure).__name__}: {failure}")

    def _save_interrupted(self) -> None:
        place, inexact = interrupted_place(self._watch, self._counters, self._params, self._start_step)
        self._save(place, "exception", inexact)


def _checked_config(config: object) -> framework_free.CheckpointConfig:
    if config is None:
        return CheckpointConfig()
    if not isinstance(config, framework_free.CheckpointConfig):
        hint = "; import it from swansong.mindspore" if type(config).__name__ == "CheckpointConfig" else ""
        raise ConfigError(f"config: wanted a swansong CheckpointConfig or None, got {shown(config)}{hint}")
    return config


def _options(config: framework_free.CheckpointConfig) -> SaveOptions:
    return SaveOptions(
        container="safetensors" if config.format == "safetensors" else "ckpt",
        key=Key(config.enc_key) if config.enc_key is not None else None,
        mode="AES-CBC" if config.enc_mode == "AES-CBC" else "AES-GCM",
        crc=config.crc_check,
    )
