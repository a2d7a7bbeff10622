"""Writes the job file of a plan for a system, and submits it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hardware_profiles.errors import InputError, RunError
from planner.launchers.job import LaunchJob, LaunchOptions, System, job_of


def job_file(
    plan: Path, system: System, run_options: Sequence[str], options: LaunchOptions
) -> tuple[LaunchJob, str]:
    """Return a job and the text of its file."""
    job = job_of(plan, system, run_options, options)
    text: str = _launcher(system).job_file(job)
    return job, text


def require_program(system: System) -> None:
    """Raise if the program that submits jobs is missing."""
    program = _launcher(system).PROGRAM
    if shutil.which(program) is None:
        raise InputError(
            f"--on {system}: {program} is not on the PATH; --dry-run writes the job file, to be "
            "submitted elsewhere"
        )


def submit_command(system: System, job: LaunchJob, path: Path) -> str:
    """Return the command that submits a job file."""
    return shlex.join(_launcher(system).command(path, job))


def submit(system: System, job: LaunchJob, text: str) -> None:
    """Submit a job file; the program's output is that of this process."""
    launcher = _launcher(system)
    with tempfile.TemporaryDirectory(prefix="shardplan-") as folder:
        path = Path(folder) / launcher.FILE
        path.write_text(text, encoding="utf-8")
        command = launcher.command(path, job)
        code = subprocess.run(command, check=False).returncode
    if code:
        raise RunError(f"{' '.join(command[:3])} ended with exit code {code}")


def _launcher(system: System) -> Any:
    """Return the module of a system: PROGRAM, FILE, ``job_file`` and ``command``."""
    return import_module(f"planner.launchers.{system}")
