"""Where training stands: MindSpore's counters begin anew with every `Model.train`, ours do not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mindspore.dataset as ds
from mindspore import nn

from swansong.errors import ConfigError, SwansongWarning
from swansong.store.catalog import Found

_RESUMPTION: Final = "_swansong_resumption"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a resumed run goes on."""

    step: int
    """Completed updates since the start of training; 0: it begins afresh."""
    initial_epoch: int
    """What `Model.train` must be given as `initial_epoch`."""
    step_in_epoch: int
    """Place of `step` in its epoch, from 1; 0 if training begins afresh."""
    path: Path | None
    """The checkpoint that was loaded; None if training begins afresh."""

    def finished(self, epochs: int) -> bool:
        """True if `epochs` epochs are over already, so that there is nothing left to train."""
        return self.initial_epoch >= epochs


@dataclass(slots=True, kw_only=True)
class Resumption:
    """What `resume` leaves on the train network for the callback that sees the next `Model.train` begin."""

    found: Found
    """The checkpoint that was loaded."""
    directory: Path
    """Where new ones go, as it was given to `resume`, resolved."""
    prefix: str
    step: int
    steps_per_epoch: int
    dataset: Any
    """The data set that was told to skip what was seen, or None."""
    fast_recovery: bool | None
    """What MindSpore's setting was before `resume` changed it; None: it did not."""

    @classmethod
    def pending(cls, network: nn.Cell) -> Resumption | None:
        """The resumption of `network` that no training has taken up yet."""
        found: Resumption | None = getattr(network, _RESUMPTION, None)
        return found

    def attach(self, network: nn.Cell) -> None:
        """Leave it on `network`, in place of an earlier one, and let the data pipeline skip what was seen."""
        earlier = Resumption.pending(network)
        if earlier is not None and earlier is not self:
            earlier.settle(network)
        # Not through Cell's own __setattr__, which examines what it is given for Parameters.
        object.__setattr__(network, _RESUMPTION, self)
        if self.dataset is not None:
            self.dataset.set_init_step(self.step)
        if self.fast_recovery is not None:
            ds.config.set_fast_recovery(False)

    def settle(self, network: nn.Cell) -> None:
        """Undo what was set for the data pipeline, once that exists: a later `train` begins at the start."""
        if Resumption.pending(network) is not self:
            return
        object.__delattr__(network, _RESUMPTION)
        if self.dataset is not None:
            self.dataset.set_init_step(0)
        if self.fast_recovery is not None:
            ds.config.set_fast_recovery(self.fast_recovery)

    def check(self, params: Any) -> None:
        """Compare with what `Model.train` was given, at the begin of its first epoch. Raises ConfigError."""
        if self.dataset is not None and params.train_dataset is not self.dataset:
            raise ConfigError(
                "resume was given another data set than train; the one being trained on begins at its start"
            )
        per_epoch = self.steps_per_epoch
        want = self.step // per_epoch + 1
        if params.cur_epoch_num != want:
            raise ConfigError(
                f"resumed at step {self.step}, where epoch {want} goes on ({per_epoch} steps per epoch), but "
                f"training began at epoch {params.cur_epoch_num}; "
                f"pass initial_epoch={want - 1} (point.initial_epoch) to train"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A boundary."""

    step: int
    """Completed updates since the start of training."""
    epoch: int
    """As in names, from 1."""
    step_in_epoch: int
    """As in names, from 1."""


@dataclass(slots=True)
class Counters:
    """Turns MindSpore's counters of one `Model.train` into places. Begins with no offset."""

    step_offset: int = 0
    epoch_offset: int = 0
    last: Place | None = None
    """The boundary reached last."""

    def begin(self, params: Any, resumed: Resumption | None) -> None:
        """Find the offsets, at the begin of the first epoch of a `Model.train`.

        MindSpore counts steps from 0 each time. `initial_epoch` says how many epochs came before; without
        it, a callback that has seen the network trained before counts on from there.
        """
        self.step_offset = self.epoch_offset = 0
        before = params.cur_epoch_num - 1
        if resumed is not None:
            self.last = None
        elif before > 0:
            self.step_offset = before * steps_per_epoch(params) - params.cur_step_num
        elif self.last is not None:
            self.step_offset = self.last.step - params.cur_step_num
            self.epoch_offset = self.last.epoch

    def place(self, params: Any) -> Place:
        """The boundary after MindSpore's `cur_step_num` steps."""
        step_in_epoch = (params.cur_step_num - 1) % params.batch_num + 1
        return Place(
            step=int(params.cur_step_num) + self.step_offset,
            epoch=int(params.cur_epoch_num) + self.epoch_offset,
            step_in_epoch=int(step_in_epoch),
        )

    @property
    def restarted(self) -> bool:
        """True if training began again at epoch 1 on a network trained before; that cannot be resumed."""
        return self.epoch_offset > 0


def warn_of_skipping(params: Any) -> None:
    """Warn if the data set begins late, although nothing was resumed for the network in training."""
    dataset = params.get("train_dataset")
    skipped = int(dataset.get_init_step()) if dataset is not None else 0
    if skipped:
        warnings.warn(
            f"the data set leaves out its first {skipped} batches, but this Model was not resumed: "
            "checkpoints will count steps as if it began at the start; resume the Model that is trained",
            SwansongWarning,
            stacklevel=5,
        )


def steps_per_epoch(params: Any) -> int:
    """Steps in an epoch of this `Model.train`: of the data set, or of a sink where data really are sunk.

    On the CPU `dataset_sink_mode` is without effect, but `batch_num` is the sink size all the same.
    """
    if params.get("dataset_sink_mode") or params.get("train_dataset") is None:
        return int(params.batch_num)
    return int(params.train_dataset.get_dataset_size())
