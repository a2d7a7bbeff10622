"""Numpy is imported with one thread, and what a command starts has as many as before."""

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
