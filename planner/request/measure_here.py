"""The cluster ``here``: the cached measurement of this machine, or a new one by the executor."""

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


def cluster_or_measure(text: str, say: Say, *, compared: bool = False) -> Cluster:
    """Parse a cluster; measure this machine first if ``here`` needs it.

    ``compared``: the cluster is one of several.
    """
    try:
        return parse_cluster(text, assume_nodes=compared)
    except NeedsMeasurement as needs:
        measure(needs.processes, say)
        return parse_cluster(text)


def measure(processes: int, say: Say) -> None:
    """Measure this machine with a number of processes and store the result in the user's cache."""
    if (missing := missing_run_package()) is not None:
        raise InputError(
            "here: this machine has no GPU and has not been measured; measuring needs "
            f"{missing}: {INSTALL}"
        )
    say(f"measuring this machine with {processes} processes (once; kept in the cache) ...")
    command = [sys.executable, "-m", "executor", "measure", "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunError(f"measuring this machine failed: {last[0]}")
