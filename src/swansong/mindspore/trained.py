"""What of a train network changes in the update, and what elsewhere.

The optimizers' Parameters, trained ones and their own, change in the update only, and are read in place.
Everything else (batch-norm statistics, loss scales, buffers) may change in the forward pass, so it is copied
at each boundary.
"""

from __future__ import annotations

from typing import Any, Final

from mindspore import nn

from swansong.engine.samples import sampled_digest
from swansong.mindspore.clock import optimizers
from swansong.mindspore.parameters import host_tensor, named_state
from swansong.persist.boundary import BoundaryTensor, tensor_of
from swansong.state.components import TensorShape
from swansong.state.tree import Flat

LARGE: Final = 1 << 20
"""Bytes of an untrained tensor from which on it is copied only once it was seen to change."""


class TrainedState:
    """The state of one train network."""

    def __init__(self, network: nn.Cell) -> None:
        updated = {
            id(parameter)
            for optimizer in optimizers(network)
            for parameter in (*optimizer.get_parameters(), *optimizer.parameters)
        }
        state = named_state(network)
        self._live = {name: of for name, of in state.items() if not updated or id(of) in updated}
        self._moved = {name: of for name, of in state.items() if name not in self._live}
        self._still = {name: of for name, of in self._moved.items() if _is_large(of)}
        """Large, and not seen to change yet: read in place until it is."""
        for name in self._still:
            del self._moved[name]
        self._samples = {name: _sampled(name, of) for name, of in self._still.items()}

    def shapes(self) -> dict[str, TensorShape]:
        """Name -> type and shape, of everything."""
        shown = {name: host_tensor(name, of) for name, of in self._all().items()}
        return {name: TensorShape(tensor.dtype.name, tensor.shape) for name, tensor in shown.items()}

    def show(self) -> Flat:
        """What is read in place. Called in any thread; waits for kernels under way."""
        shown = self._live | self._still
        return Flat({name: host_tensor(name, of) for name, of in shown.items()}, {}, None)

    def moved(self) -> tuple[BoundaryTensor, ...]:
        """What is not, copied. At boundaries; in the thread that trains."""
        for name, of in list(self._still.items()):
            if _sampled(name, of) != self._samples[name]:
                self._moved[name] = self._still[name]
                self._still = {still: of for still, of in self._still.items() if still != name}
        return tuple(tensor_of(name, host_tensor(name, of)) for name, of in self._moved.items())

    def _all(self) -> dict[str, Any]:
        return self._live | self._moved | self._still


def _is_large(of: Any) -> bool:
    return int(of.nbytes) >= LARGE


def _sampled(name: str, of: Any) -> str:
    return sampled_digest({name: host_tensor(name, of)})
