"""TTPOptions: everything about try to persist that a user may set, in one frozen value."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal

from swansong.engine.recorder import RecorderOptions
from swansong.engine.tls import TlsFiles, client_tls
from swansong.engine.watchdog import StallOptions
from swansong.errors import ConfigError
from swansong.policy.checks import whole_number
from swansong.protocol.options import ProtocolOptions

LAUNCHER_BUDGET_S: Final = 25.0
"""Seconds that an incident may take under torchrun, which kills a job's processes 30 s after it said so."""
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TTPOptions:
    """How try to persist behaves. All times are in seconds; None stands for the default that is named.

    Where there is a budget, defaults are shorter, so that an incident fits: see `ProtocolOptions.within`.
    Raises ConfigError for what cannot be.
    """

    enabled: bool = True
    """False: periodic checkpoints only; nothing is started, nothing listens."""
    budget_s: float | None = None
    """What an incident may take as a whole. None: 25 under torchrun, else as long as there is progress."""
    register_timeout_s: float | None = None
    """How long all ranks may take to register; then protection is off, and said so. 600."""
    reregister_timeout_s: float | None = None
    """How long ranks may take to find a controller that was started anew. 10; with a budget 5 at most."""
    reconnect_s: float | None = None
    """How long a rank whose connection ended may take to come back before it counts as lost. 2."""
    freeze_timeout_s: float | None = None
    """How long ranks may take to report after a freeze; who is needed is waited for. 5; with a budget 1."""
    settle_timeout_s: float | None = None
    """How much longer ranks inside an update may take to leave it. 5; with a budget 1."""
    needed_timeout_s: float | None = None
    """How long a rank is waited for without which nothing can be saved. 60; with a budget half of it."""
    idle_timeout_s: float | None = None
    """How long a saver may show no progress before another takes its place. 30; with a budget 5."""
    commit_timeout_s: float | None = None
    """How long the commit may take. 60."""
    commit_reserve_s: float | None = None
    """What of a budget is kept for the commit. 3."""
    exit_grace_s: float | None = None
    """How long ranks may take to end after an incident before they are ended. 5; with a budget 1."""
    goodbye_timeout_s: float | None = None
    """How long a rank that has finished waits for the others, which may need its state. 60."""
    lost_controller_s: float | None = None
    """How long a rank looks for a controller that is gone before it says that protection is off. 60."""
    gate_lease_s: float | None = None
    """How long training stands still without a word from any controller. 30."""
    attempts: int | None = None
    """How often savers are chosen anew from fresh reports before an incident is given up. 3."""
    stall_timeout_s: float | None = None
    """No shorter time without a step is a stall; nor is 5 times the slowest of the last 100 steps. 60."""
    first_step_timeout_s: float | None = 1800.0
    """How long the first step may take, in which frameworks compile; None: as long as it likes."""
    stall_action: Literal["save", "stop"] = "save"
    """After a stall: save, and go on if it can; or save and end the job."""
    crash_loop_limit: int | None = 3
    """`resume` refuses after so many failures in a row, all the same at the same step. 0 or None: never."""
    record_directory: str | Path = "/dev/shm"
    """Where flight recorders lie: a directory in a memory file system."""
    record_bytes: int = 1024 * 1024
    """The most bytes of boundary state that they hold; each rank takes four times as much memory."""
    record_spill: bool = True
    """True: larger boundary state stays in the process's memory, and is lost with it. False: an error."""
    ssl_context: TlsFiles | ssl.SSLContext | None = None
    """TLS 1.3 under the connections to the controller. With TlsFiles that have a certificate, ranks can start
    the controller; with a context, which cannot be passed on, it must be there (`swansong controller`)."""

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ConfigError(f"enabled: wanted True or False, got {self.enabled!r}")
        limit = 0 if self.crash_loop_limit is None else self.crash_loop_limit
        wanted = "None or an int, 0 or more"
        object.__setattr__(
            self, "crash_loop_limit", whole_number("crash_loop_limit", limit, least=0, wanted=wanted)
        )
        self.protocol({})
        self.stall, self.recorder  # noqa: B018 - they check what they are made of
        client_tls(self.ssl_context)

    def protocol(self, environment: Mapping[str, str] = os.environ) -> ProtocolOptions:
        """The protocol's timeouts, for a process with that environment."""
        budget_s = self.budget_s
        if budget_s is None and _TORCHRUN in environment:
            budget_s = LAUNCHER_BUDGET_S
        base = ProtocolOptions() if budget_s is None else ProtocolOptions.within(budget_s)
        given = {spec.name: getattr(self, spec.name) for spec in fields(ProtocolOptions)}
        values = {name: getattr(base, name) if value is None else value for name, value in given.items()}
        return ProtocolOptions(**(values | {"budget_s": budget_s}))

    @property
    def stall(self) -> StallOptions:
        """When a lack of progress is a stall."""
        floor_s = StallOptions().floor_s if self.stall_timeout_s is None else self.stall_timeout_s
        return StallOptions(floor_s=floor_s, first_step_timeout_s=self.first_step_timeout_s)

    @property
    def recorder(self) -> RecorderOptions:
        """Where boundary state is recorded."""
        return RecorderOptions(
            directory=Path(self.record_directory), slot_bytes=self.record_bytes, spill=self.record_spill
        )
