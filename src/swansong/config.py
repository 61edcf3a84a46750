"""CheckpointConfig: MindSpore's arguments, checked and turned into policies and options.

Arguments, defaults and normalised values are those of MindSpore 2.10 (`mindspore.train.CheckpointConfig`).
What MindSpore accepts here and fails at later, at the first save or on loading, is refused here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, Self, get_args

from swansong.errors import ConfigError, SwansongWarning
from swansong.policy.checks import brief, shown, whole_number
from swansong.policy.keep import KeepLast, KeepPerMinutes, KeepPolicy
from swansong.policy.save import EverySeconds, EverySteps, Never, SavePolicy

KEY_SIZES: Final = (16, 24, 32)
"""Lengths of an encryption key, in bytes."""
ENC_MODES: Final = ("AES-GCM", "AES-CBC")
AsyncMode = Literal["thread", "process"]
"""Where checkpoints are written while training goes on."""
ASYNC_MODES: Final = get_args(AsyncMode)
FORMATS: Final = ("ckpt", "safetensors")
COUNTERS: Final = ("epoch_num", "step_num")
"""What `append_info` may name: counters that every save fills in."""

_INTEGERS: Final = (
    "save_checkpoint_steps",
    "save_checkpoint_seconds",
    "keep_checkpoint_max",
    "keep_checkpoint_per_n_minutes",
)
_SWITCHES: Final = ("integrated_save", "exception_save", "crc_check", "remove_redundancy")


@dataclass(frozen=True, eq=False, repr=False)
class CheckpointConfig:
    """When checkpoints are saved, which of them stay, and what they contain.

    Every argument is an attribute of the same name and reads as MindSpore's does: of two save policies, or
    two keep policies, the one that loses reads None. An instance never changes, so it can be used again.

    Raises ConfigError (a ValueError and a TypeError) that names the argument and the value, but never shows
    a key. Warns (SwansongWarning) of a time policy that the other argument's default beats, and of a
    configuration that never saves.

    Without a framework `saved_network` must be None. An adapter's subclass sets `network_types` and
    `append_types` to what its framework adds.
    """

    network_types: ClassVar[tuple[type, ...]] = ()
    """What `saved_network` may be besides None. For subclasses to set."""
    append_types: ClassVar[tuple[type, ...]] = (int, float, bool, str)
    """What a value in the dict of `append_info` may be. For subclasses to extend."""

    save_checkpoint_steps: int | None = 1
    """Save when that many steps have passed since the last save. None or 0: not by steps."""
    save_checkpoint_seconds: float | None = 0
    """Save when more than that many seconds have passed since the last save; ignored if steps are set.
    An int, or None or 0; through `of` a float too."""
    keep_checkpoint_max: int | None = 5
    """How many checkpoints stay. None or 0: by minutes; if those are not set either, one stays."""
    keep_checkpoint_per_n_minutes: float | None = 0
    """Keep about one checkpoint per that many minutes (see KeepPerMinutes); ignored if a maximum is set.
    An int, or None or 0; through `of` a float too."""
    integrated_save: bool = True
    """Merge tensors that are split over ranks into whole ones."""
    async_save: bool | str = False
    """Write while training goes on: True or "thread", or "process", which outlives a job that is killed."""
    saved_network: Any = None
    """The network to save instead of the one in training."""
    append_info: list[Any] | None = None
    """A list of "epoch_num", "step_num" and at most one dict of str to values; see `append_dict`."""
    enc_key: bytes | None = None
    """Encryption key of 16, 24 or 32 bytes; None: no encryption."""
    enc_mode: str = "AES-GCM"
    """Cipher mode, "AES-GCM" or "AES-CBC"; only its type is checked if there is no key."""
    exception_save: bool = False
    """Save once more when an exception ends training."""
    crc_check: bool = False
    """Write MindSpore's CRC-32 trailer; not together with a key."""
    remove_redundancy: bool = False
    """Write what data-parallel ranks hold in common only once."""
    format: str = "ckpt"
    """Container: ckpt, or safetensors; as MindSpore's, the latter takes no key, CRC or `exception_save`."""

    _save_policy: SavePolicy = field(init=False)
    _keep_policy: KeepPolicy = field(init=False)

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            self._set(name, _policy_number(name, getattr(self, name)))
        for name in _SWITCHES:
            _check_bool(name, getattr(self, name))
        _check_async_save(self.async_save)
        self._check_network()
        self._set("append_info", self._checked_append_info())
        _check_key(self.enc_key, self.enc_mode)
        _check_format(self)
        self._normalise()

    @classmethod
    def of(cls, *, save: SavePolicy | None = None, keep: KeepPolicy | None = None, **options: Any) -> Self:
        """Build a configuration from policies; `options` are the arguments other than the four integers.

        None stands for the default policies, EverySteps(1) and KeepLast(5). The four integers read as what
        the policies say, and as None where they say nothing of the kind. Errors as for the class.
        """
        save = EverySteps(1) if save is None else save
        keep = KeepLast(5) if keep is None else keep
        if not isinstance(save, SavePolicy) or isinstance(save, type):
            raise ConfigError(f"save: wanted a save policy such as EverySteps(100), got {shown(save)}")
        if not isinstance(keep, KeepPolicy) or isinstance(keep, type):
            raise ConfigError(f"keep: wanted a keep policy such as KeepLast(5), got {shown(keep)}")
        config = cls(1, 0, 5, 0, **options)
        config._set("_save_policy", save)
        config._set("_keep_policy", keep)
        config._set("save_checkpoint_steps", save.steps if isinstance(save, EverySteps) else None)
        config._set("save_checkpoint_seconds", save.seconds if isinstance(save, EverySeconds) else None)
        config._set("keep_checkpoint_max", keep.count if isinstance(keep, KeepLast) else None)
        config._set(
            "keep_checkpoint_per_n_minutes", keep.minutes if isinstance(keep, KeepPerMinutes) else None
        )
        return config

    @property
    def save_policy(self) -> SavePolicy:
        """When to save."""
        return self._save_policy

    @property
    def keep_policy(self) -> KeepPolicy:
        """Which checkpoints stay."""
        return self._keep_policy

    @property
    def background(self) -> AsyncMode | None:
        """Where checkpoints are written while training goes on; None: it waits for them."""
        if not self.async_save:
            return None
        return "process" if self.async_save == "process" else "thread"

    @property
    def append_dict(self) -> dict[str, Any] | None:
        """What `append_info` adds to each checkpoint, as a new dict; None if it is None or empty.

        "epoch_num" and "step_num" are what the saved counters start from: 0, or what the dict says.
        """
        if not self.append_info:
            return None
        merged: dict[str, Any] = {name: 0 for name in COUNTERS if name in self.append_info}
        for element in self.append_info:
            if isinstance(element, dict):
                merged.update(element)
        return merged

    def get_checkpoint_policy(self) -> dict[str, Any]:
        """Return the four policy numbers and the saved network by argument name, as MindSpore does."""
        return {name: getattr(self, name) for name in (*_INTEGERS, "saved_network")}

    def __repr__(self) -> str:
        parts = [f"save={self.save_policy}", f"keep={self.keep_policy}"]
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name in _INTEGERS or not spec.init or value == spec.default:
                continue
            match spec.name:
                case "enc_key":
                    text = "<hidden>"
                case "saved_network":
                    text = f"<{type(value).__name__}>"
                case _:
                    text = brief(value)
            parts.append(f"{spec.name}={text}")
        return f"{type(self).__name__}.of({', '.join(parts)})"

    def _set(self, name: str, value: object) -> None:
        """Set a field while the instance is being made."""
        object.__setattr__(self, name, value)

    def _normalise(self) -> None:
        """Choose the policies as MindSpore does, and let the numbers say which were chosen."""
        steps, seconds, most, minutes = (getattr(self, name) for name in _INTEGERS)
        if not (steps or seconds or most or minutes):
            raise ConfigError(f"{', '.join(_INTEGERS)}: at least one must be set, got None or 0 for all four")
        if steps:
            self._set("_save_policy", EverySteps(steps))
            self._set("save_checkpoint_seconds", None)
        else:
            self._set("_save_policy", EverySeconds(seconds) if seconds else Never())
        if most:
            self._set("_keep_policy", KeepLast(most))
            self._set("keep_checkpoint_per_n_minutes", None)
        elif minutes:
            self._set("_keep_policy", KeepPerMinutes(minutes))
        else:
            self._set("_keep_policy", KeepLast(1))
            self._set("keep_checkpoint_max", 1)
        _warn_of_traps(steps, seconds, most, minutes)

    def _check_network(self) -> None:
        if self.saved_network is not None and not isinstance(self.saved_network, self.network_types):
            wanted = " or ".join(["None", *(known.__name__ for known in self.network_types)])
            hint = "" if self.network_types else "; use an adapter's CheckpointConfig (swansong.mindspore)"
            raise ConfigError(
                f"saved_network: wanted {wanted}, got {type(self.saved_network).__name__}{hint}"
            )

    def _checked_append_info(self) -> list[Any] | None:
        """Return a copy of `append_info`."""
        if self.append_info is None:
            return None
        if not isinstance(self.append_info, list):
            raise ConfigError(f"append_info: wanted a list or None, got {shown(self.append_info)}")
        for element in self.append_info:
            if not isinstance(element, dict) and not (isinstance(element, str) and element in COUNTERS):
                raise ConfigError(
                    f"append_info: wanted {', '.join(COUNTERS)} or one dict in the list, got {shown(element)}"
                )
        dicts = [element for element in self.append_info if isinstance(element, dict)]
        if len(dicts) > 1:
            raise ConfigError(f"append_info: wanted at most one dict in the list, got {len(dicts)}")
        for key, value in dicts[0].items() if dicts else ():
            self._check_appended(key, value)
        return [dict(element) if isinstance(element, dict) else element for element in self.append_info]

    def _check_appended(self, key: object, value: object) -> None:
        if not isinstance(key, str):
            raise ConfigError(f"append_info: wanted keys that are str, got {shown(key)}")
        if not isinstance(value, self.append_types):
            wanted = ", ".join(known.__name__ for known in self.append_types)
            raise ConfigError(f"append_info[{brief(key)}]: wanted one of {wanted}, got {shown(value)}")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ConfigError(f"append_info[{brief(key)}]: wanted an int of 64 bits, got {shown(value)}")
        if key in COUNTERS and isinstance(value, str):
            raise ConfigError(f"append_info[{key!r}]: wanted a number to count on from, got {shown(value)}")


def _policy_number(name: str, value: object) -> int | None:
    if value is None:
        return None
    return whole_number(name, value, least=0, wanted="None, 0 or a positive int")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: wanted True or False, got {shown(value)}")


def _check_async_save(value: object) -> None:
    if not (isinstance(value, bool) or (isinstance(value, str) and value in ASYNC_MODES)):
        wanted = " or ".join(map(repr, ASYNC_MODES))
        raise ConfigError(f"async_save: wanted True, False, {wanted}, got {shown(value)}")


def _check_key(key: object, mode: object) -> None:
    """Check key and mode; of the key no message tells more than its type and length."""
    if not isinstance(mode, str):
        raise ConfigError(f"enc_mode: wanted {' or '.join(map(repr, ENC_MODES))}, got {shown(mode)}")
    if key is None:
        return
    sizes = f"{' or '.join(map(str, KEY_SIZES))} bytes"
    if not isinstance(key, bytes):
        raise ConfigError(
            f"enc_key: wanted {sizes} or None, got a value of type {type(key).__name__} (not shown)"
        )
    if len(key) not in KEY_SIZES:
        raise ConfigError(f"enc_key: wanted {sizes}, got {len(key)} bytes (not shown)")
    if mode == "SM4-CBC":
        raise ConfigError("enc_mode: 'SM4-CBC' is MindSpore's, it is not supported here; use 'AES-GCM'")
    if mode not in ENC_MODES:
        raise ConfigError(f"enc_mode: wanted {' or '.join(map(repr, ENC_MODES))}, got {shown(mode)}")


def _check_format(config: CheckpointConfig) -> None:
    """Check the container, and that it can hold what is asked for."""
    if not isinstance(config.format, str) or config.format not in FORMATS:
        raise ConfigError(f"format: wanted {' or '.join(map(repr, FORMATS))}, got {shown(config.format)}")
    if config.enc_key is not None and config.crc_check:
        raise ConfigError(
            "crc_check: wanted False together with enc_key, got True; MindSpore could not read such a file, "
            "and its manifest vouches for it anyway"
        )
    asked = {
        "enc_key": config.enc_key is not None,
        "crc_check": config.crc_check,
        "exception_save": config.exception_save,
    }
    refused = [name for name, given in asked.items() if given]
    if config.format == "safetensors" and refused:
        raise ConfigError(
            f"{', '.join(refused)}: not available with format='safetensors' (as in MindSpore); use 'ckpt'"
        )


def _warn_of_traps(steps: int | None, seconds: int | None, most: int | None, minutes: int | None) -> None:
    """Warn of what has no effect. A default cannot be told from the same value given, which is as useless."""
    if not steps and not seconds:
        _warn(
            "this configuration never saves, not even at the end of training: save_checkpoint_steps and "
            "save_checkpoint_seconds are both unset"
        )
    if seconds and steps == 1:
        _warn(
            f"save_checkpoint_seconds={brief(seconds)} has no effect: save_checkpoint_steps=1 (the default) "
            "comes first and saves at every step; set save_checkpoint_steps=None"
        )
    if minutes and most == 5:
        _warn(
            f"keep_checkpoint_per_n_minutes={brief(minutes)} has no effect: keep_checkpoint_max=5 "
            "(the default) comes first; set keep_checkpoint_max=None"
        )


def _warn(message: str) -> None:
    # Between here and whoever wrote the call stand traps, normalise, post-init and the generated init.
    warnings.warn(message, SwansongWarning, stacklevel=6)
