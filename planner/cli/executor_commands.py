"""The commands that become the executor, which declares their options and their help."""

from __future__ import annotations

import os
import sys

import click

from hardware_profiles.errors import InputError
from planner.request.executor_process import INSTALL, missing_run_package


def _become(command: str) -> click.Command:
    """Return a command that hands all its words to the executor."""

    @click.pass_context
    def call(context: click.Context) -> None:
        _execute(command, context.args)

    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    return click.Command(
        command, callback=call, help="", context_settings=passed_on, add_help_option=False
    )


def _execute(command: str, arguments: list[str]) -> None:
    """Replace this process by the executor.

    Signals then reach the executor, and the parent process sees its exit code.
    """
    if command != "tokenize" and (missing := missing_run_package()) is not None:
        raise InputError(f"{command} needs {missing}: {INSTALL}")
    os.execv(sys.executable, [sys.executable, "-m", "executor", command, *arguments])


run, export, tokenize = (_become(name) for name in ("run", "export", "tokenize"))
