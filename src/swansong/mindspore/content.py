"""What one checkpoint of a MindSpore run consists of, and what of it the train network gets back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
from mindspore import Generator, Tensor, nn
from mindspore.train import Callback, EarlyStopping, ReduceLROnPlateau

from swansong.errors import MalformedError, UnrepresentableError
from swansong.mindspore.parameters import BUFFER, host_tensor, named_state
from swansong.mindspore.position import Place
from swansong.mindspore.seeds import Seeds
from swansong.state.tensors import HostTensor
from swansong.store import naming
from swansong.store.checkpoint import Content
from swansong.store.opening import Checkpoint, StoredTensor

TRAINED: Final = "trained:"
"""What the key of a trained Parameter begins with, where `saved_network` has another one of its name."""
_RECORD: Final = "mindspore"


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a resumed run must know besides the tensors. Kept among the checkpoint's objects."""

    seeds: tuple[Seeds, ...]
    """Per rank."""
    steps_per_epoch: Annotated[int, msgspec.Meta(ge=1)]
    sink: bool
    """True if data are sunk, so that an epoch is a sink."""
    appended: tuple[str, ...] = ()
    """Tensors in the file that the user appended."""
    unrelated: tuple[str, ...] = ()
    """Tensors of `saved_network` in the file that are not the train network's."""

    @property
    def objects(self) -> dict[str, Any]:
        """As a checkpoint's objects have it."""
        return {_RECORD: msgspec.to_builtins(self)}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> RunRecord | None:
        """The record in an open checkpoint, or None. Raises MalformedError."""
        found = checkpoint.objects.get(_RECORD)
        if found is None:
            return None
        try:
            return msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise MalformedError(
                f"{checkpoint.path}: {_RECORD}: {error}", path=str(checkpoint.path)
            ) from error


def content_of(
    train_network: nn.Cell,
    saved_network: nn.Cell | None,
    append: Mapping[str, Any],
    record: RunRecord,
    inexact: tuple[Mapping[str, Any], ...] = (),
) -> Content:
    """Show what a checkpoint holds: the saved network in the file, the rest of the train network beside it.

    Nothing is copied on the CPU. `append` maps names to int, float, bool, str, Parameter, Tensor or
    Generator. Raises UnrepresentableError where a name would stand for two values, or for an element type
    that cannot be stored.
    """
    trained = named_state(train_network)
    saved = trained if saved_network is None else named_state(saved_network)
    tensors = {name: host_tensor(name, t) for name, t in saved.items() if not name.startswith(BUFFER)}
    rest = {}
    for name, tensor in trained.items():
        if name not in tensors:
            rest[name] = host_tensor(name, tensor)
        elif saved[name] is not tensor:
            rest[TRAINED + name] = host_tensor(name, tensor)
    if taken := sorted(append.keys() & (tensors.keys() | rest.keys())):
        raise UnrepresentableError(
            f"append_info: {', '.join(taken)}: the network has parameters of these names"
        )
    more = {name: _host_value(name, value) for name, value in append.items() if not _is_plain(value)}
    record = msgspec.structs.replace(
        record,
        appended=tuple(more),
        unrelated=tuple(name for name in tensors if saved[name] is not trained.get(name)),
    )
    return Content(
        tensors=tensors | more,
        rest=rest,
        objects=record.objects,
        append_info={name: value for name, value in append.items() if _is_plain(value)},
        inexact=inexact,
    )


def appended(append: Mapping[str, Any] | None, place: Place) -> dict[str, Any]:
    """What the configuration appends at `place`: its two counters are added to what they start from."""
    counted = {"epoch_num": place.epoch, "step_num": place.step}
    return {
        name: value + counted[name] if name in counted else value for name, value in (append or {}).items()
    }


def trained_part(checkpoint: Checkpoint, rank: int) -> dict[str, StoredTensor]:
    """What of an open checkpoint belongs to the train network of a rank, by the names that it uses there."""
    record = RunRecord.of(checkpoint)
    other = set() if record is None else {*record.appended, *record.unrelated}
    scope = f"{naming.rank_directory(rank)}/"
    entries = checkpoint.entries
    if any(name.startswith(scope) for name in entries):  # ranks that hold different parts
        entries = {name.removeprefix(scope): of for name, of in entries.items() if name.startswith(scope)}
    part = {name: stored for name, stored in entries.items() if name not in other}
    return part | {name.removeprefix(TRAINED): stored for name, stored in checkpoint.rest.items()}


def irreproducible(network: nn.Cell) -> tuple[Mapping[str, Any], ...]:
    """What of `network` does not repeat itself, even if never disturbed."""
    names = sorted(
        name for name, cell in network.cells_and_names() if type(cell).__name__.startswith("Dropout")
    )
    if not names:
        return ()
    reason = "MindSpore keeps no state of its random operators that could be restored"
    return ({"what": f"dropout ({', '.join(names[:3])}{', ...' if names[3:] else ''})", "reason": reason},)


def forgotten(callbacks: Iterable[Callback]) -> tuple[Mapping[str, Any], ...]:
    """What MindSpore's own callbacks count in Python, where it is not saved."""
    names = sorted({type(c).__name__ for c in callbacks if isinstance(c, EarlyStopping | ReduceLROnPlateau)})
    reason = "it begins counting anew, without the best value so far"
    return tuple({"what": f"callback {name}", "reason": reason} for name in names)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool | str)


def _host_value(name: str, value: Any) -> HostTensor:
    tensor: Tensor = value.get_state() if isinstance(value, Generator) else value
    return host_tensor(name, tensor)
