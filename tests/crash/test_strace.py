"""What `Files` says it does is what the kernel sees: nothing that changes the disk goes past it.

Everything else in this directory believes the recorder. Here it is compared with strace, once for each
container and way of writing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.crash_scenarios import SCENARIOS

TESTS = Path(__file__).parent.parent
WATCHED = (
    "open,openat,openat2,creat,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,"
    "symlinkat,mknod,mknodat,truncate,ftruncate,fallocate,write,writev,pwrite64,pwritev,pwritev2,sendfile,"
    "copy_file_range,splice,io_submit,chmod,fchmod,fchmodat,chown,fchown,fchownat,utimensat,setxattr,fsetxattr,"
    "removexattr,fremovexattr,fsync,fdatasync,sync_file_range,syncfs,sync"
)
"""The system calls that change a file system, or make a change durable."""
LINE = re.compile(r"\d+ +(?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)(?P<where><[^>]*>)?")
PLACE = re.compile(r'\d+<(?P<descriptor>/[^>]*)>|"(?P<path>/[^"]*)"')


@pytest.fixture(scope="module")
def strace() -> str:
    """strace's path. It is no Python package: if it is missing, it is installed, or the test fails."""
    if shutil.which("strace") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(["apt-get", "install", "-qq", "--yes", "strace"], check=False)
    found = shutil.which("strace")
    if found is None:
        pytest.fail("this test needs strace: apt-get install strace")
    return found


@pytest.mark.parametrize(
    "name",
    [
        "ckpt, overwritten",
        "ckpt with rest, overwritten, direct",
        "ckpt, keep last 1",
        "safetensors, overwritten",
        "safetensors, new name, direct",
        "directory, overwritten",
        "directory, new name, direct",
        "directory, keep last 1",
        "two writers, overwritten",
        "two writers, new name, direct",
    ],
)
def test_the_kernel_sees_what_was_recorded_and_nothing_else(name: str, strace: str, tmp_path: Path) -> None:
    root, log = tmp_path / "watched", tmp_path / "strace.log"
    root.mkdir()
    done = subprocess.run(
        [
            *(strace, "-f", "-y", "-s", "0", "-o", log, "-e", f"trace={WATCHED}"),
            *(sys.executable, "-m", "crash.crash_traced", name, root),
        ],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = list(changes(log.read_text(), root))
    assert seen == json.loads(done.stdout)
    assert len(seen) > 30
    assert ("O_DIRECT|" in log.read_text()) == SCENARIOS[name].direct


def changes(log: str, root: Path) -> Iterator[list[str]]:
    """The calls that changed something under `root`, in the form of crash_traced; paths relative to it."""
    there: set[str] = set()
    for line in log.splitlines():
        match = LINE.match(line)
        if match is None or int(match["result"]) < 0 or str(root) not in line:
            continue
        call, arguments = match["call"], match["arguments"]
        paths = [
            os.path.relpath(place["descriptor"] or place["path"], root) for place in PLACE.finditer(arguments)
        ]
        paths = [path for path in paths if not path.startswith("..")]
        if call.startswith("open"):
            if "O_TRUNC" in arguments:
                yield ["truncated by opening", *paths]
            elif "O_CREAT" in arguments and paths[0] not in there:  # a lock file is created once
                there.add(paths[0])
                yield [call, *paths]
            continue
        if call == "unlink":
            there.discard(paths[0])
        numbers = arguments.split(", ")
        match call:
            case "pwrite64":
                yield [call, *paths, *numbers[-2:]]
            case "fallocate" | "ftruncate" | "fchmod":
                yield [call, *paths, numbers[-1]]
            case _:
                yield [call, *paths]
