"""``module:package.path:factory``: the executor traces the module in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cost_models.traced.module import TracedModule, traced_module
from hardware_profiles.errors import InputError, RunError
from planner.request.run_packages import INSTALL, missing_run_package

PREFIX: Final = "module:"
TIMEOUT_SECONDS: Final = 1800.0


def is_module(model: object) -> bool:
    """Return whether a MODEL names a factory of modules."""
    return isinstance(model, str) and model.strip().startswith(PREFIX)


def refuse_for_modules(model: str, output: Path | None, *, explain: bool = False) -> None:
    """Raise an InputError where a file or a story is asked of a module of unknown layers."""
    if is_module(model) and output is not None:
        raise InputError(
            f"--output {output}: a plan.json and a drawing say what every layer is, which is not "
            f"known of {model}; the answer says how to train it from Python"
        )
    if is_module(model) and explain:
        raise InputError(
            f"--explain: tells the moments of known layers; of {model} the answer names the block "
            "at the peak"
        )


def refuse_inputs(inputs: Sequence[str] | None) -> None:
    """Raise for what only a traced module is called with."""
    if inputs:
        raise InputError(f"--input {inputs[0]}: belongs to module:package.path:factory")


def trace(
    name: str, *, precision: str, device: str, inputs: Sequence[str] | None = None
) -> TracedModule:
    """Return what the executor sees of a module on fake tensors.

    The factory is imported there, with the current folder on the path.
    """
    if (missing := missing_run_package()) is not None:
        raise InputError(f"{name}: tracing a module needs {missing}: {INSTALL}")
    command = [sys.executable, "-m", "executor", "trace", name.strip()]
    command += ["--precision", precision, "--device", device]
    for text in inputs or ():
        command.append(f"--input={text}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: no trace within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        words = last.removeprefix("shardplan: ")
        if done.returncode == InputError.exit_code:
            raise InputError(words)
        raise RunError(f"{name}: tracing failed: {words}")
    # whatever the user's code prints comes before
    return traced_module(json.loads(done.stdout.splitlines()[-1]))
