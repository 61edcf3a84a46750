"""One connection: both ends over real sockets, plain and under TLS, and what goes wrong with either."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engine_support import INCARNATION, TOKEN, Rank, serve, until, world
from swansong.engine.address import parse_address, resolve
from swansong.engine.guests import Limits
from swansong.engine.inquiry import ask
from swansong.engine.tls import Tls
from swansong.engine.transport import MAX_QUEUED, Connection, Link, connect, tune
from swansong.errors import ConfigError, ProtocolError, SelfConnectionError, UnreachableError
from swansong.protocol import messages as m
from swansong.protocol.codec import Channel, Opened
from swansong.protocol.handshake import Identity, Role
from swansong.protocol.operator import PersistRequest, Status, StatusRequest

CONTROLLER = Identity(role=Role.CONTROLLER, incarnation=INCARNATION, generation=7)
RANK = Identity(role=Role.RANK, rank=0, incarnation=INCARNATION)


def link(sock: socket.socket, me: Identity, nonce: bytes, tls: Tls | None = None) -> Link:
    return Link(sock, Channel(TOKEN, me, nonce=nonce * 32), tls)


@contextmanager
def linked(certificate: Path | None = None) -> Iterator[tuple[Link, Link]]:
    """Two ends, a controller's and a rank's, their handshake done."""
    ends = socket.socketpair()
    served = offered = None
    if certificate is not None:
        served = Tls(server_context(certificate), server=True)
        offered = Tls(client_context(certificate), server=False, host="127.0.0.1")
    controller, rank = link(ends[0], CONTROLLER, b"c", served), link(ends[1], RANK, b"r", offered)
    while controller.peer is None or rank.peer is None:
        for one in (controller, rank):
            one.flush()
            one.receive()
    yield controller, rank
    controller.close()
    rank.close()


def test_handshake_tells_each_end_who_the_other_is() -> None:
    ends = socket.socketpair()
    controller, rank = link(ends[0], CONTROLLER, b"c"), link(ends[1], RANK, b"r")
    for one in (controller, rank, controller):
        one.flush()
    assert rank.receive() == []
    rank.flush()
    assert controller.receive() == [Opened(RANK)]
    controller.flush()
    assert rank.receive() == [Opened(CONTROLLER)]
    controller.close()
    rank.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "under TLS"])
def test_messages_larger_than_the_socket_takes_arrive_whole_and_in_order(
    secure: bool, certificate: Path
) -> None:
    texts = [character * 900_000 for character in "abc"]
    with linked(certificate if secure else None) as (controller, rank):
        for text in texts:
            rank.send(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0, traceback=text)))
        heard: list[str] = []
        while len(heard) < 3:
            rank.flush()
            heard += [
                event.fault.traceback for event in controller.receive() if isinstance(event, m.FaultReport)
            ]
        assert heard == texts
        assert not rank.blocked


def test_message_too_large_for_a_frame_is_refused_and_the_link_goes_on() -> None:
    with linked() as (controller, rank):
        rank.send(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0, traceback="x" * (1 << 20))))
        with pytest.raises(ProtocolError, match="cannot be sent"):
            rank.flush()
        rank.send(m.Goodbye())
        rank.flush()
        assert controller.receive() == [m.Goodbye()]


def test_peer_that_does_not_read_makes_no_more_wait_than_the_bound() -> None:
    with linked() as (controller, _):
        release = m.Release(
            incident="i", outcome=m.Outcome.NOTHING, action=m.Action.STOP, reason="r" * 100_000
        )
        for _ in range(MAX_QUEUED):
            controller.send(release)
        controller.flush()  # as much as the kernel takes
        assert controller.blocked
        for _ in range(MAX_QUEUED - controller.waiting):
            controller.send(release)
        with pytest.raises(ProtocolError, match="does not read"):
            controller.send(release)


def test_what_waits_for_a_peer_that_is_gone_is_forgotten() -> None:
    with linked() as (controller, rank):
        for _ in range(10):
            rank.send(m.FaultReport(fault=m.Fault(kind=m.FaultKind.RAISED, rank=0, traceback="x" * 900_000)))
        rank.flush()
        assert rank.blocked
        controller.close()
        until(lambda: rank.receive() == [] and rank.ended)
        rank.flush()
        assert rank.waiting == 0


def test_held_message_keeps_what_follows_until_it_is_let_go() -> None:
    with linked() as (controller, rank):
        order = m.Save(incident="i", attempt=1, step=2, keys=("k",))
        for message in (m.Hold(incident="i"), order, m.Void(incident="i", attempt=1)):
            controller.send(message)
        controller.hold = order
        controller.flush()
        assert rank.receive() == [m.Hold(incident="i")]
        assert not controller.has_more
        controller.hold = None
        controller.flush()
        assert rank.receive() == [order, m.Void(incident="i", attempt=1)]


def test_end_that_finishes_is_heard_out() -> None:
    with linked() as (controller, rank):
        controller.send(m.Refused(reason="no", retry=False))
        controller.finish()
        rank.send(m.Goodbye())
        rank.flush()
        controller.flush()
        assert rank.receive() == [m.Refused(reason="no", retry=False)]
        assert rank.receive() == []
        assert rank.ended
        assert rank.error is None
        assert not controller.discard()  # the goodbye, which is not looked at
        rank.close()
        assert controller.discard()


def test_stream_that_ends_within_a_frame_is_an_error() -> None:
    ends = socket.socketpair()
    controller = link(ends[0], CONTROLLER, b"c")
    ends[1].sendall(b"\0\0\0\x57swan")
    ends[1].close()
    controller.receive()
    (failed,) = controller.receive()
    assert controller.ended
    assert "before the handshake was done" in str(failed.error)  # type: ignore[union-attr]
    controller.close()


def test_connection_to_itself_is_told_from_a_controller() -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.connect(sock.getsockname())  # as happens by chance on a dead port that the kernel gives out
    with Connection(link(sock, RANK, b"r"), "here") as connection, pytest.raises(SelfConnectionError):
        connection.handshake(deadline=float("inf"))


def test_port_where_nobody_listens_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = resolve("127.0.0.1", server.getsockname()[1])
    with pytest.raises(UnreachableError, match="refused") as caught:
        connect(address, TOKEN, RANK, timeout_s=5)
    assert isinstance(caught.value, OSError)


def test_listener_that_says_nothing_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = resolve("127.0.0.1", server.getsockname()[1])
        with pytest.raises(UnreachableError, match="did not answer in time"):
            connect(address, TOKEN, RANK, timeout_s=0.2)


def test_listener_of_another_protocol_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = resolve("127.0.0.1", server.getsockname()[1])

        def greet() -> None:
            with server.accept()[0] as sock:
                sock.sendall(b"220 mail.example.com ESMTP\r\n")
                sock.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ProtocolError, match="another protocol"):
            connect(address, TOKEN, RANK, timeout_s=5)
        thread.join()


def test_controller_that_ends_is_noticed_by_who_waits() -> None:
    with serve(1) as served, world(served, 1) as (rank,):
        served.server.stop("enough")
        with pytest.raises(UnreachableError, match="the connection ended"):
            rank.connection.receive(20)
        assert rank.connection.ended
        assert served.wait_closed() == "enough"


def test_connection_in_a_selector_gives_what_came() -> None:
    with serve(1) as served, Rank(served, 0) as rank:
        rank.register(1)
        heard: list[object] = []
        until(lambda: heard.extend(rank.connection.poll()) or len(heard) >= 2)
        assert [type(message) for message in heard] == [m.Welcome, m.World]
        assert not rank.connection.wants_write
        assert rank.connection.peer.generation == served.server.generation


def test_operator_that_gets_no_answer_in_time_is_told_what_has_begun() -> None:
    with serve(1) as served, world(served, 1), pytest.raises(UnreachableError, match="did not end in"):
        ask(served.address, TOKEN, PersistRequest(who="somebody"), timeout_s=0.3)


@pytest.mark.parametrize(
    ("timeout_s", "idle", "interval", "probes"), [(10, 5, 1, 5), (60, 30, 2, 15), (1, 1, 1, 1)]
)
def test_silent_host_ends_a_connection_after_its_timeout(
    timeout_s: float, idle: int, interval: int, probes: int
) -> None:
    with socket.socket() as sock:
        tune(sock, host_timeout_s=timeout_s)
        got = {
            option: sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
                socket.TCP_NODELAY,
            )
        }
        assert list(got.values()) == [idle, interval, probes, timeout_s * 1000, 1]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:2000", "127.0.0.1", 2000), ("[::1]:2000", "::1", 2000), ("localhost:1", "localhost", 1)],
)
def test_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text", ["", "2000", "host", "host:", "host:x", "::1:2000", "h:99999", "h:-1", ":80", "h:٣"]
)
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1 and its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "controller")])
    now = datetime.datetime(2020, 1, 1)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=36500))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "controller.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate)
    return context


def client_context(trusted: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if trusted is not None:
        context.load_verify_locations(trusted)
    return context


def test_ranks_and_operators_are_served_under_tls(certificate: Path) -> None:
    trusting = client_context(certificate)
    with serve(2, tls=server_context(certificate)) as served, world(served, 2, tls=trusting):
        answer = ask(served.address, TOKEN, StatusRequest(), timeout_s=20, tls=trusting)
        assert isinstance(answer, Status)
        assert answer.protected


def test_certificate_that_is_not_trusted_is_refused(certificate: Path) -> None:
    with serve(1, tls=server_context(certificate)) as served:
        with pytest.raises(ProtocolError, match="certificate verify failed"):
            Rank(served, 0, tls=client_context(None))
        assert until(lambda: [note for note in served.notes if "TLS" in note])
        with world(served, 1, tls=client_context(certificate)):
            pass


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" + bytes(100), b"\xff" * 20_000]
)
def test_noise_at_a_tls_port_ends_only_its_own_connection(certificate: Path, said: bytes) -> None:
    with serve(1, tls=server_context(certificate), limits=Limits(handshake_timeout_s=0.3)) as served:
        with (
            socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as sock,
            suppress(OSError),
        ):
            sock.sendall(said)
            while sock.recv(65536):
                pass
        with world(served, 1, tls=client_context(certificate)):
            pass


def test_end_without_tls_does_not_get_in(certificate: Path) -> None:
    with (
        serve(1, tls=server_context(certificate)) as served,
        pytest.raises((ProtocolError, UnreachableError)),
    ):
        Rank(served, 0)


def test_end_with_tls_is_told_that_the_other_speaks_none() -> None:
    with serve(1) as served, pytest.raises(ProtocolError, match="TLS"):
        Rank(served, 0, tls=client_context(None))


@pytest.mark.parametrize(
    ("protocol", "least", "words"),
    [
        (ssl.PROTOCOL_TLS_SERVER, ssl.TLSVersion.TLSv1_2, "wanted TLS 1.3"),
        (ssl.PROTOCOL_TLS_CLIENT, ssl.TLSVersion.TLSv1_3, "cannot be used for the server's end"),
    ],
)
def test_context_that_will_not_do_is_refused_at_once(
    protocol: int, least: ssl.TLSVersion, words: str
) -> None:
    context = ssl.SSLContext(protocol)
    context.minimum_version = least
    with pytest.raises(ConfigError, match=words), serve(1, tls=context):
        pass
