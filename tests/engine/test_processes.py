"""Who the processes of this host are, and when they end."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from swansong.engine.processes import host_name, open_process, raise_descriptor_limit, start_time


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed or its input ends; its name would confuse a careless parser."""
    program = "open('/proc/self/comm', 'w').write('a) S (1 2'); print(flush=True); input()"
    arguments = [sys.executable, "-c", program]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_start_time_is_the_kernels(child: subprocess.Popen[bytes]) -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    assert start_time(os.getpid()) <= start_time(child.pid) <= (uptime + 1) * hertz


def test_descriptor_becomes_readable_when_the_process_ends(child: subprocess.Popen[bytes]) -> None:
    descriptor = open_process(child.pid, start_time(child.pid))
    assert descriptor is not None
    try:
        assert select.select([descriptor], [], [], 0)[0] == []
        child.kill()
        assert select.select([descriptor], [], [], 20)[0] == [descriptor]
    finally:
        os.close(descriptor)


def test_another_process_with_its_pid_is_not_it(child: subprocess.Popen[bytes]) -> None:
    assert open_process(child.pid, start_time(child.pid) + 1) is None


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 40, -(1 << 63)])
def test_pid_that_cannot_be_is_nobody(pid: int) -> None:
    assert open_process(pid, 0) is None


def test_process_that_was_reaped_is_nobody(child: subprocess.Popen[bytes]) -> None:
    started = start_time(child.pid)
    child.kill()
    child.wait()
    assert open_process(child.pid, started) is None
    with pytest.raises(ProcessLookupError):
        start_time(child.pid)


def test_host_has_one_name_for_all_its_processes() -> None:
    program = "from swansong.engine.processes import host_name; print(host_name())"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == host_name()


def test_descriptor_limit_is_raised_as_far_as_it_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
        assert raise_descriptor_limit(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 500
        assert raise_descriptor_limit(501) == 501
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 501
        assert raise_descriptor_limit(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
