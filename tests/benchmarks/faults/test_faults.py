"""Random faults, as ``python -m benchmarks.faults`` tries them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow(seconds=60),
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, makes namespaces"),
]
# one of each kind that starts no interpreters (tests/executor/launch, tests/executor/multinode)
CHEAP = "kill,all-killed,stop,slow,read-only,truncated,flipped,lost,two-runs,clock"


def test_ten_random_faults_end_in_order_and_lose_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.faults", "--each", "--kinds", CHEAP]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 trials, 0 wrong" in done.stdout
