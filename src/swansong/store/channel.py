"""Messages and descriptors between a process and the one that it started, over a socket that only they have.

A frame is the payload's length (8 bytes, big-endian), with which descriptors travel, and the payload. That
the other process has ended is told by a descriptor of it (`pidfd_open`), never by the end of the stream: its
forked children hold the stream open, for as long as they live.
"""

from __future__ import annotations

import os
import select
import socket
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from swansong.errors import ProtocolError

_HEAD: Final = 8
_CHUNK: Final = 1 << 20
_INT: Final = array("i").itemsize
_ROOM: Final = socket.CMSG_SPACE(2 * _INT)
"""For two descriptors; the kernel closes further ones."""


class Channel:
    """One end. Takes over its socket, and `peer`, a descriptor of the other process."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket, self._peer = connection, peer
        connection.setblocking(False)

    def send(self, payload: bytes, descriptors: tuple[int, ...] = ()) -> bool:
        """Send a frame; False: the other process has ended, or takes nothing more."""
        head = len(payload).to_bytes(_HEAD, "big")
        return self._put(head, descriptors) and self._put(payload, ())

    def receive(self, limit: int) -> tuple[bytes, tuple[int, ...]] | None:
        """The next frame, its descriptors now the caller's; None: the other end is gone, and so is the rest.

        What was sent whole before that is still received. Raises ProtocolError if it is over `limit` bytes.
        """
        descriptors: list[int] = []
        try:
            head = self._get(_HEAD, descriptors)
            length = int.from_bytes(head, "big") if head is not None else 0
            if length > limit:
                raise ProtocolError(f"a message of {length:,} bytes; at most {limit:,} are taken")
            payload = self._get(length, descriptors) if head is not None else None
        except BaseException:
            _close_all(descriptors)
            raise
        if payload is None:
            _close_all(descriptors)
            return None
        return payload, tuple(descriptors)

    def end(self) -> None:
        """Tell the other process that nothing more comes, though a forked child may hold the socket, too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def ended(self, timeout_s: float | None) -> bool:
        """Wait for the other process to end; True if it has."""
        poll = select.poll()
        poll.register(self._peer, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Close both descriptors."""
        self._socket.close()
        os.close(self._peer)

    def _put(self, data: bytes, descriptors: tuple[int, ...]) -> bool:
        view = memoryview(data)
        while view:
            try:
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
                    sent = self._socket.sendmsg([view], [rights], socket.MSG_NOSIGNAL)
                    descriptors = ()
                else:
                    sent = self._socket.send(view[:_CHUNK], socket.MSG_NOSIGNAL)
                view = view[sent:]
            except BlockingIOError:
                if self._wait(select.POLLOUT):
                    return False
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def _get(self, size: int, descriptors: list[int]) -> bytes | None:
        data, over = bytearray(), False
        while len(data) < size:
            try:
                # Not `recv_fds`, which passes no flags on.
                more, received, _, _ = self._socket.recvmsg(
                    min(size - len(data), _CHUNK), _ROOM, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                if over:
                    return None
                # Looked at once more: what it sent before it ended is there by now.
                over = self._wait(select.POLLIN)
                continue
            except ConnectionResetError:
                return None
            descriptors += _passed(received)
            if not more:
                return None
            data += more
        return bytes(data)

    def _wait(self, event: int) -> bool:
        """Wait for the socket, or the other process's end; True if it is that."""
        poll = select.poll()
        poll.register(self._socket, event)
        poll.register(self._peer, select.POLLIN)
        return any(descriptor == self._peer for descriptor, _ in poll.poll())


def _passed(received: Iterable[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in received:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            yield from array("i", data[: len(data) // _INT * _INT])


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
