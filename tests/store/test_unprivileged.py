"""The store asks for no privilege: its own tests also pass for a user who has none.

Root writes read-only files and enters any directory, so tests that only root has run would not notice that
something relies on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crash.crash_places import directory_in_memory

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NOBODY = 65534
MODULES = ("files", "workspace", "series", "sweeping", "saving", "catalog", "opening", "latest", "parts")
"""The test modules that are run: those of what changes the disk, or finds its way about it."""
PROBE = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import pytest, numpy'], check=True)"


def as_nobody() -> list[str]:
    """What stands before a command so that it runs as nobody: in no group, without any capability.

    Where the interpreter lies in a directory that only root may enter, with CAP_DAC_READ_SEARCH: it may read
    everything then, and still write nothing.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.fail("run as root, this test needs setpriv (util-linux)")
    identity = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
    for capabilities in ("-all", "-all,+dac_read_search"):
        command = [*identity, f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]
        done = subprocess.run(
            [*command, sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return command
    pytest.fail(f"nobody cannot run {sys.executable}: {done.stderr}")


@pytest.mark.timeout(300)
def test_the_tests_of_the_store_pass_for_a_user_without_privileges() -> None:
    privileged = os.geteuid() == 0
    modules = [path for name in MODULES if (path := HERE / f"test_{name}.py").exists()]
    assert len(modules) > 6
    with directory_in_memory() as place:  # not tmp_path: only its owner may enter what is above that
        if privileged:
            os.chown(place, NOBODY, NOBODY)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "HOME": str(place),
            "TMPDIR": str(place),
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{place}/hypothesis",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        }
        done = subprocess.run(
            [
                *(as_nobody() if privileged else []),
                *(sys.executable, "-m", "pytest", "-q", "-x", f"--rootdir={ROOT}"),
                *(f"--config-file={ROOT / 'pyproject.toml'}", "-o", f"cache_dir={place}/cache"),
                *(f"--basetemp={place}/pytest", *map(str, modules)),
            ],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
