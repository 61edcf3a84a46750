"""Parameters and buffers of a Cell <-> tensors in host memory, bit for bit.

On the CPU a HostTensor shows the Parameter's own memory: it must be written or copied before the next update
begins. `asnumpy` waits for the kernels that were dispatched before it, in PyNative mode too, so what is read
between two updates is the state at that boundary. On other devices `asnumpy` copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from mindspore import Parameter, Tensor, _no_grad, nn
from mindspore import dtype as mstype
from mindspore.experimental import MapParameter

from swansong.errors import NotSupportedError, UnrepresentableError
from swansong.state.dtypes import DTYPES
from swansong.state.tensors import HostTensor
from swansong.store.opening import StoredTensor

BUFFER: Final = "buffer:"
"""What a buffer's key begins with. MindSpore's own checkpoints leave buffers out."""

CLOCK: Final = "swansong_clock."
"""What the names of our own Parameters begin with, which count updates and are no part of the state."""

# Types that NumPy lacks travel as bytes, which is a copy.
_CARRIED: Final = {"bfloat16": mstype.bfloat16}


def named_state(network: nn.Cell) -> dict[str, Any]:
    """Every Parameter of `network` by its name, and every buffer by `BUFFER` and its place, in their order.

    Clocks are left out.

    Raises UnrepresentableError for two Parameters of one name, NotSupportedError for hash tables, for
    Parameters that are cached elsewhere, and for names that begin as a buffer's key does.
    """
    found: dict[str, Any] = {}
    for _, parameter in network.parameters_and_names():
        if isinstance(parameter, MapParameter) or parameter.cache_enable:
            raise NotSupportedError(
                f"parameter {parameter.name!r}: hash tables (MapParameter) and Parameters in a "
                "server's cache are not supported"
            )
        if parameter.name.startswith(CLOCK):
            continue
        if parameter.name.startswith(BUFFER):
            raise NotSupportedError(f"parameter {parameter.name!r}: {BUFFER!r} begins the names of buffers")
        if found.setdefault(parameter.name, parameter) is not parameter:
            raise UnrepresentableError(f"two parameters of the network are named {parameter.name!r}")
    for name, buffer in network.named_buffers():
        found[BUFFER + name] = buffer
    return found


def is_split(network: nn.Cell) -> bool:
    """True if this rank holds only parts of some Parameters (automatic parallel modes)."""
    return bool(network.parameter_layout_dict)


def host_tensor(name: str, tensor: Tensor) -> HostTensor:
    """Show a Parameter's or Tensor's elements; on the CPU without copying them.

    Raises UnrepresentableError for element types that have no fixed binary form here.
    """
    if isinstance(tensor, Parameter) and tensor.has_init:
        tensor.init_data()
    for dtype, carried in _CARRIED.items():
        if tensor.dtype == carried:
            bits = np.frombuffer(tensor.get_bytes(), DTYPES[dtype].carrier).reshape(tensor.shape)
            return HostTensor.of(bits, dtype=dtype, name=name)
    try:
        return HostTensor.of(tensor.asnumpy(), name=name)
    except TypeError as error:
        raise UnrepresentableError(
            f"{name}: elements of type {tensor.dtype} cannot be stored: {error}"
        ) from error


def framework_tensor(tensor: HostTensor) -> Tensor:
    """Make what can be copied into a Parameter: a MindSpore Tensor of a copy of the elements.

    Raises NotSupportedError for element types that MindSpore lacks.
    """
    if tensor.dtype.exact:
        return Tensor(tensor.array if tensor.array.flags.aligned else tensor.array.copy())
    if tensor.dtype.name not in _CARRIED:
        raise NotSupportedError(f"MindSpore has no {tensor.dtype.name} on this device")
    content = np.ascontiguousarray(tensor.array).tobytes()
    return Tensor.convert_bytes_to_tensor(content, tensor.shape, _CARRIED[tensor.dtype.name])


def new_parameter(name: str, tensor: HostTensor) -> Parameter:
    """Make a Parameter of a copy of the elements."""
    if tensor.dtype.exact:
        return Parameter(framework_tensor(tensor), name=name)
    # Parameter's constructor goes through NumPy, which does not know the type.
    parameter = Parameter(Tensor(np.zeros(tensor.shape, np.float32)), name=name)
    parameter.set_dtype(_CARRIED[tensor.dtype.name])
    fill(parameter, tensor)
    return parameter


def mismatches(state: Mapping[str, Any], found: Mapping[str, StoredTensor]) -> list[str]:
    """What keeps stored tensors from filling the Parameters and buffers of the same names, in words."""
    wrong = []
    for name in state.keys() & found.keys():
        want = (str(state[name].dtype).lower(), list(state[name].shape))
        got = (found[name].dtype.name, list(found[name].shape))
        if want != got:
            wrong.append(f"{name}: the network has {want[0]} {want[1]}, the checkpoint {got[0]} {got[1]}")
    return sorted(wrong)


def fill(target: Any, tensor: HostTensor) -> None:
    """Give a Parameter or buffer new elements, in its own memory; type and shape have been compared before.

    Not by `set_data`: that gives it other memory, and what has been compiled goes on using the old (seen with
    optimizers in PyNative mode, MindSpore 2.10).
    """
    if isinstance(target, Parameter) and target.has_init:
        target.init_data()
    # An exception inside a network leaves PyNative mode recording, where copying into a Parameter is refused.
    with _no_grad():
        target.copy_(framework_tensor(tensor))
