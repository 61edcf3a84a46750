"""TTPOptions: what a user sets is what the engine gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from swansong import TTPOptions
from swansong.engine.recorder import RecorderOptions
from swansong.engine.tls import TlsFiles
from swansong.engine.watchdog import StallOptions
from swansong.errors import ConfigError
from swansong.protocol.options import ProtocolOptions

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


def test_defaults_are_the_engines() -> None:
    options = TTPOptions()
    assert options.protocol({}) == ProtocolOptions()
    assert options.stall == StallOptions()
    assert options.recorder == RecorderOptions(spill=True)


def test_under_torchrun_an_incident_fits_its_patience() -> None:
    assert TTPOptions().protocol(TORCHRUN) == ProtocolOptions.within(25.0)
    assert TTPOptions(budget_s=10.0).protocol(TORCHRUN) == ProtocolOptions.within(10.0)


@pytest.mark.parametrize("spec", dataclasses.fields(ProtocolOptions), ids=lambda spec: spec.name)
def test_every_option_of_the_protocol_can_be_set(spec: dataclasses.Field[Any]) -> None:
    value = {"stall_action": "stop", "attempts": 7}.get(spec.name, 12.5)
    options = TTPOptions(**{spec.name: value})
    for environment in ({}, TORCHRUN):
        assert getattr(options.protocol(environment), spec.name) == value


def test_stalls_and_records_can_be_set() -> None:
    options = TTPOptions(
        stall_timeout_s=5, first_step_timeout_s=None, record_directory="/run", record_bytes=10
    )
    assert options.stall == StallOptions(floor_s=5, first_step_timeout_s=None)
    assert (options.recorder.directory, options.recorder.slot_bytes) == (Path("/run"), 10)


@pytest.mark.parametrize("limit", [None, 0, 5])
def test_crash_loop_limit_may_be_none(limit: int | None) -> None:
    assert TTPOptions(crash_loop_limit=limit).crash_loop_limit == (limit or 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enabled", 1),
        ("budget_s", 0),
        ("gate_lease_s", -1.0),
        ("attempts", True),
        ("stall_action", "ignore"),
        ("stall_timeout_s", "5"),
        ("first_step_timeout_s", float("nan")),
        ("crash_loop_limit", -1),
        ("crash_loop_limit", True),
        ("crash_loop_limit", 1.5),
        ("crash_loop_limit", "3"),
        ("record_bytes", 0),
        ("record_bytes", 1 << 40),
        ("ssl_context", "ca.pem"),
        ("ssl_context", TlsFiles(authority="/there/is/none.pem")),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError):
        TTPOptions(**{name: value})
