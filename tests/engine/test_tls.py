"""TLS from files: who gets in, who does not, and what is said of files that will not do."""

from __future__ import annotations

import ssl
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from certificates import Authority
from engine_support import TOKEN, Rank, Served, serve, until, world
from swansong.engine.inquiry import ask
from swansong.engine.tls import ClientTls, TlsFiles, client_tls
from swansong.errors import ConfigError, ProtocolError
from swansong.protocol.operator import Status, StatusRequest


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def served_by(files: TlsFiles) -> AbstractContextManager[Served]:
    return serve(1, tls=files.server())


def asked(served: Served, tls: ClientTls | None) -> object:
    return ask(served.address, TOKEN, StatusRequest(), timeout_s=20, tls=tls)


def test_both_ends_show_certificates_of_one_authority(authority: Authority) -> None:
    files = TlsFiles(**authority.files("node", "127.0.0.1"))
    with served_by(files) as served, world(served, 1, tls=files.client()):
        assert isinstance(asked(served, files.client()), Status)


def test_without_an_authority_the_controller_takes_whoever_trusts_it(authority: Authority) -> None:
    certificate, key = authority.issue("node", "127.0.0.1")
    trusting = TlsFiles(authority=authority.file)
    with served_by(TlsFiles(certificate=certificate, key=key)) as served:
        assert isinstance(asked(served, trusting.client()), Status)


def test_certificate_for_another_name_is_taken_if_that_is_the_name_wanted(authority: Authority) -> None:
    certificate, key = authority.issue("node", "controller.example")
    with served_by(TlsFiles(certificate=certificate, key=key)) as served:
        named = TlsFiles(authority=authority.file, server_name="controller.example")
        assert isinstance(asked(served, named.client()), Status)
        with pytest.raises(ProtocolError, match=r"certificate verify failed: .*127\.0\.0\.1"):
            asked(served, TlsFiles(authority=authority.file).client())


def test_who_shows_no_certificate_is_told_that_one_is_wanted(authority: Authority) -> None:
    files = TlsFiles(**authority.files("node", "127.0.0.1"))
    with (
        served_by(files) as served,
        pytest.raises(ProtocolError, match="wants a certificate of whoever connects"),
    ):
        asked(served, TlsFiles(authority=authority.file).client())


def test_who_shows_a_certificate_of_another_authority_is_told_that_it_is_not_trusted(
    authority: Authority, tmp_path: Path
) -> None:
    files = TlsFiles(**authority.files("node", "127.0.0.1"))
    certificate, key = Authority(tmp_path, "other").issue("stranger")
    stranger = TlsFiles(authority=authority.file, certificate=certificate, key=key)
    with (
        served_by(files) as served,
        pytest.raises(ProtocolError, match="does not trust the authority that signed our certificate"),
    ):
        Rank(served, 0, tls=stranger.client())
    assert [note for note in served.notes if "certificate verify failed" in note]


def test_controller_of_another_authority_is_not_talked_to(authority: Authority, tmp_path: Path) -> None:
    files = TlsFiles(**authority.files("node", "127.0.0.1"))
    other = TlsFiles(authority=Authority(tmp_path, "other").file)
    with served_by(files) as served:
        with pytest.raises(ProtocolError, match="certificate verify failed"):
            asked(served, other.client())
        assert until(lambda: [note for note in served.notes if "TLS" in note])


def test_plain_client_is_not_let_in(authority: Authority) -> None:
    files = TlsFiles(**authority.files("node", "127.0.0.1"))
    with served_by(files) as served, pytest.raises(ProtocolError, match="TLS"):
        asked(served, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"authority": "missing"}, "authority .*missing: cannot be read: No such file"),
        ({"authority": "noise"}, "authority .*noise: cannot be used: wanted PEM"),
        ({"certificate": "missing"}, "certificate .*missing: cannot be read: No such file"),
        ({"certificate": "noise"}, "certificate .*noise: cannot be used: wanted PEM"),
        ({"certificate": "node.pem"}, "certificate .*node.pem: cannot be used: wanted PEM"),
        ({"certificate": "node.pem", "key": "other.key"}, "the key is another certificate's"),
        ({"certificate": "node.pem", "key": "locked.key"}, "has a passphrase, wanted one without"),
        ({"key": "node.key"}, "key .*node.key: wanted its certificate, too"),
    ],
    ids=[
        "no authority there",
        "authority is no PEM",
        "no certificate there",
        "certificate is no PEM",
        "certificate without its key",
        "another's key",
        "key with a passphrase",
        "key alone",
    ],
)
def test_files_that_will_not_do_are_refused_by_name(
    tmp_path: Path, authority: Authority, given: dict[str, str], words: str
) -> None:
    authority.issue("node")
    authority.issue("other")
    authority.issue("locked", passphrase="secret")
    (tmp_path / "noise").write_bytes(bytes(100))
    with pytest.raises(ConfigError, match=words):
        client_tls(TlsFiles(**{field: tmp_path / name for field, name in given.items()}))


def test_controller_needs_a_certificate(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="a controller needs a certificate"):
        TlsFiles(authority=authority.file).server()


@pytest.mark.parametrize(
    ("protocol", "least", "words"),
    [
        (ssl.PROTOCOL_TLS_CLIENT, ssl.TLSVersion.TLSv1_2, "wanted TLS 1.3"),
        (ssl.PROTOCOL_TLS_SERVER, ssl.TLSVersion.TLSv1_3, "cannot be used for the client's end"),
    ],
    ids=["too old", "of a server"],
)
def test_context_that_will_not_do_is_refused(protocol: int, least: ssl.TLSVersion, words: str) -> None:
    context = ssl.SSLContext(protocol)
    context.minimum_version = least
    with pytest.raises(ConfigError, match=words):
        client_tls(context)


def test_other_processes_are_told_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = TlsFiles(certificate="a.pem", server_name="x").portable()
    assert told == {
        "authority": None,
        "certificate": str(tmp_path / "a.pem"),
        "key": None,
        "server_name": "x",
    }
