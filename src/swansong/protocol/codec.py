"""A connection without the connection: bytes <-> handshake and messages. Pure.

One `Channel` is one end of one connection. Whoever owns the socket sends `greeting` first, passes every byte
that comes to `receive`, and carries out what it returns, in order:

    channel = Channel(token, me, nonce=os.urandom(32))
    sock.sendall(channel.greeting)
    for event in channel.receive(sock.recv(65536)):
        match event:
            case Reply(data): sock.sendall(data)
            case Opened(peer): ...           # proved; `channel.send` may be used from now on
            case Failed(error): ...          # always the last; end the connection
            case message: ...                # of the kind that the peer's role may send

It does not matter how the bytes are cut: what came before a fault counts, nothing after it does. Memory is
bounded by what was passed to `receive` plus one frame. There are no deadlines here; who owns the socket keeps
them. Layouts: `protocol.frames`, `protocol.handshake`; payloads after the handshake are MessagePack of the
tagged structs of `protocol.messages` and `protocol.operator`. Fields that are not known are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeAlias, get_args

import msgspec

from swansong.errors import AuthenticationError, ProtocolError
from swansong.protocol.frames import FrameReader, FrameWriter, plain_frame
from swansong.protocol.handshake import Handshake, Identity, Role, Token
from swansong.protocol.messages import Message, Register, ToController, ToProcessor
from swansong.protocol.operator import OperatorAnswer, OperatorRequest

WireMessage: TypeAlias = Message | OperatorRequest | OperatorAnswer


@dataclass(frozen=True, slots=True)
class Reply:
    """Bytes of the handshake, to be sent at once."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """The other end has proved who it is. Messages may be sent."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class Failed:
    """The channel is closed for good."""

    error: ProtocolError


ChannelEvent: TypeAlias = Reply | Opened | WireMessage | Failed


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What one role may say to another."""

    kinds: tuple[type, ...]
    decoder: msgspec.msgpack.Decoder[Any]


def _vocabulary(union: Any) -> _Vocabulary:
    return _Vocabulary(get_args(union), msgspec.msgpack.Decoder(union))


_SAYS: Final[Mapping[tuple[Role, Role], _Vocabulary]] = {
    (Role.RANK, Role.CONTROLLER): _vocabulary(ToController),
    (Role.CONTROLLER, Role.RANK): _vocabulary(ToProcessor),
    (Role.OPERATOR, Role.CONTROLLER): _vocabulary(OperatorRequest),
    (Role.CONTROLLER, Role.OPERATOR): _vocabulary(OperatorAnswer),
}
"""(speaker, listener) -> messages."""

_ENCODER: Final = msgspec.msgpack.Encoder()


class _Stage(Enum):
    GREETING = auto()
    PROOF = auto()
    OPEN = auto()
    CLOSED = auto()


class Channel:
    """One end of one connection."""

    def __init__(self, token: Token, me: Identity, *, nonce: bytes) -> None:
        """`nonce` is 32 fresh random bytes. ConfigError for another length."""
        self._me = me
        self._handshake = Handshake(token, me, nonce)
        self._stage = _Stage.GREETING
        self._reader = FrameReader()
        self._writer: FrameWriter | None = None
        self._peer: Identity | None = None
        self._why_closed = ""
        self.greeting = plain_frame(self._handshake.greeting)
        """To be sent first, before anything is received."""

    def __repr__(self) -> str:
        return f"Channel({self._me} to {self._peer or 'nobody yet'}, {self._stage.name.lower()})"

    @property
    def peer(self) -> Identity | None:
        """Who the other end has proved to be; None before that."""
        return self._peer

    @property
    def closed(self) -> bool:
        """True after an error, or the connection's end."""
        return self._stage is _Stage.CLOSED

    def receive(self, data: bytes) -> list[ChannelEvent]:
        """Take bytes that came; return what they come to. Bytes after an error are passed over."""
        events: list[ChannelEvent] = []
        if self.closed:
            return events
        self._reader.feed(data)
        try:
            while (payload := self._reader.next()) is not None:
                events += self._take(payload)
        except ProtocolError as error:
            events.append(self._fail(error))
        return events

    def end(self) -> list[ChannelEvent]:
        """Take note that the other end sends no more: [Failed] if something is missing, else nothing.

        Whole frames that were cut off the end cannot be missed: what must not get lost is answered.
        """
        if self.closed:
            return []
        if self._stage is not _Stage.OPEN:
            # A controller greets unasked; under TLS, that cannot be read by who comes without.
            silent = self._stage is _Stage.GREETING and self._me.role is not Role.CONTROLLER
            hint = ": does whoever listens there want TLS?" if silent else ""
            return [self._fail(ProtocolError(f"the connection ended before the handshake was done{hint}"))]
        if self._reader.pending:
            what = f"the connection to {self._peer} ended {self._reader.pending} bytes into a frame"
            return [self._fail(ProtocolError(what))]
        self._close("the connection has ended")
        return []

    def send(self, message: WireMessage) -> bytes:
        """The frame of a message, to be sent after whatever was returned before.

        Text that is no Unicode (a lone surrogate, as in undecodable file names) is sent escaped. Raises
        ProtocolError before Opened, when closed, or if the message is too large for a frame: the channel then
        stays as it was. TypeError for a message that is not this end's to send.
        """
        if self._writer is None or self._peer is None or self.closed:
            raise ProtocolError(f"nothing can be sent: {self._why_closed or 'the handshake is not done'}")
        if type(message) not in _SAYS[self._me.role, self._peer.role].kinds:
            raise TypeError(f"{self._me} does not send {type(message).__name__} to {self._peer}")
        return self._writer.frame(_encode(message))

    def _take(self, payload: bytes) -> list[ChannelEvent]:
        if self._stage is _Stage.GREETING:
            proof = self._handshake.hear_greeting(payload)
            self._stage = _Stage.PROOF
            return [Reply(plain_frame(proof))]
        if self._stage is _Stage.PROOF:
            session = self._handshake.hear_proof(payload)
            self._stage, self._peer = _Stage.OPEN, session.peer
            self._writer = FrameWriter(session.sending_key)
            self._reader.protect(session.receiving_key)
            return [Opened(session.peer)]
        return [self._decode(payload)]

    def _decode(self, payload: bytes) -> WireMessage:
        peer = self._peer
        if peer is None:
            raise ProtocolError("a message came before the handshake was done")
        try:
            message: WireMessage = _SAYS[peer.role, self._me.role].decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            why = str(error)[:200]
        else:
            if isinstance(message, Register) and message.member.rank != peer.rank:
                raise AuthenticationError(f"{peer} by its proof registers as rank {message.member.rank}")
            return message
        # Cut, quoted and raised out here, since the decoder's error may repeat what came, all of it.
        raise ProtocolError(f"no message of {peer}: {why!r}")

    def _fail(self, error: ProtocolError) -> Failed:
        self._close(f"the channel failed: {error}")
        # The traceback's frames would keep keys and what came for as long as somebody keeps the error.
        return Failed(error.with_traceback(None))

    def _close(self, why: str) -> None:
        self._stage, self._why_closed = _Stage.CLOSED, why
        self._reader.clear()


def _encode(message: WireMessage) -> bytes:
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        return _ENCODER.encode(_escaped(msgspec.to_builtins(message)))


def _escaped(value: Any) -> Any:
    """Plain values with every lone surrogate spelled out, as in "\\udc80"."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_escaped, value))
    return value
