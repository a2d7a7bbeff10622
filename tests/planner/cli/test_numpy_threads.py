"""Numpy starts no threads, its arrays reuse memory, and what a command starts is as before."""

import os
import subprocess
import sys

import pytest

from planner.cli.numpy_threads import THREADS, import_numpy

CODE = f"""
import os
from planner.cli.numpy_threads import import_numpy
import_numpy()
print(len(os.listdir("/proc/self/task")), os.environ.get({THREADS!r}))
"""


def test_the_variable_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS, raising=False)
    import_numpy()
    assert THREADS not in os.environ
    monkeypatch.setenv(THREADS, "3")
    import_numpy()
    assert os.environ[THREADS] == "3"


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted on Linux")
def test_no_thread_is_started() -> None:
    free = {name: value for name, value in os.environ.items() if name != THREADS}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=free, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "None"]


FAULTS = """
import platform, resource
import numpy as np
from planner.cli.numpy_threads import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        a, b = (np.ones(1 << 20) for _ in range(2))
        del a, b
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
faults()
print(faults() if platform.libc_ver()[0] == "glibc" else 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_arrays_reuse_the_pages_of_freed_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100
