"""The commands that become the executor: their options and their help are its own."""

from __future__ import annotations

import os
import sys

import typer

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_executor_commands(app: typer.Typer) -> None:
    """Add ``run``, ``export`` and ``tokenize``."""
    for command in (run, export, tokenize):
        app.command(context_settings=PASSED_ON, add_help_option=False)(command)


def run(context: typer.Context) -> None:
    """Run it: train with a plan.json, then hold the prediction against the measurement."""
    _execute("run", context.args)


def export(context: typer.Context) -> None:
    """Write what a run trained as a Hugging Face folder."""
    _execute("export", context.args)


def tokenize(context: typer.Context) -> None:
    """Make a token file of text, JSONL or Parquet, once for many runs."""
    _execute("tokenize", context.args)


def _execute(command: str, arguments: list[str]) -> None:
    """Become the executor, in the place of this process.

    So signals reach it, and whoever waits sees how it ended.
    """
    import importlib.util

    from hardware_profiles.errors import InputError

    if command != "tokenize" and importlib.util.find_spec("torch") is None:
        raise InputError(f"{command} needs torch: pip install 'shardplan[run]'")
    os.execv(sys.executable, [sys.executable, "-m", "executor", command, *arguments])
