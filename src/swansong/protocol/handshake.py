"""The handshake: both ends prove that they know the job's token, and neither shows it. Pure.

Each end sends its **greeting** as soon as the connection stands. It has a fixed layout, so nothing that a
stranger sends is ever parsed:

    8 bytes   "swansong"
    2         version, big-endian like every number here
    1         role: 0 controller, 1 rank, 2 operator
    4         rank, signed; -1 for whoever is no rank
    16        job id: the first bytes of HMAC-SHA256(token, "swansong job")
    16        incarnation; zeros for an operator, who does not know it
    8         generation, signed: a controller's own, anybody else's highest seen, -1 for none
    32        nonce, fresh and random

An end that has seen the other's greeting, and found it to be of this job, this version and a role to talk to,
sends its **proof**, 32 bytes:

    HMAC-SHA256(token, "swansong proof" + role of the sender (1 byte) + transcript)

where the transcript is the controller's greeting and then the other's. Everything said in either greeting is
proved at once. A direction's key is made likewise, with "swansong key" and the role of whoever sends in that
direction. An end that has checked the other's proof may send messages.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from swansong.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    SelfConnectionError,
    WrongJobError,
    WrongVersionError,
)

VERSION: Final = 1
"""Of the protocol: of frames, handshake and messages together."""
TOKEN: Final = 32
"""Bytes of a token."""
NONCE: Final = 32
"""Bytes of a nonce."""
INCARNATION: Final = 16
"""Bytes of an incarnation."""
PROOF: Final = 32
"""Bytes of a proof."""
NO_RANK: Final = -1

_MAGIC: Final = b"swansong"
_JOB: Final = 16
_START: Final = struct.Struct(">8sH")
"""How the greeting of every version begins."""
_GREETING: Final = struct.Struct(f">8sHBi{_JOB}s{INCARNATION}sq{NONCE}s")


class Role(IntEnum):
    """What stands at an end of a connection."""

    CONTROLLER = 0
    RANK = 1
    OPERATOR = 2


class Token:
    """The secret that all processes of one job share. Its bytes do not leave this object."""

    __slots__ = ("_material",)

    def __init__(self, material: bytes) -> None:
        """Wrap 32 random bytes; ConfigError otherwise."""
        if not isinstance(material, bytes):
            raise ConfigError(f"token: wanted bytes, got {type(material).__name__}")
        if len(material) != TOKEN:
            raise ConfigError(f"token: wanted {TOKEN} bytes, got {len(material)}")
        self._material = material

    def __repr__(self) -> str:
        return f"Token(job {self.job.hex()})"

    def __reduce__(self) -> str:
        raise TypeError("a Token is not copied out of the process")

    @property
    def job(self) -> bytes:
        """The job's public id, 16 bytes."""
        return self.mac(b"swansong job")[:_JOB]

    def mac(self, data: bytes) -> bytes:
        """HMAC-SHA256 under the token, 32 bytes."""
        return hmac.digest(self._material, data, "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who stands at an end of a connection. Raises ConfigError for what cannot be."""

    role: Role
    rank: int = NO_RANK
    """Of a RANK, from 0; nobody else has one."""
    incarnation: bytes = bytes(INCARNATION)
    """16 bytes, drawn by rank 0 for each start of the job."""
    generation: int = -1
    """A controller's own; anybody else's highest seen, -1 for none. 63 bits."""

    def __post_init__(self) -> None:
        if (self.rank >= 0) is not (self.role is Role.RANK) or not NO_RANK <= self.rank < 1 << 31:
            raise ConfigError(f"rank: {self.rank} is none of a {self.role.name.lower()}")
        if not isinstance(self.incarnation, bytes) or len(self.incarnation) != INCARNATION:
            raise ConfigError(f"incarnation: wanted {INCARNATION} bytes, got {self.incarnation!r:.100}")
        if not (0 if self.role is Role.CONTROLLER else -1) <= self.generation < 1 << 63:
            raise ConfigError(f"generation: {self.generation} is none of a {self.role.name.lower()}")

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.role is Role.RANK else f"the {self.role.name.lower()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a handshake comes to."""

    peer: Identity
    sending_key: bytes = field(repr=False)
    receiving_key: bytes = field(repr=False)


class Handshake:
    """One end's side of one handshake: `hear_greeting` once, then `hear_proof` once."""

    __slots__ = ("_me", "_peer", "_token", "_transcript", "greeting")

    def __init__(self, token: Token, me: Identity, nonce: bytes) -> None:
        """`nonce` is 32 random bytes that were never used before; ConfigError for another length."""
        if not isinstance(nonce, bytes) or len(nonce) != NONCE:
            raise ConfigError(f"nonce: wanted {NONCE} bytes")
        self._token, self._me = token, me
        self._peer: Identity | None = None
        self._transcript = b""
        self.greeting = _GREETING.pack(
            _MAGIC, VERSION, me.role, me.rank, token.job, me.incarnation, me.generation, nonce
        )
        """To be sent first."""

    def hear_greeting(self, greeting: bytes) -> bytes:
        """Take the other end's greeting; return the proof to be sent.

        Raises WrongVersionError, SelfConnectionError, WrongJobError, or ProtocolError for a role with which
        there is nothing to talk about and for what is no greeting.
        """
        self._check_version(greeting)
        if len(greeting) != _GREETING.size:
            raise ProtocolError(f"greeting: wanted {_GREETING.size} bytes, got {len(greeting)}")
        _, _, role, rank, job, incarnation, generation, nonce = _GREETING.unpack(greeting)
        if nonce == self.greeting[-NONCE:]:
            raise SelfConnectionError(f"{self._me} is connected to itself: nobody listens on that port")
        self._check_job(job)
        try:
            peer = Identity(role=Role(role), rank=rank, incarnation=incarnation, generation=generation)
        except ValueError as error:  # ConfigError is one
            raise ProtocolError(f"greeting: {error}") from None
        if (peer.role is Role.CONTROLLER) is (self._me.role is Role.CONTROLLER):
            raise ProtocolError(f"greeting: {self._me} has nothing to say to {peer}")
        controllers_first = self._me.role is Role.CONTROLLER
        ours, theirs = self.greeting, greeting
        self._transcript = ours + theirs if controllers_first else theirs + ours
        self._peer = peer
        return self._derive(b"swansong proof", self._me.role)

    def hear_proof(self, proof: bytes) -> Session:
        """Take the other end's proof; return the session. Raises AuthenticationError."""
        peer = self._peer
        if peer is None:
            raise ProtocolError("proof: came before a greeting")
        if not hmac.compare_digest(self._derive(b"swansong proof", peer.role), proof):
            raise AuthenticationError(f"who says to be {peer} has not proved to know this job's token")
        return Session(
            peer=peer,
            sending_key=self._derive(b"swansong key", self._me.role),
            receiving_key=self._derive(b"swansong key", peer.role),
        )

    def _derive(self, purpose: bytes, role: Role) -> bytes:
        return self._token.mac(purpose + bytes([role]) + self._transcript)

    def _check_version(self, greeting: bytes) -> None:
        if len(greeting) < _START.size or not greeting.startswith(_MAGIC):
            raise ProtocolError("greeting: whoever this is speaks another protocol")
        _, version = _START.unpack_from(greeting)
        if version != VERSION:
            raise WrongVersionError(
                f"protocol version {version} spoken, wanted {VERSION}: "
                "use one release of swansong in the whole job",
                want=VERSION,
                got=version,
            )

    def _check_job(self, job: bytes) -> None:
        want, got = self._token.job.hex(), job.hex()
        if want == got:
            return
        if self._me.role is Role.CONTROLLER:
            message = f"a process of job {got} came to the controller of job {want}"
        else:
            message = (
                f"the port belongs to job {got}, wanted {want}: choose another port, or use that job's token"
            )
        raise WrongJobError(message, want=want, got=got)
