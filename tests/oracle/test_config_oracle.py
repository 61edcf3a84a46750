"""MindSpore's own CheckpointConfig, save rule and pruning as judges of ours."""

from __future__ import annotations

import enum
import os
import tempfile
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import nn
from mindspore.train import CheckpointConfig as Theirs
from mindspore.train import ModelCheckpoint
from mindspore.train.callback import _checkpoint as their_module

from swansong.config import CheckpointConfig
from swansong.errors import ConfigError, SwansongWarning
from swansong.policy.keep import Committed
from swansong.policy.save import SavePoint

pytestmark = pytest.mark.mindspore

KEY = bytes(range(32))
NETWORK = nn.Dense(2, 2)
PARAMETER = mindspore.Parameter(mindspore.Tensor([1.0]), name="p")
INTEGERS = (
    "save_checkpoint_steps",
    "save_checkpoint_seconds",
    "keep_checkpoint_max",
    "keep_checkpoint_per_n_minutes",
)
READ = (
    *INTEGERS,
    "integrated_save",
    "async_save",
    "saved_network",
    "append_dict",
    "enc_key",
    "enc_mode",
    "exception_save",
    "crc_check",
    "remove_redundancy",
    "format",
)


class Ours(CheckpointConfig):
    """With what MindSpore adds."""

    network_types = (nn.Cell,)
    append_types = (*CheckpointConfig.append_types, mindspore.Parameter, mindspore.Tensor)


def outcome(factory: Any, arguments: dict[str, Any]) -> Any:
    """All that can be read, with types, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwansongWarning)
        try:
            config = factory(**arguments)
        except (TypeError, ValueError, OverflowError) as error:
            return error
    read = {name: getattr(config, name) for name in READ} | {"policy": config.get_checkpoint_policy()}
    return {name: (type(value), value) for name, value in read.items()}


POLICIES = [
    dict(zip(INTEGERS, numbers, strict=True))
    for numbers in product((None, 0, 1, 16), (None, 0, 100), (None, 0, 1, 5), (None, 0, 2))
]
APPENDED = [
    None,
    [],
    [{}],
    ["epoch_num"],
    ["step_num", "epoch_num"],
    ["step_num", "step_num", {"lr": 0.1, "ok": True, "n": 3, "who": "me"}],
    [{"lr": np.float64(0.1), "p": PARAMETER}, "epoch_num"],
    ["epoch_num", {"epoch_num": 7, "t": PARAMETER}],
]
OPTIONS = [
    {"append_info": info, "async_save": mode, "integrated_save": whole, "saved_network": network}
    for info, mode, whole, network in product(
        APPENDED, (False, True, "thread", "process"), (True, False), (None, NETWORK)
    )
]
CONTENTS = [
    {"enc_key": key, "crc_check": crc, "exception_save": save, "remove_redundancy": lean, "format": form}
    for key, crc, save, lean, form in product(
        (None, KEY), (False, True), (False, True), (False, True), ("ckpt", "safetensors")
    )
    if not (key and crc and form == "ckpt")
]
MODES = [
    {"enc_key": KEY[:size], "enc_mode": mode} for size, mode in product((16, 24, 32), ("AES-GCM", "AES-CBC"))
]
TABLE = [*POLICIES, *OPTIONS, *CONTENTS, *MODES, {}, {"enc_mode": "SM4-CBC"}, {"enc_mode": ""}]


def test_every_combination_reads_as_in_mindspore() -> None:
    assert len(TABLE) > 300
    for arguments in TABLE:
        theirs, ours = outcome(Theirs, arguments), outcome(Ours, arguments)
        if isinstance(theirs, Exception):
            assert isinstance(ours, ConfigError), arguments
            assert isinstance(ours, type(theirs)), arguments
        else:
            assert ours == theirs, arguments


REFUSED = [
    *({name: value} for name in INTEGERS for value in (-1, True, False, 1.0, "5", [1], np.float32(2))),
    *(
        {name: value}
        for name in ("integrated_save", "exception_save", "crc_check")
        for value in (None, 0, "yes")
    ),
    *({"remove_redundancy": value} for value in (None, 0, "yes")),
    *({"async_save": value} for value in (None, 0, 1, "fork", b"thread")),
    *({"saved_network": value} for value in (1, "net", nn.Dense)),
    *({"append_info": value} for value in ((), ("epoch_num",), {"a": 1}, "epoch_num", [1], [None], ["loss"])),
    *({"append_info": [{"a": value}]} for value in (None, [1], np.float32(1), 1j, b"x", NETWORK)),
    *({"append_info": value} for value in ([{1: 1}], [{}, {}])),
    *({"enc_key": value} for value in ("0123456789abcdef", bytearray(16), 16)),
    *({"enc_mode": value} for value in (None, 1)),
    *({"format": value} for value in (None, 1)),
    dict.fromkeys(INTEGERS),
    dict.fromkeys(INTEGERS, 0),
]


@pytest.mark.parametrize("arguments", REFUSED, ids=lambda arguments: str(arguments)[:60])
def test_what_mindspore_refuses_is_refused_with_its_error_class(arguments: dict[str, Any]) -> None:
    theirs, ours = outcome(Theirs, arguments), outcome(Ours, arguments)
    assert isinstance(theirs, Exception)
    assert isinstance(ours, ConfigError)
    assert isinstance(ours, type(theirs))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"enc_key": b""}, id="empty_key"),
        pytest.param({"enc_key": b"12345"}, id="key_of_no_cipher"),
        pytest.param({"enc_key": KEY, "enc_mode": "FOO"}, id="unknown_mode"),
        pytest.param({"enc_key": KEY[:16], "enc_mode": "SM4-CBC"}, id="sm4"),
        pytest.param({"enc_key": KEY, "crc_check": True}, id="key_and_crc_write_an_unreadable_file"),
        pytest.param({"format": "foo"}, id="unknown_format"),
        pytest.param({"append_info": [{"epoch_num": "7"}]}, id="counter_that_is_text"),
        pytest.param({"append_info": [{"g": mindspore.Generator()}]}, id="generator_appended"),
        pytest.param({"bogus": 1}, id="unknown_keyword"),
        pytest.param({"incremental": True}, id="hidden_keyword"),
    ],
)
def test_difference_refused_here_though_mindspore_constructs_it(arguments: dict[str, Any]) -> None:
    assert not isinstance(outcome(Theirs, arguments), Exception)
    assert isinstance(outcome(Ours, arguments), TypeError)


@pytest.mark.parametrize(
    ("arguments", "plain"),
    [
        pytest.param(
            {"save_checkpoint_steps": np.int64(3)}, {"save_checkpoint_steps": 3}, id="numpy_integer"
        ),
        pytest.param({"save_checkpoint_steps": 10**400}, None, id="more_than_a_float_holds"),
        pytest.param({"format": "safetensors", "enc_mode": "AES-CBC"}, None, id="mode_ignored_without_key"),
    ],
)
def test_difference_accepted_here_though_mindspore_refuses_it(
    arguments: dict[str, Any], plain: dict[str, Any] | None
) -> None:
    assert isinstance(outcome(Theirs, arguments), Exception)
    ours = outcome(Ours, arguments)
    for name, value in (plain or arguments).items():
        assert ours[name] == (type(value), value)


def test_difference_subclasses_of_int_are_read_as_ints() -> None:
    three = enum.IntEnum("Every", {"THREE": 3}).THREE
    assert Theirs(three).save_checkpoint_steps is three
    assert type(Ours(three).save_checkpoint_steps) is int
    assert Ours(three).save_checkpoint_steps == 3


def test_difference_use_does_not_change_append_dict() -> None:
    theirs, ours = Theirs(append_info=["step_num"]), Ours(append_info=["step_num"])
    for config in (theirs, ours):
        config.append_dict["step_num"] = 10
    assert theirs.append_dict == {"step_num": 10}
    assert ours.append_dict == {"step_num": 0}


# --- When it saves and what stays, MindSpore's callback writing and removing real, empty files. ---

START_S = 1_000_000_000


def their_steps(
    numbers: tuple[Any, ...], gaps: list[int], directory: str, patch: pytest.MonkeyPatch
) -> list[set[int]]:
    """Steps whose files are there after each step of a training whose steps take `gaps` seconds."""
    now = START_S
    params = SimpleNamespace(
        cur_epoch_num=1, batch_num=10**9, cur_step_num=0, train_network=SimpleNamespace(get_parameters=list)
    )

    def save_checkpoint(network: object, path: str, *args: object, **options: object) -> None:
        Path(path).touch()
        os.utime(path, (now, now))

    patch.setattr(their_module, "time", SimpleNamespace(time=lambda: now))
    patch.setattr(their_module, "save_checkpoint", save_checkpoint)
    patch.setattr(their_module, "_save_graph", lambda network, path: None)
    callback = ModelCheckpoint("P", directory, Theirs(*numbers))
    there = []
    for step, gap in enumerate(gaps, 1):
        now += gap
        params.cur_step_num = step
        callback.step_end(SimpleNamespace(original_args=lambda: params))
        there.append({int(path.stem.rpartition("_")[2]) for path in Path(directory).glob("P-1_*.ckpt")})
    return there


def our_steps(numbers: tuple[Any, ...], gaps: list[int]) -> list[set[int]]:
    """The same from our policies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwansongWarning)
        config = CheckpointConfig(*numbers)
    now = last_s = START_S
    last_step = 0
    committed: list[Committed] = []
    there = []
    for step, gap in enumerate(gaps, 1):
        now += gap
        if config.save_policy.wants(SavePoint(step, last_step, float(now), float(last_s))):
            committed.append(Committed(str(step), len(gaps) + step, float(now), "periodic", "run", None))
            gone = config.keep_policy.doomed(committed, str(step))
            committed = [entry for entry in committed if entry.id not in gone]
            last_step, last_s = step, now
        there.append({int(entry.id) for entry in committed})
    return there


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((1, 0, 3, 0), id="every_step_keep_3"),
        pytest.param((3, 100, 1, 0), id="every_3_steps_keep_1"),
        pytest.param((2, 0, 0, 0), id="keep_unset"),
        pytest.param((1, 0, 0, 1), id="every_step_per_minute"),
        pytest.param((2, 0, None, 3), id="every_2_steps_per_3_minutes"),
        pytest.param((0, 60, 2, 0), id="every_minute_keep_2"),
        pytest.param((None, 25, 0, 2), id="every_25_s_per_2_minutes"),
        pytest.param((0, 0, 4, 0), id="never"),
    ],
)
@settings(max_examples=40)
@given(gaps=st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_same_files_stay_after_every_step(numbers: tuple[Any, ...], gaps: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        assert our_steps(numbers, gaps) == their_steps(numbers, gaps, directory, patch)
