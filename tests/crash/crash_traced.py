"""One recorded run in a process of its own, to be looked at with strace. See test_strace.

    python -m crash.crash_traced SCENARIO DIRECTORY

runs a scenario of crash_scenarios in DIRECTORY, and prints (as JSON) the system calls that the recorder's
trace stands for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from crash.crash_recorder import Names, Operation, Resize, SetMode, Sync, Write
from crash.crash_scenarios import SCENARIOS, record

CALLS = {
    "create": "openat",
    "lock": "openat",
    "make_directory": "mkdir",
    "remove_directory": "rmdir",
    "rename": "rename",
    "unlink": "unlink",
}


def system_call(operation: Operation) -> list[str]:
    """Name and arguments of the system call behind an operation, as text."""
    match operation:
        case Names():
            return [CALLS[operation.call], operation.path] + [operation.target] * bool(operation.target)
        case Write():
            return ["pwrite64", operation.path, str(len(operation.data)), str(operation.offset)]
        case Resize(call="preallocate"):
            return ["fallocate", operation.path, str(operation.size)]
        case Resize():
            return ["ftruncate", operation.path, str(operation.size)]
        case SetMode():
            return ["fchmod", operation.path, f"0{operation.mode:o}"]
        case Sync():
            return ["fsync", operation.path]
    raise ValueError(operation)


if __name__ == "__main__":
    trace, _ = record(SCENARIOS[sys.argv[1]], Path(sys.argv[2]))
    json.dump([system_call(operation) for operation in trace if operation.call != "returned"], sys.stdout)
