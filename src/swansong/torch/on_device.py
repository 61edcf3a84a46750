"""A run whose parameters are on a CUDA device: its clock, its live state in host memory. Experimental."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from swansong.errors import ClockNotReadableError, ConfigError
from swansong.persist.session import warn
from swansong.state.tree import Flat
from swansong.torch.device_clock import Counters, CudaCounters, DeviceClock
from swansong.torch.device_setup import EXPERIMENTAL, connections_warning, nccl_warning, uses_nccl
from swansong.torch.device_staging import Copies, CudaCopies, DeviceStaging, Flatten

_FIRST_S: Final = 600.0
"""For the copy at the beginning, which shows that copies can be made at all."""
_STATE_MADE: Final = 2
"""Steps after which optimizers have made their state, as a rule."""
_LOOKED_AFTER: Final = 100
"""Steps between looks at whether there is more."""


class OnDevice:
    """Made before a run begins, used by the thread that trains; `show` by any."""

    def __init__(self, device: torch.device, flatten: Flatten) -> None:
        """Warn of what is to be known. `flatten` takes the live state apart."""
        self._device, self._flatten = device, flatten
        self._staging: DeviceStaging | None = None
        self._steps = 0
        for text in warnings_for(os.environ):
            warn(text)

    def begin(self, key: str, step: int, cells: memoryview | None) -> DeviceClock:
        """The clock of the component, whole at `step`; its state is shown from now on.

        Raises ConfigError if there is not enough host memory, ClockNotReadableError if the device hangs.
        """
        return self.begin_with(
            CudaCounters(self._device), CudaCopies(self._device), key=key, step=step, cells=cells
        )

    def begin_with(
        self, counters: Counters, copies: Copies, *, key: str, step: int, cells: memoryview | None
    ) -> DeviceClock:
        """The same, with other ways to the device."""
        clock = DeviceClock(key, counters, step=step, cells=cells)
        clock.await_device()
        self._staging = DeviceStaging(copies, clock, self._flatten)
        self._staging.prepare()
        self._staging.show(within_s=_FIRST_S)
        return clock

    def show(self) -> Flat:
        """The live state, copied. Raises ClockNotReadableError, as `DeviceStaging.show` does."""
        if self._staging is None:
            raise ClockNotReadableError("the run has not begun, or is over")
        return self._staging.show()

    def boundary(self) -> None:
        """A step is complete: what was copied before is out of date, and there may be more state by now."""
        staging = self._staging
        if staging is None:
            return
        self._steps += 1
        if self._steps > _STATE_MADE and self._steps % _LOOKED_AFTER:
            staging.forget()
            return
        try:
            staging.prepare()
        except ConfigError as error:
            warn(f"unprotected: {error}")

    def close(self) -> None:
        """Give memory back."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()


def warnings_for(environment: Mapping[str, str]) -> Iterable[str]:
    """What is to be said before a device is followed."""
    yield EXPERIMENTAL
    if text := connections_warning(environment):
        yield text
    if uses_nccl() and (text := nccl_warning(environment)):
        yield text
