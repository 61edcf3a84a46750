"""Every error and warning that swansong raises.

    SwansongError
    ├── ConfigError                (also ValueError and TypeError)  an argument is wrong
    ├── NotSupportedError          a combination that is refused rather than done wrongly
    ├── UnrepresentableError       (also TypeError)  state that no container here can hold
    ├── ProtocolError              a peer sent what does not belong here, or a message cannot be sent
    │   ├── AuthenticationError    it has not proved what it says, or its bytes were altered on the way
    │   ├── WrongJobError          it belongs to another job; `want` and `got` are public job ids
    │   ├── WrongVersionError      it speaks another version of the protocol; `want` and `got`
    │   └── SelfConnectionError    it is this very end: nobody listens on that port
    ├── AddressInUseError          (also OSError)  another process listens there
    ├── UnreachableError           (also OSError)  nobody answers at an address, or not in time
    ├── TrainingInterrupted        training ends here by decision; the state is where `path` says, if anywhere
    ├── CrashLoopError             the job failed in the same way too often; `step` and `reports`
    ├── ClockNotReadableError      an update clock cannot say yet how far a component is
    ├── RecordError                a flight recorder cannot be made, written or read
    │   └── RecordTooLargeError    ... boundary state over a slot's size; `nbytes` and `limit`
    ├── SaveError                  a checkpoint was not saved; nothing half-made is visible
    │   └── DiskFullError          (also OSError)  ... for want of space; `needed` and `free` in bytes
    └── LoadError                  (also ValueError)  a checkpoint cannot be read
        ├── CheckpointNotFoundError    (also FileNotFoundError)
        ├── NotCommittedError      there is no manifest that vouches for these bytes
        ├── KeyNeededError         the content is encrypted and no key was given
        ├── WrongKeyError          the key is not the one it was sealed with
        ├── UnauthenticatedError   a key was given, and nothing proves that the content was sealed with it
        └── DamagedError           the bytes are not those that were committed
            ├── DigestMismatchError
            └── MalformedError     not this format at all, or lengths that cannot be true

    SwansongWarning                (a UserWarning)  everything that would otherwise happen silently

A message says where, what was wanted, what was found and what to do. Attributes repeat the parts that
programs need.
"""

from __future__ import annotations


class SwansongError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SwansongError, ValueError, TypeError):
    """An argument is wrong. The message names the argument and the value (never a key's bytes)."""


class NotSupportedError(SwansongError):
    """Refused by name: doing it would give a wrong file or a false promise."""


class UnrepresentableError(SwansongError, TypeError):
    """Some state has no exact form on disk. The message names where it stands in the state."""


class ProtocolError(SwansongError):
    """What came does not belong on this connection, which is over; or a message cannot be sent on it."""


class AuthenticationError(ProtocolError):
    """A peer has not proved to know the job's token or to be who it says, or a frame's tag is wrong."""


class WrongJobError(ProtocolError):
    """A peer belongs to another job. `want` is the id of this job and `got` the peer's; neither is secret."""

    def __init__(self, message: str, *, want: str = "", got: str = "") -> None:
        super().__init__(message)
        self.want = want
        self.got = got


class WrongVersionError(ProtocolError):
    """A peer speaks another version of the protocol: `got` instead of `want`."""

    def __init__(self, message: str, *, want: int = 0, got: int = 0) -> None:
        super().__init__(message)
        self.want = want
        self.got = got


class SelfConnectionError(ProtocolError):
    """A connection leads back to itself, as happens on a loopback port where nobody listens. Try again."""


class AddressInUseError(SwansongError, OSError):
    """An address cannot be listened on now, since another process does. It may be free in a moment."""


class UnreachableError(SwansongError, OSError):
    """Nobody answers at an address, or not in time, or the connection ended before the answer."""


class TrainingInterrupted(SwansongError):
    """The job ends by decision after an incident that this rank did not cause. Let it pass.

    `step` and `path` are those of the checkpoint that was committed; None and empty if there is none, and
    then `reason` says why.
    """

    def __init__(self, message: str, *, step: int | None = None, path: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.path = path
        self.reason = reason


class CrashLoopError(SwansongError):
    """The job is not resumed: it failed in the same way, at the same step, too often in a row.

    `step` is where it failed and `reports` are the files of the incidents, the latest first.
    """

    def __init__(self, message: str, *, step: int = 0, reports: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.reports = reports


class ClockNotReadableError(SwansongError):
    """An update clock cannot be read now, for instance while a device still works. It may be in a moment."""


class RecordError(SwansongError):
    """A flight recorder cannot be made, written or read. `path` says which; training itself is unharmed."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class RecordTooLargeError(RecordError):
    """Boundary state of `nbytes` bytes does not fit a slot of `limit` bytes."""

    def __init__(self, message: str, *, path: str = "", nbytes: int = 0, limit: int = 0) -> None:
        super().__init__(message, path=path)
        self.nbytes = nbytes
        self.limit = limit


class SaveError(SwansongError):
    """A save failed. Earlier checkpoints are untouched, and nothing half-made is visible.

    Only if the very last step failed, the fsync of the directory, may the new checkpoint be there, whole; but
    whether it survives a power cut is not known then.

    `path` is the checkpoint that was being written; the operating system's error is the `__cause__`.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class DiskFullError(SaveError, OSError):
    """No space was left (or a quota or file size limit was hit). `needed` and `free` are bytes."""

    def __init__(self, message: str, *, path: str = "", needed: int = 0, free: int = 0) -> None:
        super().__init__(message, path=path)
        self.needed = needed
        self.free = free


class LoadError(SwansongError, ValueError):
    """A checkpoint cannot be read. `path` says which."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class CheckpointNotFoundError(LoadError, FileNotFoundError):
    """There is nothing at that path, or no checkpoint in that directory."""


class NotCommittedError(LoadError):
    """No manifest vouches for the content, and one was required."""


class KeyNeededError(LoadError):
    """The content is encrypted and no key was given."""


class WrongKeyError(LoadError):
    """The key given is not the key that the checkpoint was sealed with. The bytes are undamaged."""


class UnauthenticatedError(LoadError):
    """A key was given, but the checkpoint carries no proof that it was sealed with it."""


class DamagedError(LoadError):
    """The bytes are not what was committed.

    `file` is the data file, `offset` the first byte (in the stored file) of the smallest range known to
    contain the damage, `tensor` the tensor that stands there; each is None where it cannot be told.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        file: str | None = None,
        offset: int | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.file = file
        self.offset = offset
        self.tensor = tensor


class DigestMismatchError(DamagedError):
    """A digest over stored bytes differs from the manifest's. `want` and `got` are hexadecimal."""

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        file: str | None = None,
        offset: int | None = None,
        tensor: str | None = None,
        want: str = "",
        got: str = "",
    ) -> None:
        super().__init__(message, path=path, file=file, offset=offset, tensor=tensor)
        self.want = want
        self.got = got


class MalformedError(DamagedError):
    """Not this format, cut short, or with lengths, counts or nesting that cannot be true."""


class SwansongWarning(UserWarning):
    """Something that would otherwise go unnoticed: a policy that never saves, a damaged file skipped."""
