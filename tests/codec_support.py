"""What the tests of the codec have in common: two ends of a connection, and every message there is."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from swansong.protocol.codec import Channel, ChannelEvent, Failed, Opened, Reply, WireMessage
from swansong.protocol.frames import HEAD, FrameWriter, plain_frame
from swansong.protocol.handshake import Handshake, Identity, Role, Token
from swansong.protocol.messages import Register, ToController, ToProcessor
from swansong.protocol.operator import OperatorAnswer, OperatorRequest

SECRET = bytes(range(32))
TOKEN = Token(SECRET)
OTHER_TOKEN = Token(b"the token of quite another job..")
CONTROLLER = Identity(role=Role.CONTROLLER, incarnation=b"c" * 16, generation=7_000_000_000)
RANK = Identity(role=Role.RANK, rank=3, incarnation=b"r" * 16, generation=6)
OPERATOR = Identity(role=Role.OPERATOR)
OURS, THEIRS = b"o" * 32, b"t" * 32
"""Nonces of whoever connects, and of the controller."""

SPEAKERS: dict[Any, tuple[Identity, Identity]] = {
    ToController: (RANK, CONTROLLER),
    ToProcessor: (CONTROLLER, RANK),
    OperatorRequest: (OPERATOR, CONTROLLER),
    OperatorAnswer: (CONTROLLER, OPERATOR),
}
KINDS: dict[type, tuple[Identity, Identity]] = {
    kind: ends for union, ends in SPEAKERS.items() for kind in get_args(union)
}
"""Every message -> who says it, who hears it."""


def channel(me: Identity, token: Token = TOKEN, nonce: bytes = b"") -> Channel:
    """One end, with the nonce that its role has here."""
    return Channel(token, me, nonce=nonce or (THEIRS if me.role is Role.CONTROLLER else OURS))


def exchange(one: Channel, other: Channel) -> tuple[list[ChannelEvent], list[ChannelEvent]]:
    """Carry the handshake to and fro; return what each end made of it, its replies left out."""
    to_one, to_other = other.greeting, one.greeting
    heard: tuple[list[ChannelEvent], list[ChannelEvent]] = ([], [])
    while to_one or to_other:
        at_one, at_other = one.receive(to_one), other.receive(to_other)
        to_other = b"".join(event.data for event in at_one if isinstance(event, Reply))
        to_one = b"".join(event.data for event in at_other if isinstance(event, Reply))
        for events, into in zip((at_one, at_other), heard, strict=True):
            into += [event for event in events if not isinstance(event, Reply)]
    return heard


def opened(speaker: Identity, listener: Identity) -> tuple[Channel, Channel]:
    """Both ends, ready for messages."""
    ends = channel(speaker), channel(listener)
    assert exchange(*ends) == ([Opened(listener)], [Opened(speaker)])
    return ends


def opened_to_writer(speaker: Identity, listener: Identity) -> tuple[FrameWriter, Channel]:
    """An open listener, and what makes frames with the right tags of whatever bytes the speaker likes."""
    hand = Handshake(TOKEN, speaker, THEIRS if speaker.role is Role.CONTROLLER else OURS)
    ear = channel(listener)
    proof = hand.hear_greeting(ear.greeting[HEAD:])
    reply, _ = ear.receive(plain_frame(hand.greeting) + plain_frame(proof))
    assert isinstance(reply, Reply)
    return FrameWriter(hand.hear_proof(reply.data[HEAD:]).sending_key), ear


def fault(events: list[ChannelEvent]) -> Exception:
    """The error of events that are nothing but a failure."""
    (event,) = events
    assert isinstance(event, Failed)
    return event.error


def fitting(message: Any) -> Any:
    """A message as RANK may send it: it registers as itself."""
    if isinstance(message, Register):
        member = msgspec.structs.replace(message.member, rank=RANK.rank)
        return msgspec.structs.replace(message, member=member)
    return message


def messages(kind: type) -> st.SearchStrategy[WireMessage]:
    """Any message of a kind."""
    return _any(inspect.type_info(kind)).map(fitting)


def sample(kind: type) -> WireMessage:
    """One message of a kind, always the same, in which nothing is left out."""
    return fitting(_one(inspect.type_info(kind), "x"))  # type: ignore[no-any-return]


def _any(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _any(field.type) for field in fields})
        case inspect.EnumType(cls=cls):
            return st.sampled_from(cls)
        case inspect.StrType():
            return st.text(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(-(2**63), 2**64 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType(item_type=item):
            return st.lists(_any(item), max_size=2).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_any(key), _any(value), max_size=2)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_any, types))
    raise NotImplementedError(info)


def _one(info: inspect.Type, name: str) -> Any:
    match info:
        case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
            return cls(**{field.name: _one(field.type, field.name) for field in fields})
        case inspect.EnumType(cls=cls):
            return next(iter(cls))
        case inspect.StrType():
            return f"{name} é"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 1000
        case inspect.FloatType():
            return 0.5
        case inspect.VarTupleType(item_type=item):
            return (_one(item, name),)
        case inspect.DictType(key_type=key, value_type=value):
            return {_one(key, name): _one(value, name)}
        case inspect.UnionType(types=types):
            return _one(next(kind for kind in types if not isinstance(kind, inspect.NoneType)), name)
    raise NotImplementedError(info)
