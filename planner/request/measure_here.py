"""``here``: use the measurement in the cache, or have the executor take one and say so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from hardware_profiles.cluster.local_machine import NeedsMeasurement
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, RunError
from planner.request.run_packages import INSTALL, missing_run_package

Say = Callable[[str], None]


def cluster_or_measure(text: str, say: Say) -> Cluster:
    """Parse a cluster; measure this machine first where ``here`` needs it."""
    try:
        return parse_cluster(text)
    except NeedsMeasurement as needs:
        measure(needs.processes, say)
        return parse_cluster(text)


def measure(processes: int, say: Say) -> None:
    """Have the executor measure this machine with so many processes, into the user's cache."""
    if (missing := missing_run_package()) is not None:
        raise InputError(
            "here: this machine has no GPU and was not measured yet, and measuring needs "
            f"{missing}: {INSTALL}"
        )
    say(f"measuring this machine with {processes} processes (once; kept in the cache) ...")
    command = [sys.executable, "-m", "executor", "measure", "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunError(f"measuring this machine failed: {last[0]}")
