"""Frames: a stream of bytes cut into payloads, and what vouches for each. Pure.

    of the handshake     length (4 bytes, big-endian), payload
    afterwards           length (4 bytes, big-endian), payload, tag (32 bytes)

The length is the payload's, at least 1. The tag is HMAC-SHA256, under the key of the frame's direction, over

    number of the frame (8 bytes, big-endian, from 0), length (4 bytes, big-endian), payload

so a frame that was altered, repeated, left out, moved or sent back to its sender does not fit. Nothing is
allocated by an announced length: a reader holds only bytes that came, less than one frame of them.
"""

from __future__ import annotations

import hmac
from typing import Final

from swansong.errors import AuthenticationError, ProtocolError

MAX_FRAME: Final = 1 << 20
"""Bytes of a whole frame after the handshake, at most."""
MAX_FIRST_FRAME: Final = 1 << 10
"""Bytes of a whole frame of the handshake, at most."""
HEAD: Final = 4
"""Bytes of a length."""
TAG: Final = 32
"""Bytes of a tag."""
MAX_PAYLOAD: Final = MAX_FRAME - HEAD - TAG
"""Bytes of a payload after the handshake, at most."""


def plain_frame(payload: bytes) -> bytes:
    """A frame of the handshake."""
    return len(payload).to_bytes(HEAD, "big") + payload


def _tag(key: bytes, number: int, head: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + head + payload, "sha256")


class FrameWriter:
    """Makes the frames of one direction."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def frame(self, payload: bytes) -> bytes:
        """The next frame. ProtocolError if the payload is too large; the frame then does not count."""
        if len(payload) > MAX_PAYLOAD:
            raise ProtocolError(
                f"a message of {len(payload)} bytes cannot be sent: a frame holds at most {MAX_PAYLOAD}"
            )
        head = len(payload).to_bytes(HEAD, "big")
        tag = _tag(self._key, self._number, head, payload)
        self._number += 1
        return head + payload + tag


class FrameReader:
    """Takes bytes of one direction as they come, gives whole payloads back.

    Frames are the handshake's until `protect` is called. After an error no more may be asked of it.
    """

    __slots__ = ("_buffer", "_key", "_number")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._key: bytes | None = None
        self._number = 0

    @property
    def pending(self) -> int:
        """Bytes that came and are no whole frame yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes in. `next` is to be called until it returns None before more are fed."""
        self._buffer += data

    def protect(self, key: bytes) -> None:
        """From the next frame on, every one carries a tag under `key`."""
        self._key = key

    def clear(self) -> None:
        """Forget what is pending."""
        self._buffer.clear()

    def next(self) -> bytes | None:
        """The next payload; None: more bytes are needed.

        Raises ProtocolError for a length that cannot be, AuthenticationError for a tag that does not fit.
        """
        buffer, key = self._buffer, self._key
        if len(buffer) < HEAD:
            return None
        head = bytes(buffer[:HEAD])
        length = int.from_bytes(head, "big")
        tag, limit = (0, MAX_FIRST_FRAME) if key is None else (TAG, MAX_FRAME)
        end, size, most = HEAD + length, HEAD + length + tag, limit - HEAD - tag
        if not 0 < length <= most:
            raise ProtocolError(self._impossible(length, most))
        if len(buffer) < size:
            return None
        payload = bytes(buffer[HEAD:end])
        if key is not None:
            if not hmac.compare_digest(_tag(key, self._number, head, payload), buffer[end:size]):
                raise AuthenticationError(
                    f"frame {self._number} was altered, repeated, left out or moved on its way: "
                    "its tag does not fit"
                )
            self._number += 1
        del buffer[:size]
        return payload

    def _impossible(self, length: int, most: int) -> str:
        what = f"a frame announces a payload of {length} bytes, wanted 1 to {most}"
        return what if self._key is not None else f"{what}: whoever this is speaks another protocol"
