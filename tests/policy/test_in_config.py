"""Policies given to CheckpointConfig by themselves, one's own among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from swansong.config import CheckpointConfig
from swansong.errors import ConfigError
from swansong.policy.keep import Committed, KeepAll, KeepLast, KeepPerMinutes
from swansong.policy.save import EverySeconds, EverySteps, Never, SavePoint


@dataclass(frozen=True)
class OnPrimes:
    def wants(self, at: SavePoint) -> bool:
        return at.step in (2, 3, 5, 7)


@dataclass(frozen=True)
class KeepOdd:
    def doomed(self, committed: list[Committed], newest: str) -> list[str]:
        return [entry.id for entry in committed if entry.seq % 2 == 0 and entry.id != newest]


@pytest.mark.parametrize(
    ("policies", "read"),
    [
        pytest.param({}, (1, None, 5, None), id="defaults"),
        pytest.param({"save": EverySteps(100)}, (100, None, 5, None), id="steps"),
        pytest.param({"save": EverySeconds(0.5)}, (None, 0.5, 5, None), id="half_a_second"),
        pytest.param({"save": Never(), "keep": KeepAll()}, (None, None, None, None), id="never_and_all"),
        pytest.param({"keep": KeepPerMinutes(2.5)}, (1, None, None, 2.5), id="minutes"),
        pytest.param({"save": OnPrimes(), "keep": KeepOdd()}, (None, None, None, None), id="ones_own"),
    ],
)
def test_policies_by_themselves_are_used_and_read_back(policies: dict[str, Any], read: tuple) -> None:
    config = CheckpointConfig.of(**policies, async_save="thread")
    assert tuple(config.get_checkpoint_policy().values()) == (*read, None)
    assert config.save_policy == policies.get("save", EverySteps(1))
    assert config.keep_policy == policies.get("keep", KeepLast(5))
    assert config.async_save == "thread"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"save": 100}, r"^save: wanted a save policy such as EverySteps\(100\), got 100 \(int\)"),
        ({"save": EverySteps}, r"^save: .*EverySteps"),
        ({"save": KeepLast(5)}, r"^save: .*KeepLast"),
        ({"keep": 5}, r"^keep: wanted a keep policy such as KeepLast\(5\), got 5 \(int\)"),
        ({"keep": KeepAll}, r"^keep: .*KeepAll"),
        ({"keep": EverySteps(1)}, r"^keep: .*EverySteps"),
        ({"format": "npz"}, r"^format: "),
    ],
)
def test_what_is_no_policy_is_named(policies: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig.of(**policies)


def test_policies_and_numbers_do_not_mix() -> None:
    with pytest.raises(TypeError, match="save_checkpoint_steps"):
        CheckpointConfig.of(save=EverySteps(3), save_checkpoint_steps=4)


def test_policies_by_themselves_keep_the_adapters_class() -> None:
    class FrameworkConfig(CheckpointConfig):
        network_types = (OnPrimes,)

    config = FrameworkConfig.of(keep=KeepAll(), saved_network=OnPrimes())
    assert type(config) is FrameworkConfig
    assert config.saved_network == OnPrimes()
