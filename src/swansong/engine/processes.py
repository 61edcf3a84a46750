"""Processes of this host: who they are, and when they end."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import socket
from pathlib import Path


def host_name() -> str:
    """This host's name, with what tells it from others of that name: same here means that pids compare.

    The digits stand for the boot and the pid namespace: two containers of one host are two hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = bytes(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()}#{hashlib.sha256(boot + namespace).hexdigest()[:8]}"


def start_time(pid: int) -> int:
    """When a process of this host started, in clock ticks since boot (proc(5), /proc/PID/stat, field 22).

    Raises ProcessLookupError if there is none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # The second field, the name in parentheses, may hold spaces and parentheses.
    return int(stat[stat.rindex(b")") + 2 :].split()[22 - 3])


def open_process(pid: int, started: int) -> int | None:
    """A descriptor that becomes readable when that very process ends; None: it is not there.

    Raises OSError if the kernel cannot say.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OverflowError:
        return None
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return None
        raise
    try:
        if start_time(pid) == started:  # compared while the descriptor holds the pid's meaning
            return descriptor
    except ProcessLookupError:
        pass
    os.close(descriptor)
    return None


def raise_descriptor_limit(wanted: int) -> int:
    """Let this process open `wanted` files, or as many as it may; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
