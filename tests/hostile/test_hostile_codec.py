"""Bytes made to hurt: strangers, people in between, and peers with the token and no manners.

Whatever comes, a channel gives back messages that were really sent or one typed error, never another
exception, and holds less than a frame.
"""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_support import (
    CONTROLLER,
    KINDS,
    OPERATOR,
    RANK,
    SPEAKERS,
    TOKEN,
    channel,
    fault,
    opened,
    opened_to_writer,
    sample,
)
from swansong import errors
from swansong.errors import AuthenticationError, ProtocolError
from swansong.protocol import messages as m
from swansong.protocol.codec import Channel, ChannelEvent, Failed, Opened, Reply
from swansong.protocol.frames import HEAD, MAX_FIRST_FRAME, MAX_FRAME, MAX_PAYLOAD, TAG
from swansong.protocol.handshake import Identity

CORPUS = Path(__file__).parent / "corpus" / "codec"
ENDS = [CONTROLLER, RANK, OPERATOR]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
each_end = pytest.mark.parametrize("me", ENDS, ids=str)


def altered(data: bytes) -> list[bytes]:
    """The data with each byte altered, in three ways."""
    return [
        data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
        for place, flip in itertools.product(range(len(data)), (0x01, 0x80, 0xFF))
    ]


def part(number: int) -> m.PartDone:
    return m.PartDone(incident="i", attempt=number)


# -- in between: frames of a session, touched on their way ------------------------------------------


@each_kind
def test_a_frame_cut_short_at_any_byte_is_no_message(kind: type) -> None:
    speaker, _ = opened(*KINDS[kind])
    frame = speaker.send(sample(kind))
    for size in range(1, len(frame)):
        _, listener = opened(*KINDS[kind])
        assert listener.receive(frame[:size]) == []
        assert type(fault(listener.end())) is ProtocolError


@each_kind
def test_a_frame_with_any_byte_altered_is_no_message(kind: type) -> None:
    speaker, _ = opened(*KINDS[kind])
    frame = speaker.send(sample(kind))
    for wrong in altered(frame):
        _, listener = opened(*KINDS[kind])
        error = fault([*listener.receive(wrong), *listener.end()])
        in_the_length = wrong[:HEAD] != frame[:HEAD]
        assert isinstance(error, ProtocolError if in_the_length else AuthenticationError)
        assert listener.closed


@pytest.mark.parametrize(
    ("order", "arrive"),
    [
        ([0, 0], 1),
        ([0, 1, 0], 2),
        ([1], 0),
        ([1, 0], 0),
        ([0, 2], 1),
        ([0, 2, 1], 1),
    ],
    ids=["repeated", "repeated later", "first dropped", "swapped", "one dropped", "later ones swapped"],
)
def test_frames_out_of_order_end_the_channel(order: list[int], arrive: int) -> None:
    rank, controller = opened(RANK, CONTROLLER)
    frames = [rank.send(part(number)) for number in range(3)]
    events = controller.receive(b"".join(frames[number] for number in order))
    assert events[:-1] == [part(number) for number in range(arrive)]
    assert isinstance(fault(events[-1:]), AuthenticationError)
    assert f"frame {arrive} was altered" in str(fault(events[-1:]))


def test_a_frame_sent_back_is_no_message() -> None:
    for ends in SPEAKERS.values():
        mouth, _ = opened(*ends)
        kind = kinds_to(ends)[0]
        assert isinstance(fault(mouth.receive(mouth.send(sample(kind)))), AuthenticationError)


def test_a_frame_of_another_session_is_no_message() -> None:
    rank, _ = opened(RANK, CONTROLLER)
    other, later = channel(RANK, nonce=b"n" * 32), channel(CONTROLLER)
    (reply,) = other.receive(later.greeting)
    assert isinstance(reply, Reply)
    later.receive(other.greeting + reply.data)
    assert later.peer == RANK
    assert isinstance(fault(later.receive(rank.send(part(0)))), AuthenticationError)


@pytest.mark.parametrize("tag", [bytes(TAG), b"\xff" * TAG], ids=["zeros", "ones"])
def test_a_right_frame_with_a_wrong_tag_is_no_message(tag: bytes) -> None:
    rank, controller = opened(RANK, CONTROLLER)
    frame = rank.send(part(0))
    assert isinstance(fault(controller.receive(frame[:-TAG] + tag)), AuthenticationError)


def test_a_frame_without_its_tag_borrows_none() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    first, second = rank.send(part(0)), rank.send(part(1))
    assert isinstance(fault(controller.receive(first[:-TAG] + second)), AuthenticationError)


touch = st.sampled_from(["keep", "drop", "repeat", "swap", "flip", "cut", "insert", "reflect"])


@given(
    touches=st.lists(touch, min_size=1, max_size=8),
    seed=st.binary(min_size=1, max_size=40),
    at=st.integers(0),
)
@settings(max_examples=400)
def test_what_arrives_is_how_the_conversation_began(touches: list[str], seed: bytes, at: int) -> None:
    rank, controller = opened(RANK, CONTROLLER)
    sent = [part(number) for number in range(len(touches) + 1)]
    frames = [rank.send(message) for message in sent]
    back = controller.send(m.Farewell())
    stream = list(frames)
    for place, how in enumerate(touches):
        frame = frames[place]
        spot = at % len(frame)
        stream[place] = {
            "keep": frame,
            "drop": b"",
            "repeat": frame * 2,
            "swap": frames[place + 1] + frame,
            "flip": frame[:spot] + bytes([frame[spot] ^ (seed[0] or 1)]) + frame[spot + 1 :],
            "cut": frame[:spot],
            "insert": frame[:spot] + seed + frame[spot:],
            "reflect": back,
        }[how]
    arrived = b"".join(stream)
    whole = max(n for n in range(len(frames) + 1) if arrived.startswith(b"".join(frames[:n])))
    events = [*controller.receive(arrived), *controller.end()]
    assert events[:whole] == sent[:whole]
    if arrived == b"".join(frames[:whole]):
        assert len(events) == whole
    else:
        assert isinstance(fault(events[whole:]), ProtocolError)


# -- strangers: before anything is proved -----------------------------------------------------------


@each_end
@given(
    data=st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"\0\0\0\x57swansong\0\1" + rest)
)
@settings(max_examples=400)
def test_a_stranger_opens_nothing(me: Identity, data: bytes) -> None:
    end = channel(me)
    events = [*end.receive(data), *end.end()]
    assert isinstance(events[-1], Failed)
    assert end.peer is None
    assert not any(isinstance(event, Opened) for event in events)


@pytest.mark.parametrize("length", [0, MAX_FIRST_FRAME - HEAD + 1, MAX_FRAME, 2**31, 2**32 - 1])
def test_a_strangers_impossible_length_is_refused_at_its_fourth_byte(length: int) -> None:
    for me in ENDS:
        end, head = channel(me), length.to_bytes(HEAD, "big")
        assert end.receive(head[:3]) == []
        error = fault(end.receive(head[3:]))
        assert type(error) is ProtocolError
        assert f"announces a payload of {length} bytes, wanted 1 to 1020: whoever this is" in str(error)


def test_a_strangers_flood_is_not_kept() -> None:
    flood = b"\x5a" * (8 << 20)
    for beginning in (b"\0\0\3\xfc", b"\xff\xff\xff\xff", channel(RANK).greeting + b"\0\0\0\x20"):
        end = channel(CONTROLLER)
        tracemalloc.start()
        try:
            error = fault(end.receive(beginning + flood)[-1:])
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            later = end.receive(flood)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert isinstance(error, ProtocolError)
        assert later == []
        assert max(kept, peak) < 20_000


# -- a peer that has the token ----------------------------------------------------------------------


def judge(events: list[ChannelEvent], listener: Channel, kinds: tuple[type, ...]) -> None:
    """What a frame with a right tag came to: a message of the right kinds, or one short printable error."""
    (event,) = events
    if isinstance(event, Failed):
        assert type(event.error) in (ProtocolError, AuthenticationError)
        assert len(str(event.error)) < 300
        assert str(event.error).isprintable()
        assert event.error.__cause__ is event.error.__context__ is event.error.__traceback__ is None
        assert listener.closed
    else:
        assert isinstance(event, kinds)
        assert not listener.closed


def kinds_to(ends: tuple[Identity, Identity]) -> tuple[type, ...]:
    return tuple(kind for kind, others in KINDS.items() if others == ends)


@each_kind
def test_a_message_cut_short_at_any_byte_is_an_error(kind: type) -> None:
    payload = msgspec.msgpack.encode(sample(kind))
    for size in range(1, len(payload)):
        writer, listener = opened_to_writer(*KINDS[kind])
        assert type(fault(listener.receive(writer.frame(payload[:size])))) is ProtocolError


@each_kind
def test_a_message_with_any_byte_altered_is_a_message_or_an_error(kind: type) -> None:
    for wrong in altered(msgspec.msgpack.encode(sample(kind))):
        writer, listener = opened_to_writer(*KINDS[kind])
        judge(listener.receive(writer.frame(wrong)), listener, kinds_to(KINDS[kind]))


@given(payload=st.binary(min_size=1, max_size=300), ends=st.sampled_from(list(SPEAKERS.values())))
@settings(max_examples=400)
def test_any_bytes_are_a_message_or_an_error(payload: bytes, ends: tuple[Identity, Identity]) -> None:
    writer, listener = opened_to_writer(*ends)
    judge(listener.receive(writer.frame(payload)), listener, kinds_to(ends))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(kind=st.sampled_from(list(KINDS)), data=st.data())
@settings(max_examples=400)
def test_a_message_with_anything_in_a_field_is_a_message_or_an_error(kind: type, data: st.DataObject) -> None:
    fields = msgspec.to_builtins(sample(kind))
    name = data.draw(st.sampled_from([*fields, "unknown"]))
    fields[name] = data.draw(json_like)
    writer, listener = opened_to_writer(*KINDS[kind])
    judge(listener.receive(writer.frame(msgspec.msgpack.encode(fields))), listener, kinds_to(KINDS[kind]))


@pytest.mark.parametrize(
    ("opening", "filler"),
    [
        (b"", b"\x91"),
        (b"", b"\x81\xa1x"),
        (b"", b"\xdd\xff\xff\xff\xff"),
        (b"\x82\xa4type\xa7Goodbye", b"\x91"),
    ],
    ids=["arrays", "maps", "huge arrays", "keys"],
)
@pytest.mark.parametrize("within", [b"", b"\x82\xa4type\xa7Goodbye\xa1x"], ids=["outermost", "in a field"])
def test_nesting_as_deep_as_a_frame_is_an_error(within: bytes, opening: bytes, filler: bytes) -> None:
    room = MAX_PAYLOAD - len(within) - len(opening)
    writer, listener = opened_to_writer(RANK, CONTROLLER)
    frame = writer.frame(within + opening + filler * (room // len(filler)))
    judge(listener.receive(frame), listener, ())


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa8Register\xa5world\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xabStateReport\xa4held\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xabStateReport\xa8incident\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xa7Goodbye\xa1x\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa7Goodbye\xa1x\xc9\xff\xff\xff\xff\1",
    ],
    ids=["map", "array", "members", "components", "text", "bytes", "extension"],
)
def test_nothing_is_allocated_by_an_announced_count(payload: bytes) -> None:
    writer, listener = opened_to_writer(RANK, CONTROLLER)
    frame = writer.frame(payload)
    tracemalloc.start()
    try:
        assert type(fault(listener.receive(frame))) is ProtocolError
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [0, MAX_PAYLOAD + 1, 2**31, 2**32 - 1])
def test_a_peers_impossible_length_is_refused_at_its_fourth_byte(length: int) -> None:
    _, controller = opened(RANK, CONTROLLER)
    head = length.to_bytes(HEAD, "big")
    assert controller.receive(head[:3]) == []
    assert str(fault(controller.receive(head[3:]))).endswith(f"wanted 1 to {MAX_PAYLOAD}")


def test_nothing_is_allocated_by_an_announced_length() -> None:
    _, controller = opened(RANK, CONTROLLER)
    tracemalloc.start()
    try:
        assert controller.receive(MAX_PAYLOAD.to_bytes(HEAD, "big") + b"x") == []
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_a_frame_that_drips_costs_one_frame_of_memory() -> None:
    writer, controller = opened_to_writer(RANK, CONTROLLER)
    failed = m.PartFailed(incident="i", attempt=1, reason="x" * (MAX_PAYLOAD - 100))
    frame = writer.frame(msgspec.msgpack.encode(failed))
    tracemalloc.start()
    try:
        for start in range(0, len(frame) - 1, 512):
            assert controller.receive(frame[start : min(start + 512, len(frame) - 1)]) == []
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_FRAME
    finally:
        tracemalloc.stop()
    assert controller.receive(frame[-1:]) == [failed]


# -- the corpus -------------------------------------------------------------------------------------


def corpus(who: str) -> list[Path]:
    return sorted(CORPUS.glob(f"{who}-*.hex"))


def read(path: Path) -> tuple[str, bytes]:
    """(what it must come to, bytes): the first line says "# expect NAME", other "#" lines why."""
    first, *lines = path.read_text().splitlines()
    return first.removeprefix("# expect "), bytes.fromhex("".join(x for x in lines if not x.startswith("#")))


@pytest.mark.parametrize("path", corpus("stranger"), ids=lambda path: path.stem)
def test_corpus_of_strangers(path: Path) -> None:
    expected, data = read(path)
    for me in ENDS:
        for step in (len(data), 1):
            end = channel(me)
            pieces = [data[start : start + step] for start in range(0, len(data), step)]
            events = [*(event for piece in pieces for event in end.receive(piece)), *end.end()]
            assert end.peer is None
            assert isinstance(events[-1], Failed)
            assert me is not CONTROLLER or type(events[-1].error) is getattr(errors, expected)


@pytest.mark.parametrize("path", corpus("peer"), ids=lambda path: path.stem)
def test_corpus_of_peers(path: Path) -> None:
    expected, payload = read(path)
    writer, controller = opened_to_writer(RANK, CONTROLLER)
    events = controller.receive(writer.frame(payload))
    judge(events, controller, kinds_to((RANK, CONTROLLER)))
    found = fault(events) if isinstance(events[0], Failed) else events[0]
    assert type(found).__name__ == expected


def test_the_corpus_is_there() -> None:
    assert len(corpus("stranger")) >= 15
    assert len(corpus("peer")) >= 20
    assert TOKEN.job.hex() in (CORPUS / "stranger-zero-proof.hex").read_text()
