"""Messages through two open channels: what is said is what is heard, in order, once, and by the right end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_support import (
    CONTROLLER,
    KINDS,
    OPERATOR,
    RANK,
    SECRET,
    SPEAKERS,
    TOKEN,
    channel,
    exchange,
    fault,
    messages,
    opened,
    opened_to_writer,
    sample,
)
from swansong.errors import AuthenticationError, ConfigError, ProtocolError
from swansong.policy.cut import Held
from swansong.protocol import messages as m
from swansong.protocol import operator
from swansong.protocol.codec import Channel, Failed, Opened, Reply
from swansong.protocol.frames import HEAD, MAX_FRAME, MAX_PAYLOAD, TAG, FrameReader
from swansong.protocol.operator import MAX_TEXT, short

GOLDEN = Path(__file__).parents[1] / "golden" / "codec_messages.txt"
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def register(rank: int) -> m.Register:
    member = m.Member(rank=rank, host="a", pid=1, start_time=2, components=())
    return m.Register(member=member, world_size=8)


def failed_part(reason: str) -> m.PartFailed:
    return m.PartFailed(incident="i", attempt=1, reason=reason)


@each_kind
@given(data=st.data())
@settings(max_examples=25)
def test_every_message_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    speaker, listener = opened(*KINDS[kind])
    message = data.draw(messages(kind))
    assert listener.receive(speaker.send(message)) == [message]


@given(
    said=st.lists(st.sampled_from(list(KINDS)).filter(lambda kind: KINDS[kind][0] is RANK)), data=st.data()
)
@settings(max_examples=50)
def test_it_does_not_matter_how_the_stream_is_cut(said: list[type], data: st.DataObject) -> None:
    rank, controller = channel(RANK), channel(CONTROLLER)
    (_, proof), _ = _both_replies(rank, controller)
    sent = [sample(kind) for kind in said]
    stream = rank.greeting + proof + b"".join(map(rank.send, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    listener = channel(CONTROLLER)
    events = [
        event
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for event in listener.receive(stream[start:end])
    ]
    assert isinstance(events[0], Reply)
    assert events[1:] == [Opened(RANK), *sent]


def _both_replies(rank: Channel, controller: Channel) -> tuple[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Open both; return (greeting, proof) of each."""
    (mine,), (theirs,) = rank.receive(controller.greeting), controller.receive(rank.greeting)
    assert isinstance(mine, Reply)
    assert isinstance(theirs, Reply)
    assert rank.receive(theirs.data) == [Opened(CONTROLLER)]
    assert controller.receive(mine.data) == [Opened(RANK)]
    return (rank.greeting, mine.data), (controller.greeting, theirs.data)


def test_one_byte_at_a_time() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    sent = [sample(kind) for kind, (speaker, _) in KINDS.items() if speaker is RANK]
    stream = b"".join(map(rank.send, sent))
    assert [e for byte in stream for e in controller.receive(bytes([byte]))] == sent


def test_both_directions_at_once() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    for number in range(3):
        freeze, part = m.Freeze(incident=str(number)), m.PartDone(incident="i", attempt=number)
        up, down = rank.send(part), controller.send(freeze)
        assert (controller.receive(up), rank.receive(down)) == ([part], [freeze])


def test_the_largest_message_fits_and_a_larger_one_changes_nothing() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    spare = MAX_PAYLOAD - len(msgspec.msgpack.encode(failed_part("x" * 70_000))) + 70_000
    largest, larger = failed_part("x" * spare), failed_part("x" * (spare + 1))
    with pytest.raises(ProtocolError, match=rf"{MAX_PAYLOAD + 1} bytes .* at most {MAX_PAYLOAD}"):
        rank.send(larger)
    frame = rank.send(largest)
    assert len(frame) == MAX_FRAME
    assert controller.receive(frame) == [largest]


def test_text_that_is_no_unicode_arrives_escaped() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    raised = m.Fault(kind=m.FaultKind.RAISED, rank=3, what="no file 'caf\udce9'", traceback="é\n")
    told = msgspec.structs.replace(raised, what="no file 'caf\\udce9'")
    assert controller.receive(rank.send(m.FaultReport(fault=raised))) == [m.FaultReport(fault=told)]
    odd = m.StateReport(incident="i", held={"k\udc80": Held(1)}, settled=True, boundary=None, main="\ud800")
    even = msgspec.structs.replace(odd, held={"k\\udc80": Held(1)}, main="\\ud800")
    assert controller.receive(rank.send(odd)) == [even]
    member = register(0).member
    world = msgspec.structs.replace(register(3), world=(msgspec.structs.replace(member, host="\udcff"),))
    (heard,) = controller.receive(rank.send(world))
    assert isinstance(heard, m.Register)
    assert heard.world == (msgspec.structs.replace(member, host="\\udcff"),)


def test_fields_of_a_later_release_are_passed_over() -> None:
    writer, controller = opened_to_writer(RANK, CONTROLLER)
    payload = msgspec.msgpack.encode({"type": "Goodbye", "mood": ["fine", {"a": 1}]})
    assert controller.receive(writer.frame(payload)) == [m.Goodbye()]


# -- who may say what -----------------------------------------------------------------------------


def test_a_connection_is_bound_to_the_rank_that_was_proved() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    assert controller.receive(rank.send(register(RANK.rank))) == [register(RANK.rank)]
    error = fault(controller.receive(rank.send(register(4))))
    assert isinstance(error, AuthenticationError)
    assert "rank 3 by its proof registers as rank 4" in str(error)
    assert controller.closed


@each_kind
def test_a_message_of_another_direction_is_the_speakers_error(kind: type) -> None:
    for other in (ends for ends in SPEAKERS.values() if ends != KINDS[kind]):
        writer, listener = opened_to_writer(*other)
        error = fault(listener.receive(writer.frame(msgspec.msgpack.encode(sample(kind)))))
        assert type(error) is ProtocolError
        assert str(other[0]) in str(error)
        assert listener.closed


@each_kind
def test_a_message_that_is_not_this_ends_to_send_is_refused_here(kind: type) -> None:
    for speaker, listener in (ends for ends in SPEAKERS.values() if ends != KINDS[kind]):
        mouth, ear = opened(speaker, listener)
        with pytest.raises(TypeError, match=f"{speaker} does not send {kind.__name__} to {listener}"):
            mouth.send(sample(kind))
        right = next(sample(other) for other, ends in KINDS.items() if ends == (speaker, listener))
        assert ear.receive(mouth.send(right)) == [right]


# -- beginning and end ----------------------------------------------------------------------------


def test_nothing_is_sent_before_the_handshake_is_done() -> None:
    rank, controller = channel(RANK), channel(CONTROLLER)
    with pytest.raises(ProtocolError, match="handshake is not done"):
        rank.send(m.Goodbye())
    rank.receive(controller.greeting)
    with pytest.raises(ProtocolError, match="handshake is not done"):
        rank.send(m.Goodbye())
    assert (rank.peer, rank.closed) == (None, False)


def test_an_end_between_frames_is_an_end() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    controller.receive(rank.send(m.Goodbye()))
    assert controller.end() == []
    assert controller.closed
    assert controller.end() == []
    with pytest.raises(ProtocolError, match="the connection has ended"):
        controller.send(m.Farewell())


def test_an_end_within_a_frame_is_a_fault() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    assert controller.receive(rank.send(m.Goodbye())[:-1]) == []
    assert "into a frame" in str(fault(controller.end()))
    assert controller.closed


def test_an_end_within_the_handshake_is_a_fault() -> None:
    for heard in (b"", channel(RANK).greeting):
        controller = channel(CONTROLLER)
        controller.receive(heard)
        assert "before the handshake was done" in str(fault(controller.end()))


def test_what_came_before_a_fault_counts_and_nothing_after_it() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    good, bad, late = (rank.send(failed_part(str(number))) for number in range(3))
    events = controller.receive(good + bad[:-1] + bytes([bad[-1] ^ 1]) + late)
    assert events[0] == failed_part("0")
    assert isinstance(fault(events[1:]), AuthenticationError)
    assert controller.receive(late) == []
    assert controller.end() == []
    with pytest.raises(ProtocolError, match="the channel failed: frame 1 was altered"):
        controller.send(m.Farewell())


# -- secrets, limits, bytes -----------------------------------------------------------------------


def test_no_secret_is_shown() -> None:
    rank, controller = opened(RANK, CONTROLLER)
    assert repr(rank) == "Channel(rank 3 to the controller, open)"
    assert repr(channel(OPERATOR)) == "Channel(the operator to nobody yet, greeting)"
    shown = repr(rank) + repr(controller) + rank.greeting.hex() + repr(vars(rank))
    assert SECRET.hex() not in shown
    assert repr(SECRET) not in shown


@pytest.mark.parametrize("nonce", [b"", b"x" * 31, b"x" * 33, bytearray(32)])
def test_a_nonce_has_32_bytes(nonce: Any) -> None:
    with pytest.raises(ConfigError, match="nonce: wanted 32 bytes"):
        Channel(TOKEN, RANK, nonce=nonce)


def test_a_reader_without_a_whole_frame_says_how_much_it_holds() -> None:
    reader = FrameReader()
    reader.feed(b"\0\0\0\2a")
    assert (reader.next(), reader.pending) == (None, 5)
    reader.feed(b"b")
    assert (reader.next(), reader.pending) == (b"ab", 0)


def test_texts_for_operators_are_cut() -> None:
    assert short("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert short("x" * (MAX_TEXT + 1)) == "x" * (MAX_TEXT - 3) + "..."


def test_an_answer_with_too_much_in_it_is_refused() -> None:
    controller, client = opened(CONTROLLER, OPERATOR)
    lost = operator.RankStatus(rank=0, state="lost", state_s=1.0)
    ranks = tuple(msgspec.structs.replace(lost, rank=rank) for rank in range(operator.MAX_LISTED + 1))
    status = operator.Status(
        phase="training", phase_s=1.0, world_size=300, generation=1, up_s=2.0, protected=True, ranks=ranks
    )
    fits = msgspec.structs.replace(status, ranks=ranks[:-1])
    assert client.receive(controller.send(fits)) == [fits]
    assert isinstance(fault(client.receive(controller.send(status))), ProtocolError)
    controller, client = opened(CONTROLLER, OPERATOR)
    declined = operator.Declined(reason="x" * (MAX_TEXT + 1))
    assert isinstance(fault(client.receive(controller.send(declined))), ProtocolError)


@each_kind
def test_operators_get_json(kind: type) -> None:
    message = sample(kind)
    assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message


def write_all(golden: Path) -> None:
    """Make the golden file anew, after a change of the protocol that was meant."""
    golden.write_text("".join(f"{kind.__name__} {frame(kind).hex()}\n" for kind in KINDS))


def frame(kind: type) -> bytes:
    """The first frame of a session of fixed nonces."""
    return opened(*KINDS[kind])[0].send(sample(kind))


def test_bytes_of_every_message_are_those_of_the_golden_file() -> None:
    lines = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert lines.keys() == {kind.__name__ for kind in KINDS}
    for kind in KINDS:
        assert lines[kind.__name__] == frame(kind).hex(), kind.__name__
        assert opened(*KINDS[kind])[1].receive(bytes.fromhex(lines[kind.__name__])) == [sample(kind)]


def test_a_frame_is_as_documented() -> None:
    frame = opened(RANK, CONTROLLER)[0].send(m.Goodbye())
    payload = b"\x81\xa4type\xa7Goodbye"
    assert frame[: HEAD + len(payload)] == b"\0\0\0\x0e" + payload
    assert len(frame) == HEAD + len(payload) + TAG


def test_an_operator_reads_the_answers_to_both_requests() -> None:
    client, controller = channel(OPERATOR), channel(CONTROLLER)
    exchange(client, controller)
    asked = operator.PersistRequest(who="somebody")
    assert controller.receive(client.send(operator.StatusRequest()) + client.send(asked)) == [
        operator.StatusRequest(),
        asked,
    ]
    begun = operator.PersistBegun(incident="i")
    ending = operator.Ending(incident="i", outcome=m.Outcome.SAVED, step=4, path="p")
    ended = operator.PersistEnded(ending=ending)
    assert client.receive(controller.send(begun) + controller.send(ended)) == [begun, ended]
    closed = operator.Closed(reason="every rank has finished", last=ending)
    assert client.receive(controller.send(closed)) == [closed]
    assert not any(isinstance(event, Failed) for event in client.end())
