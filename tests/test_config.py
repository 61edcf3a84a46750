"""CheckpointConfig without a framework: every wrong value, normalisation, policies, warnings, secrecy."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import pytest

from swansong.config import CheckpointConfig
from swansong.errors import ConfigError, SwansongWarning
from swansong.policy.keep import KeepLast, KeepPerMinutes
from swansong.policy.save import EverySeconds, EverySteps, Never

KEY = b"a very secret key of 32 bytes..!"
INTEGERS = (
    "save_checkpoint_steps",
    "save_checkpoint_seconds",
    "keep_checkpoint_max",
    "keep_checkpoint_per_n_minutes",
)
SWITCHES = ("integrated_save", "exception_save", "crc_check", "remove_redundancy")


class Network:
    pass


class FrameworkConfig(CheckpointConfig):
    """What an adapter writes."""

    network_types = (Network,)
    append_types = (*CheckpointConfig.append_types, np.ndarray)


def quiet(*args: Any, **options: Any) -> CheckpointConfig:
    """Build a configuration whose warnings are another test's matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwansongWarning)
        return CheckpointConfig(*args, **options)


# --- The interface. ---


def test_arguments_order_and_defaults_are_mindspores() -> None:
    assert {name: p.default for name, p in inspect.signature(CheckpointConfig).parameters.items()} == {
        "save_checkpoint_steps": 1,
        "save_checkpoint_seconds": 0,
        "keep_checkpoint_max": 5,
        "keep_checkpoint_per_n_minutes": 0,
        "integrated_save": True,
        "async_save": False,
        "saved_network": None,
        "append_info": None,
        "enc_key": None,
        "enc_mode": "AES-GCM",
        "exception_save": False,
        "crc_check": False,
        "remove_redundancy": False,
        "format": "ckpt",
    }


def test_every_argument_by_position_and_by_name() -> None:
    values = (
        7,
        None,
        3,
        None,
        False,
        "process",
        None,
        ["step_num"],
        None,
        "AES-CBC",
        True,
        True,
        True,
        "ckpt",
    )
    by_place = CheckpointConfig(*values)
    names = list(inspect.signature(CheckpointConfig).parameters)
    by_name = CheckpointConfig(**dict(zip(names, values, strict=True)))
    for name, value in zip(names, values, strict=True):
        assert getattr(by_place, name) == getattr(by_name, name) == value


def test_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="bogus"):
        CheckpointConfig(bogus=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [*INTEGERS, "enc_key", "append_dict", "save_policy"])
def test_nothing_can_be_assigned(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(CheckpointConfig(), name, 1)


# --- Wrong values. ---


SWITCHED = [(None, "None"), (0, "0"), (1, "1"), ("True", "'True'"), (np.True_, "True")]
COUNTED = [
    (-1, "-1"),
    (-(10**5000), "bits"),
    (1.0, "1.0"),
    (np.float64(2), "2.0"),
    ("5", "'5'"),
    ([1], "[1]"),
    (True, "True"),
    (False, "False"),
    (np.True_, "True"),
    (np.int64(-3), "-3"),
    (np.array(3), "array(3)"),
    (np.timedelta64(5, "s"), "timedelta64"),
]
WRONG: dict[str, list[tuple[Any, str]]] = {
    **dict.fromkeys(INTEGERS, COUNTED),
    **dict.fromkeys(SWITCHES, SWITCHED),
    "async_save": [(None, "None"), (0, "0"), (1, "1"), ("fork", "'fork'"), ("", "''"), (b"thread", "bytes")],
    "saved_network": [(Network(), "Network")],
    "append_info": [
        (("epoch_num",), "tuple"),
        ({"loss": 1}, "dict"),
        ("epoch_num", "'epoch_num'"),
        ([1], "1 (int)"),
        ([None], "None"),
        (["loss"], "'loss'"),
        (["x" * 10**7], "xxx"),
        ([["epoch_num"]], "list"),
        ([{"a": 1}, {"b": 2}], "2"),
        ([{}, {}], "2"),
        ([{1: 1}], "1 (int)"),
        ([{"loss": None}], "None"),
        ([{"loss": [1.0]}], "[1.0]"),
        ([{"loss": np.float32(1)}], "float32"),
        ([{"loss": 1j}], "complex"),
        ([{"epoch_num": "7"}], "'7'"),
    ],
    "enc_key": [
        ("0123456789abcdef", "str"),
        (bytearray(16), "bytearray"),
        (16, "int"),
        (b"", "0 bytes"),
        (b"k" * 15, "15 bytes"),
        (b"k" * 33, "33 bytes"),
    ],
    "enc_mode": [(None, "None"), (1, "1"), (b"AES-GCM", "bytes")],
    "format": [(None, "None"), ("npz", "'npz'"), ("CKPT", "'CKPT'"), (1, "1")],
}
WRONG_TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"enc_key": KEY, "enc_mode": "SM4-CBC"}, "enc_mode", "'SM4-CBC' is MindSpore's"),
    ({"enc_key": KEY, "enc_mode": "aes-gcm"}, "enc_mode", "'aes-gcm'"),
    ({"enc_key": KEY, "enc_mode": ""}, "enc_mode", "''"),
    ({"enc_key": KEY, "crc_check": True}, "crc_check", "enc_key"),
    ({"enc_key": KEY, "format": "safetensors"}, "enc_key", "safetensors"),
    ({"crc_check": True, "format": "safetensors"}, "crc_check", "safetensors"),
    ({"exception_save": True, "format": "safetensors"}, "exception_save", "safetensors"),
    (dict.fromkeys(INTEGERS, 0), INTEGERS[3], "None or 0"),
    (dict.fromkeys(INTEGERS), INTEGERS[3], "None or 0"),
    ({**dict.fromkeys(INTEGERS, np.int64(0)), "keep_checkpoint_max": None}, INTEGERS[3], "None or 0"),
]
ROWS = [({name: value}, name, part) for name, values in WRONG.items() for value, part in values]


@pytest.mark.parametrize(
    ("arguments", "name", "part"),
    [pytest.param(*row, id=f"{k}-{row[1]}-{row[2]}") for k, row in enumerate(ROWS + WRONG_TOGETHER)],
)
def test_wrong_value_is_named(arguments: dict[str, Any], name: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(**arguments)
    message = str(caught.value)
    assert name in message.partition(": ")[0]
    assert part in message
    assert len(message) < 400
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, TypeError)


# --- Normalisation and policies. ---


@pytest.mark.parametrize(
    ("given_", "read", "save", "keep"),
    [
        pytest.param((1, 0, 5, 0), (1, None, 5, None), EverySteps(1), KeepLast(5), id="defaults"),
        pytest.param(
            (16, 100, 0, 1), (16, None, 0, 1), EverySteps(16), KeepPerMinutes(1), id="steps_beat_seconds"
        ),
        pytest.param(
            (0, 130, None, 2), (0, 130, None, 2), EverySeconds(130), KeepPerMinutes(2), id="by_time"
        ),
        pytest.param(
            (None, 9, 3, 2), (None, 9, 3, None), EverySeconds(9), KeepLast(3), id="max_beats_minutes"
        ),
        pytest.param(
            (4, None, None, None), (4, None, 1, None), EverySteps(4), KeepLast(1), id="keep_none_keeps_one"
        ),
        pytest.param((4, 0, 0, 0), (4, None, 1, 0), EverySteps(4), KeepLast(1), id="keep_zero_keeps_one"),
        pytest.param((0, None, 5, 0), (0, None, 5, None), Never(), KeepLast(5), id="never"),
        pytest.param(
            (2**63, 0, 2**64, 0), (2**63, None, 2**64, None), EverySteps(2**63), KeepLast(2**64), id="huge"
        ),
    ],
)
def test_numbers_become_policies_and_losers_read_none(
    given_: tuple, read: tuple, save: object, keep: object
) -> None:
    config = quiet(*given_)
    assert tuple(getattr(config, name) for name in INTEGERS) == read
    assert config.get_checkpoint_policy() == {**dict(zip(INTEGERS, read, strict=True)), "saved_network": None}
    assert config.save_policy == save
    assert config.keep_policy == keep


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
def test_numpy_integers_are_read_as_ints(kind: type[np.integer]) -> None:
    config = quiet(kind(0), kind(30), kind(0), kind(7))
    assert [getattr(config, name) for name in INTEGERS] == [0, 30, 0, 7]
    assert {type(getattr(config, name)) for name in INTEGERS} == {int}


# --- Appended information. ---


@pytest.mark.parametrize(
    ("info", "merged"),
    [
        pytest.param(None, None, id="none"),
        pytest.param([], None, id="empty_list"),
        pytest.param([{}], {}, id="empty_dict"),
        pytest.param(["step_num"], {"step_num": 0}, id="one_counter"),
        pytest.param(["step_num", "epoch_num"], {"epoch_num": 0, "step_num": 0}, id="both_counters"),
        pytest.param(["epoch_num", "epoch_num"], {"epoch_num": 0}, id="named_twice"),
        pytest.param(["epoch_num", {"epoch_num": 7}], {"epoch_num": 7}, id="counts_on_from_7"),
        pytest.param([{"step_num": 7}], {"step_num": 7}, id="counter_in_dict_only"),
        pytest.param(
            [{"lr": 0.1, "n": 3, "ok": True, "who": "me"}, "step_num"],
            {"step_num": 0, "lr": 0.1, "n": 3, "ok": True, "who": "me"},
            id="dict_first",
        ),
    ],
)
def test_append_dict(info: list | None, merged: dict | None) -> None:
    config = CheckpointConfig(append_info=info)
    assert config.append_dict == merged
    assert list(config.append_dict or {}) == list(merged or {})


def test_append_dict_outlives_what_is_done_to_it_and_to_the_arguments() -> None:
    values, info = {"lr": 0.1}, ["epoch_num"]
    info.append(values)
    config = CheckpointConfig(append_info=info)
    values["lr"] = 0.2
    info.clear()
    first = config.append_dict
    assert first is not None
    first["epoch_num"] = 2
    assert config.append_dict == {"epoch_num": 0, "lr": 0.1}


# --- Adapters. ---


def test_adapter_says_which_networks_and_values_it_knows() -> None:
    network, array = Network(), np.zeros(2)
    config = FrameworkConfig(saved_network=network, append_info=[{"a": array, "b": 1}])
    assert config.saved_network is network
    assert config.get_checkpoint_policy()["saved_network"] is network
    assert config.append_dict == {"a": array, "b": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"saved_network": 3}, r"^saved_network: wanted None or Network, got int$"),
        (
            {"append_info": [{"a": [1]}]},
            r"^append_info\['a'\]: wanted one of int, float, bool, str, ndarray, got",
        ),
    ],
)
def test_adapter_names_are_in_the_message(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrameworkConfig(**arguments)


# --- Silent traps. ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"save_checkpoint_seconds": 100}, "save_checkpoint_seconds=100 has no effect", id="seconds"
        ),
        pytest.param({"keep_checkpoint_per_n_minutes": 5}, "per_n_minutes=5 has no effect", id="minutes"),
        pytest.param({"save_checkpoint_steps": 0}, "never saves", id="steps_zero"),
        pytest.param({"save_checkpoint_steps": None}, "never saves", id="steps_none"),
        pytest.param(
            {"save_checkpoint_steps": 0, "keep_checkpoint_max": 0, "keep_checkpoint_per_n_minutes": 1},
            "never saves",
            id="only_minutes",
        ),
    ],
)
def test_what_would_silently_do_nothing_is_warned_of_where_it_is_written(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.warns(SwansongWarning, match=message) as caught:
        CheckpointConfig(**arguments)
    assert [warning.filename for warning in caught] == [__file__]


def test_each_trap_of_two_is_warned_of() -> None:
    with pytest.warns(SwansongWarning) as caught:
        CheckpointConfig(save_checkpoint_seconds=100, keep_checkpoint_per_n_minutes=5)
    assert len(caught) == 2


@pytest.mark.parametrize(
    "numbers",
    [(1, 0, 5, 0), (16, 100, 0, 1), (16, 100, 3, 1), (0, 100, 0, 5), (None, 1, None, None), (9, 0, 0, 0)],
)
def test_sound_configurations_are_not_warned_of(numbers: tuple) -> None:
    CheckpointConfig(*numbers)


# --- Keys. ---


@pytest.mark.parametrize("size", [16, 24, 32])
@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_key_and_mode_are_accepted(size: int, mode: str) -> None:
    config = CheckpointConfig(enc_key=KEY[:size], enc_mode=mode)
    assert (config.enc_key, config.enc_mode) == (KEY[:size], mode)


@pytest.mark.parametrize("mode", ["SM4-CBC", "FOO", ""])
def test_mode_is_ignored_without_key(mode: str) -> None:
    assert CheckpointConfig(enc_mode=mode).enc_mode == mode


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"enc_key": KEY.decode()}, id="as_text"),
        pytest.param({"enc_key": bytearray(KEY)}, id="as_bytearray"),
        pytest.param({"enc_key": KEY + KEY}, id="too_long"),
        pytest.param({"enc_key": KEY, "enc_mode": KEY}, id="as_mode"),
        pytest.param({"enc_mode": KEY}, id="as_mode_only"),
        pytest.param({"append_info": KEY}, id="one_place_too_early"),
        pytest.param({"append_info": [{"key": KEY}]}, id="as_appended_value"),
        pytest.param({"append_info": ({"key": [KEY]},)}, id="deep_inside"),
        pytest.param({"save_checkpoint_steps": KEY}, id="as_a_number"),
        pytest.param({"enc_key": KEY, "crc_check": True}, id="with_crc"),
        pytest.param({"enc_key": KEY, "format": "safetensors"}, id="with_safetensors"),
    ],
)
def test_no_message_shows_a_key(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(**arguments)
    assert "secret" not in str(caught.value)


def test_repr_shows_what_was_set_but_no_key() -> None:
    config = FrameworkConfig(
        3, enc_key=KEY, saved_network=Network(), append_info=["step_num", {"lr": 0.1}], async_save=True
    )
    assert repr(config) == (
        "FrameworkConfig.of(save=EverySteps(steps=3), keep=KeepLast(count=5), async_save=True, "
        "saved_network=<Network>, append_info=['step_num', {'lr': 0.1}], enc_key=<hidden>)"
    )


def test_repr_of_the_default() -> None:
    text = "CheckpointConfig.of(save=EverySteps(steps=1), keep=KeepLast(count=5))"
    assert repr(CheckpointConfig()) == repr(CheckpointConfig.of()) == text


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1], ids=["too large", "too small"])
def test_appended_ints_have_64_bits(value: int) -> None:
    with pytest.raises(ConfigError, match=r"append_info.*64 bits"):
        CheckpointConfig(append_info=[{"count": value}])


@pytest.mark.parametrize(
    ("given", "where"), [(False, None), (True, "thread"), ("thread", "thread"), ("process", "process")]
)
def test_where_checkpoints_are_written(given: bool | str, where: str | None) -> None:
    assert CheckpointConfig(async_save=given).background == where
