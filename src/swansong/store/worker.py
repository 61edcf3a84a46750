"""The writer process of `async_save="process"`: takes orders until whoever started it is gone.

An order that was sent whole before the other process ended is carried out all the same; a partial one is
dropped. So what was captured is not lost with the process that captured it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import numpy as np
from numpy.typing import NDArray

from swansong.store.channel import Channel
from swansong.store.files import Files
from swansong.store.orders import ORDER_LIMIT, Order, decode_order, encode_answer, task_of
from swansong.store.shared_memory import mapped_for_reading
from swansong.store.task import Done, carry_out
from swansong.store.writer import Writer


def main() -> None:
    """Serve the process that passed two descriptors, named on the command line: a socket, and its own."""
    # Whoever ends a job ends what trains. This process goes when that is gone, and until then it is needed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection, starter = map(int, sys.argv[1:3])
    channel = Channel(socket.socket(fileno=connection), starter)
    try:
        serve(channel, Files())
    finally:
        channel.close()


def serve(channel: Channel, files: Files) -> None:
    """Carry out one order after another. Raises ProtocolError for what is none."""
    writer: Writer | None = None
    while (frame := channel.receive(ORDER_LIMIT)) is not None:
        payload, descriptors = frame
        try:
            order = decode_order(payload)
            if writer is None or writer.options != order.writer:
                writer = Writer(files, order.writer)
            answer = encode_answer(_carried_out(order, descriptors[-1:], writer))
        finally:
            # The first is the lock that tells others of this save; it is over now.
            for descriptor in descriptors:
                os.close(descriptor)
        channel.send(answer)


def _carried_out(order: Order, memory: tuple[int, ...], writer: Writer) -> Done | Exception:
    try:
        return carry_out(task_of(order, _mapped(order, memory), writer.files), writer)
    except Exception as error:  # noqa: BLE001 - a process's boundary: it is raised at the other end
        return error.with_traceback(None)


def _mapped(order: Order, memory: tuple[int, ...]) -> NDArray[np.uint8]:
    return mapped_for_reading(memory[0], order.memory) if order.memory else np.empty(0, np.uint8)
