"""The mutual proof: who is let in, who is not, and what each end is told about why."""

from __future__ import annotations

import copy
import hashlib
import hmac
import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codec_support import (
    CONTROLLER,
    OPERATOR,
    OTHER_TOKEN,
    OURS,
    RANK,
    SECRET,
    THEIRS,
    TOKEN,
    channel,
    exchange,
    fault,
)
from swansong.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    SelfConnectionError,
    WrongJobError,
    WrongVersionError,
)
from swansong.protocol.codec import Channel, Failed, Opened, Reply
from swansong.protocol.frames import HEAD, MAX_FIRST_FRAME, plain_frame
from swansong.protocol.handshake import VERSION, Handshake, Identity, Role, Token
from swansong.protocol.messages import Goodbye

GOLDEN = Path(__file__).parents[1] / "golden" / "codec_handshake.txt"
LAYOUT = struct.Struct(">8sHBi16s16sq32s")
"""Of a greeting, spelled once more: the document of the wire is the source of both."""
FIELDS = ("magic", "version", "role", "rank", "job", "incarnation", "generation", "nonce")


def greeting(of: Channel, **changed: Any) -> bytes:
    """The greeting frame of an end, with other values in some fields."""
    fields = dict(zip(FIELDS, LAYOUT.unpack(of.greeting[HEAD:]), strict=True)) | changed
    return plain_frame(LAYOUT.pack(*fields.values()))


def proof(of: Channel, heard: bytes) -> bytes:
    """The proof frame with which an end answers a greeting."""
    (reply,) = of.receive(heard)
    assert isinstance(reply, Reply)
    return reply.data


# -- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize("client", [RANK, OPERATOR], ids=str)
def test_each_end_learns_who_the_other_is(client: Identity) -> None:
    ours, theirs = channel(client), channel(CONTROLLER)
    assert exchange(ours, theirs) == ([Opened(CONTROLLER)], [Opened(client)])
    assert (ours.peer, theirs.peer) == (CONTROLLER, client)


@pytest.mark.parametrize("seen", [-1, 0, CONTROLLER.generation, 2**63 - 1])
def test_generations_are_told_both_ways(seen: int) -> None:
    client = replace(RANK, generation=seen)
    assert exchange(channel(client), channel(CONTROLLER)) == ([Opened(CONTROLLER)], [Opened(client)])


def test_another_incarnation_of_the_job_is_let_in_and_told_apart() -> None:
    theirs = channel(CONTROLLER)
    exchange(channel(replace(RANK, incarnation=b"n" * 16)), theirs)
    assert theirs.peer is not None
    assert theirs.peer.incarnation == b"n" * 16 != CONTROLLER.incarnation


def test_an_early_message_waits_for_nothing() -> None:
    ours, theirs = channel(RANK), channel(CONTROLLER)
    ours.receive(theirs.greeting)
    copied = channel(RANK)
    (reply, opened) = copied.receive(theirs.greeting + proof(channel(CONTROLLER), ours.greeting))
    assert isinstance(reply, Reply)
    assert opened == Opened(CONTROLLER)
    events = theirs.receive(copied.greeting + reply.data + copied.send(Goodbye()))
    assert events[1:] == [Opened(RANK), Goodbye()]


# -- who is not -----------------------------------------------------------------------------------


def test_of_two_jobs_each_is_told_of_the_other_before_anything_is_proved() -> None:
    ours, theirs = channel(RANK, OTHER_TOKEN), channel(CONTROLLER)
    told, noticed = fault(ours.receive(theirs.greeting)), fault(theirs.receive(ours.greeting))
    assert isinstance(told, WrongJobError)
    assert isinstance(noticed, WrongJobError)
    assert (told.want, told.got) == (OTHER_TOKEN.job.hex(), TOKEN.job.hex()) == (noticed.got, noticed.want)
    assert str(told) == (
        f"the port belongs to job {told.got}, wanted {told.want}: "
        "choose another port, or use that job's token"
    )
    assert str(noticed) == f"a process of job {noticed.got} came to the controller of job {noticed.want}"


def test_who_claims_the_job_without_its_token_has_proved_nothing() -> None:
    for client in (RANK, OPERATOR):
        theirs, thief = channel(CONTROLLER), channel(client, OTHER_TOKEN)
        theirs.receive(greeting(thief, job=TOKEN.job))
        error = fault(theirs.receive(proof(thief, greeting(theirs, job=OTHER_TOKEN.job))))
        assert isinstance(error, AuthenticationError)
        assert f"who says to be {client} has not proved" in str(error)
        assert theirs.peer is None


def test_a_false_controller_has_proved_nothing() -> None:
    ours, thief = channel(RANK), channel(CONTROLLER, OTHER_TOKEN)
    ours.receive(greeting(thief, job=TOKEN.job))
    error = fault(ours.receive(proof(thief, greeting(ours, job=OTHER_TOKEN.job))))
    assert isinstance(error, AuthenticationError)
    with pytest.raises(ProtocolError, match="the channel failed"):
        ours.send(Goodbye())


@pytest.mark.parametrize("me", [RANK, OPERATOR, CONTROLLER], ids=str)
def test_a_connection_to_itself_is_noticed(me: Identity) -> None:
    end = channel(me)
    error = fault(end.receive(end.greeting))
    assert isinstance(error, SelfConnectionError)
    assert "nobody listens on that port" in str(error)


def test_a_proof_sent_back_proves_nothing() -> None:
    ours = channel(RANK)
    mirrored = proof(ours, greeting(ours, role=0, rank=-1, nonce=b"m" * 32))
    assert isinstance(fault(ours.receive(mirrored)), AuthenticationError)


@pytest.mark.parametrize(
    ("me", "other"),
    [(RANK, RANK), (RANK, OPERATOR), (OPERATOR, RANK), (OPERATOR, OPERATOR), (CONTROLLER, CONTROLLER)],
    ids=str,
)
def test_roles_that_have_nothing_to_say_to_each_other(me: Identity, other: Identity) -> None:
    error = fault(channel(me).receive(channel(other, nonce=b"n" * 32).greeting))
    assert type(error) is ProtocolError
    assert f"{me} has nothing to say to {other}" in str(error)


@pytest.mark.parametrize("version", [0, VERSION + 1, 65535])
@pytest.mark.parametrize("more", [b"", b"later fields"], ids=["as long", "longer"])
def test_another_version_is_named_whatever_its_greeting_holds(version: int, more: bytes) -> None:
    for me in (RANK, CONTROLLER):
        payload = b"swansong" + version.to_bytes(2, "big") + b"?" * 77 + more
        error = fault(channel(me).receive(plain_frame(payload)))
        assert isinstance(error, WrongVersionError)
        assert (error.want, error.got) == (VERSION, version)
        assert f"version {version} spoken, wanted {VERSION}" in str(error)


@pytest.mark.parametrize(
    "changed",
    [
        {"magic": b"swanlake"},
        {"role": 3},
        {"role": 255},
        {"role": 0},
        {"role": 2},
        {"rank": -1},
        {"rank": -2},
        {"generation": -2},
        {"generation": -(2**63)},
    ],
    ids=str,
)
def test_a_greeting_that_cannot_be_is_the_peers_error(changed: dict[str, Any]) -> None:
    error = fault(channel(CONTROLLER).receive(greeting(channel(RANK), **changed)))
    assert type(error) is ProtocolError
    assert str(error).startswith("greeting: ")


@pytest.mark.parametrize("length", [0, 1, 9, 10, 86, 88, MAX_FIRST_FRAME - HEAD])
def test_a_greeting_has_one_length(length: int) -> None:
    payload = (channel(RANK).greeting[HEAD:] + bytes(2000))[:length]
    assert type(fault(channel(CONTROLLER).receive(plain_frame(payload)))) is ProtocolError


# -- somebody in between --------------------------------------------------------------------------


def alterations(frame: bytes) -> list[bytes]:
    """A frame with each byte altered."""
    return [
        frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :]
        for place, flip in itertools.product(range(len(frame)), (0x01, 0x80))
    ]


def over(client: Identity, *, up: Callable[[bytes], bytes], down: Callable[[bytes], bytes]) -> bool:
    """Carry a handshake through somebody who alters frames; True if any end opened."""
    ours, theirs = channel(client), channel(CONTROLLER)
    at_ours = ours.receive(down(theirs.greeting))
    at_theirs = theirs.receive(up(ours.greeting))
    for event in list(at_theirs):
        if isinstance(event, Reply):
            at_ours += ours.receive(down(event.data))
    for event in list(at_ours):
        if isinstance(event, Reply):
            at_theirs += theirs.receive(up(event.data))
    for end, events in ((ours, at_ours), (theirs, at_theirs)):
        assert end.peer is not None or isinstance([*events, *end.end()][-1], Failed)
    return any(isinstance(event, Opened) for event in at_ours + at_theirs)


def untouched(frame: bytes) -> bytes:
    return frame


def test_any_altered_byte_of_a_greeting_opens_neither_end() -> None:
    assert over(RANK, up=untouched, down=untouched)
    for end, way in ((channel(RANK), "up"), (channel(CONTROLLER), "down")):
        for altered in alterations(end.greeting):
            ways = {"up": untouched, "down": untouched}
            ways[way] = lambda frame, was=end.greeting, now=altered: now if frame == was else frame
            assert not over(RANK, **ways), altered


def test_any_altered_byte_of_a_proof_does_not_open_who_gets_it() -> None:
    ours, theirs = channel(RANK), channel(CONTROLLER)
    mine, controllers = proof(ours, theirs.greeting), proof(theirs, ours.greeting)
    for me, heard, right in ((CONTROLLER, ours.greeting, mine), (RANK, theirs.greeting, controllers)):
        for wrong in alterations(right):
            end = channel(me)
            events = [*end.receive(heard + wrong), *end.end()]
            assert isinstance(events[-1], Failed)
            assert end.peer is None


@pytest.mark.parametrize(
    "lie",
    [
        {"rank": 4},
        {"incarnation": b"x" * 16},
        {"generation": 9},
        {"nonce": b"x" * 32},
        {"role": 2, "rank": -1},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_every_field_of_a_greeting_is_proved(lie: dict[str, Any]) -> None:
    ours, theirs = channel(RANK), channel(CONTROLLER)
    theirs.receive(greeting(ours, **lie))
    assert isinstance(fault(theirs.receive(proof(ours, theirs.greeting))), AuthenticationError)


@pytest.mark.parametrize("of", ["rank", "controller"])
def test_a_recorded_handshake_opens_nothing_later(of: str) -> None:
    ours, theirs = channel(RANK), channel(CONTROLLER)
    recorded = {
        "rank": ours.greeting + proof(ours, theirs.greeting),
        "controller": theirs.greeting + proof(theirs, ours.greeting),
    }[of]
    later = channel(CONTROLLER if of == "rank" else RANK, nonce=b"n" * 32)
    reply, failed = later.receive(recorded)
    assert isinstance(reply, Reply)
    assert isinstance(fault([failed]), AuthenticationError)


def test_a_proof_of_another_length_proves_nothing() -> None:
    for length in (1, 31, 33, 1000):
        ours, theirs = channel(RANK), channel(CONTROLLER)
        right = proof(ours, theirs.greeting)[HEAD:]
        events = theirs.receive(ours.greeting + plain_frame((right + bytes(1000))[:length]))
        assert isinstance(fault(events[1:]), AuthenticationError)


def test_a_proof_cannot_come_before_a_greeting() -> None:
    with pytest.raises(ProtocolError, match="before a greeting"):
        Handshake(TOKEN, RANK, OURS).hear_proof(bytes(32))


# -- keys -----------------------------------------------------------------------------------------


def keys(client: Identity = RANK, ours: bytes = OURS, theirs: bytes = THEIRS) -> tuple[bytes, bytes]:
    """(to the controller, from the controller), after checking that both ends have the same."""
    one, other = Handshake(TOKEN, client, ours), Handshake(TOKEN, CONTROLLER, theirs)
    to_other, to_one = one.hear_greeting(other.greeting), other.hear_greeting(one.greeting)
    at_one, at_other = one.hear_proof(to_one), other.hear_proof(to_other)
    assert at_one.sending_key == at_other.receiving_key
    assert at_one.receiving_key == at_other.sending_key
    return at_one.sending_key, at_one.receiving_key


def test_every_direction_of_every_session_has_a_key_of_its_own() -> None:
    sessions = [
        keys(),
        keys(ours=b"n" * 32),
        keys(theirs=b"n" * 32),
        keys(replace(RANK, rank=4)),
        keys(replace(RANK, incarnation=b"n" * 16)),
        keys(OPERATOR),
    ]
    assert len({key for session in sessions for key in session}) == 2 * len(sessions)


def test_proofs_and_keys_are_as_documented() -> None:
    def mac(text: bytes) -> bytes:
        return hmac.new(SECRET, text, hashlib.sha256).digest()

    job = mac(b"swansong job")[:16]
    mine = struct.pack(">8sHBi16s16sq32s", b"swansong", 1, 1, 3, job, b"r" * 16, 6, OURS)
    controllers = struct.pack(
        ">8sHBi16s16sq32s", b"swansong", 1, 0, -1, job, b"c" * 16, 7_000_000_000, THEIRS
    )
    transcript = controllers + mine
    ours, theirs = channel(RANK), channel(CONTROLLER)
    assert ours.greeting == b"\0\0\0\x57" + mine
    assert theirs.greeting == b"\0\0\0\x57" + controllers
    assert proof(ours, theirs.greeting) == b"\0\0\0\x20" + mac(b"swansong proof\x01" + transcript)
    assert proof(theirs, ours.greeting) == b"\0\0\0\x20" + mac(b"swansong proof\x00" + transcript)
    assert keys() == (mac(b"swansong key\x01" + transcript), mac(b"swansong key\x00" + transcript))


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("material", [b"", b"x" * 31, b"x" * 33, "x" * 32, bytearray(32), None])
def test_a_token_has_32_bytes_and_is_not_shown(material: Any) -> None:
    with pytest.raises(ConfigError, match="token: wanted") as caught:
        Token(material)
    assert "xxx" not in str(caught.value)


def test_a_token_shows_its_job_only() -> None:
    assert repr(Token(SECRET)) == f"Token(job {TOKEN.job.hex()})"
    assert SECRET[:16] not in TOKEN.job
    assert TOKEN.job != OTHER_TOKEN.job
    with pytest.raises(TypeError, match="not copied"):
        copy.copy(TOKEN)


def test_a_session_shows_no_key() -> None:
    one, other = Handshake(TOKEN, RANK, OURS), Handshake(TOKEN, CONTROLLER, THEIRS)
    one.hear_greeting(other.greeting)
    session = one.hear_proof(other.hear_greeting(one.greeting))
    assert repr(session) == f"Session(peer={CONTROLLER!r})"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"role": Role.RANK}, "rank: -1"),
        ({"role": Role.RANK, "rank": -2}, "rank: -2"),
        ({"role": Role.RANK, "rank": 2**31}, f"rank: {2**31}"),
        ({"role": Role.OPERATOR, "rank": 0}, "rank: 0"),
        ({"role": Role.CONTROLLER, "rank": 0, "generation": 0}, "rank: 0"),
        ({"role": Role.CONTROLLER}, "generation: -1"),
        ({"role": Role.OPERATOR, "generation": -2}, "generation: -2"),
        ({"role": Role.OPERATOR, "generation": 2**63}, f"generation: {2**63}"),
        ({"role": Role.OPERATOR, "incarnation": b"short"}, "incarnation: wanted 16 bytes"),
        ({"role": Role.OPERATOR, "incarnation": "x" * 16}, "incarnation: wanted 16 bytes"),
    ],
    ids=str,
)
def test_an_identity_that_cannot_be_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Identity(**wrong)


# -- bytes ----------------------------------------------------------------------------------------


def write_all(golden: Path) -> None:
    """Make the golden file anew, after a change of the protocol that was meant."""
    golden.write_text("".join(f"{name} {frame.hex()}\n" for name, frame in frames().items()))


def frames() -> dict[str, bytes]:
    """Every frame of two handshakes of fixed nonces."""
    said: dict[str, bytes] = {}
    for client in (RANK, OPERATOR):
        ours, theirs = channel(client), channel(CONTROLLER)
        name = client.role.name.lower()
        said[f"{name}-greeting"], said["controller-greeting"] = ours.greeting, theirs.greeting
        said[f"{name}-proof"] = proof(ours, theirs.greeting)
        said[f"controller-proof-to-{name}"] = proof(theirs, ours.greeting)
    return said


def test_bytes_of_the_handshake_are_those_of_the_golden_file() -> None:
    lines = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert lines == {name: frame.hex() for name, frame in frames().items()}
