"""Certificates for tests: authorities, and what they sign, as files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_BEGINS = datetime.datetime(2020, 1, 1)
_ENDS = datetime.datetime(2120, 1, 1)


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _other(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, passphrase: str | None = None) -> str:
    cipher: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        cipher = serialization.BestAvailableEncryption(passphrase.encode())
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cipher))
    return str(path)


class Authority:
    """Signs certificates. `file` is its own."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory, self._name = directory, _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        path = directory / f"{name}.pem"
        path.write_bytes(self._signed(self._name, self._key, authority=True))
        self.file = str(path)

    def issue(self, stem: str, *names: str, passphrase: str | None = None) -> tuple[str, str]:
        """A certificate for hosts of these names or addresses, and its key: two files."""
        key = ec.generate_private_key(ec.SECP256R1())
        path = self._directory / f"{stem}.pem"
        path.write_bytes(self._signed(_named(stem), key, names=names))
        return str(path), _write_key(self._directory / f"{stem}.key", key, passphrase)

    def files(self, stem: str, *names: str) -> dict[str, str]:
        """The same as fields of TlsFiles, with the authority."""
        certificate, key = self.issue(stem, *names)
        return {"authority": self.file, "certificate": certificate, "key": key}

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        names: tuple[str, ...] = (),
        authority: bool = False,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGINS)
            .not_valid_after(_ENDS)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_other(name) for name in names]), critical=False
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
