"""Measurements of this machine and traces of modules, which the executor takes in a process.

The executor needs the packages of the extra ``run``; the planner does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hardware_profiles.cluster.measurement import load_cached, measurement_notes, why_measure_again
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError, NeedsMeasurement, RunError
from hardware_profiles.progress import report, reports_of_process
from planner.request.clusters import cluster_of

if TYPE_CHECKING:
    from cost_models.traced.module import TracedModule

PACKAGES: Final = ("torch", "transformers")
INSTALL: Final = "pip install 'shardplan[run]'"
PREFIX: Final = "module:"
TIMEOUT_SECONDS: Final = 1800.0

Say = Callable[[str], None]


def missing_run_package() -> str | None:
    """Return the first package of the extra ``run`` that is not installed, or None."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)


def cluster_or_measure(text: str, say: Say) -> Cluster:
    """Parse a cluster; measure this machine first where ``here`` needs it.

    A measurement that is old or off is taken again; its age and a busy machine are noted.
    """
    try:
        cluster = cluster_of(text)
    except NeedsMeasurement as needs:
        measure(needs.processes, say)
        cluster = parse_cluster(text)
    if not is_here(text) or cluster.accelerator.device != "cpu":
        return cluster
    found = load_cached(cluster.num_gpus)
    again = None if found is None else why_measure_again(found)
    if again is not None and missing_run_package() is None:
        say(f"note: {text.strip()}: {again}")
        measure(cluster.num_gpus, say)
        cluster, found = parse_cluster(text), load_cached(cluster.num_gpus)
    for note in () if found is None else measurement_notes(found):
        say(f"note: {note}")
    return cluster


def is_here(text: str) -> bool:
    """Whether a CLUSTER names this machine."""
    return text.strip().lower().partition(":")[0] == "here"


def measure(processes: int, say: Say) -> None:
    """Measure this machine with the executor and ``processes`` processes, into the user's cache."""
    if (missing := missing_run_package()) is not None:
        raise InputError(
            "here: this machine has no GPU and was not measured yet, and measuring needs "
            f"{missing}: {INSTALL}"
        )
    say(
        f"measuring this machine with {processes} process{'es' if processes > 1 else ''} "
        "(once; stored in the cache) ..."
    )
    report("measuring matmuls, memory and messages")
    command = [sys.executable, "-m", "executor", "measure", "--processes", str(processes)]
    with reports_of_process() as channel:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **_own(channel))
    if done.returncode:
        raise RunError(f"measuring this machine failed: {_last_words(done)}")


def _own(channel: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the process, which writes an error in one line."""
    environment = {name: value for name, value in channel["env"].items() if name != "COLUMNS"}
    return {**channel, "env": environment}


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a process, or how it ended without one."""
    lines = ended.stderr.strip().splitlines()
    code = ended.returncode
    return lines[-1] if lines else f"signal {-code}" if code < 0 else f"exit code {code}"


def is_module(model: object) -> bool:
    """Return whether a MODEL names a factory of modules."""
    return isinstance(model, str) and model.strip().startswith(PREFIX)


def refuse_for_modules(model: str, output: Path | None, *, explain: bool = False) -> None:
    """Raise an InputError if a file or --explain is requested for a module of unknown layers."""
    if is_module(model) and output is not None:
        raise InputError(
            f"--output {output}: a plan.json and a drawing need all layers; those of {model} are "
            "unknown; the answer shows how to train it from Python"
        )
    if is_module(model) and explain:
        raise InputError(
            f"--explain: needs known layers; for {model} the answer names the block at the peak"
        )


def refuse_inputs(inputs: Sequence[str] | None) -> None:
    """Raise if inputs of a traced module are given for another model."""
    if inputs:
        raise InputError(f"--input {inputs[0]}: belongs to module:package.path:factory")


def trace(
    name: str, *, precision: str, device: str, inputs: Sequence[str] | None = None
) -> TracedModule:
    """Return the executor's trace of a module on fake tensors.

    The executor imports the factory, with the current folder on the path.
    """
    if (missing := missing_run_package()) is not None:
        raise InputError(f"{name}: tracing a module needs {missing}: {INSTALL}")
    _refuse_unknown_package(name.strip())
    report(f"loading torch, tracing {name.strip()}")
    command = [sys.executable, "-m", "executor", "trace-module", name.strip()]
    command += ["--precision", precision, "--device", device]
    for text in inputs or ():
        command.append(f"--input={text}")
    try:
        with reports_of_process() as channel:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_SECONDS,
                **_own(channel),
            )
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: no trace within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode:
        words = _last_words(done).removeprefix("shardplan: ")
        if done.returncode == InputError.exit_code:
            raise InputError(words)
        raise RunError(f"{name}: tracing failed: {words}")
    from cost_models.traced.module import traced_module

    try:  # whatever the user's code prints comes before
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise InputError(f"{name}: its code ended Python, or prints after the trace") from None
    return traced_module(found)


def _refuse_unknown_package(name: str) -> None:
    """Raise an InputError for a factory in no package, without importing anything."""
    path, _, function = name.removeprefix(PREFIX).partition(":")
    package = path.partition(".")[0]
    if not package or not function:
        raise InputError(f"{name}: not a module ({PREFIX}package.path:factory expected)")
    if package in sys.modules:
        return
    if not (importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])):
        raise InputError(f"{name}: {package} cannot be imported: there is no such package here")
