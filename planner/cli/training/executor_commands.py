"""The commands that become the executor, which declares their options and their help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from hardware_profiles.errors import InputError
from planner.request.executor_process import INSTALL, missing_run_package

WEIGHTS: Final = "huggingface"  # the format of ``export`` for trained weights
EXPORT_HELP: Final = (
    "Write a plan as the configuration of another trainer, with its launch command."
)
EXPORT_EXAMPLES: Final = (
    "shardplan export plan.json --to deepspeed -o configs",
    "shardplan export plan.json --to accelerate",
)


def _become(command: str) -> click.Command:
    """Return a command that hands all its words to the executor."""

    @click.pass_context
    def call(context: click.Context) -> None:
        if command == "export" and _names_a_plan(context.args):
            context.exit(_export_plan(context.args))
        _execute(command, context.args)

    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
    return click.Command(
        command, callback=call, help="", context_settings=passed_on, add_help_option=False
    )


def _names_a_plan(words: Sequence[str]) -> bool:
    """Whether ``export`` is asked for another trainer's file: of a plan, not of a run's folder."""
    for position, word in enumerate(words):
        if word.startswith("--to"):
            value = word.partition("=")[2] or "".join(words[position + 1 : position + 2])
            return value != WEIGHTS
    return any(Path(word).is_file() for word in words if not word.startswith("-"))


def _export_plan(words: Sequence[str]) -> int:
    """Write a plan as another trainer's file."""
    from hardware_profiles.command_line.declarations import command
    from planner.cli.planning.plan_files import export_plan

    made = command(export_plan, name="export", help=EXPORT_HELP, epilog="")
    made.examples = EXPORT_EXAMPLES
    code: int | None = made.main(list(words), prog_name="shardplan export", standalone_mode=False)
    return code or 0


def _execute(command: str, arguments: list[str]) -> None:
    """Replace this process by the executor.

    Signals then reach the executor, and the parent process sees its exit code.
    """
    if command != "tokenize" and (missing := missing_run_package()) is not None:
        raise InputError(f"{command} needs {missing}: {INSTALL}")
    os.execv(sys.executable, [sys.executable, "-m", "executor", command, *arguments])


run, export, tokenize = (_become(name) for name in ("run", "export", "tokenize"))
