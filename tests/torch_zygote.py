"""Forks ranks of PyTorch jobs, so that no test waits for their imports. Started by tests/torch_job.py.

Reads a line, [[environment, arguments, file for standard error] of each rank], and answers with
["pids", [process ids]]; says ["ended", process id, exit code] of each that has ended. Ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
from contextlib import suppress

import torch._dynamo  # noqa: F401 - DistributedDataParallel imports it, which takes long

import torch_rank

LOOK_S = 0.01


def serve() -> bool:
    """True in a child that is to be a rank; False at the end."""
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return False
            pids = []
            for rank in json.loads(line):
                pid = os.fork()
                if pid == 0:
                    become(*rank)
                    return True
                pids.append(pid)
            print(json.dumps(["pids", pids]), flush=True)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                print(json.dumps(["ended", ended[0], os.waitstatus_to_exitcode(ended[1])]), flush=True)


def become(environment: dict[str, str], arguments: list[str], errors: str) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    written = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, target in ((nothing, 0), (nothing, 1), (written, 2)):
        os.dup2(descriptor, target)
    os.environ.update(environment)
    sys.argv[1:] = arguments


if __name__ == "__main__":
    gc.freeze()  # so that no rank looks at all that is imported once more, as it ends
    if serve():
        torch_rank.main()
