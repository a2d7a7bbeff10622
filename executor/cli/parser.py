"""The commands of ``python -m executor``; imports neither torch nor models, so --help is quick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from executor.cli.options import ExportOptions, MeasureOptions, TokenizeOptions, TraceOptions
from executor.cli.run_options import RunOptions
from hardware_profiles.command_line import usage
from hardware_profiles.command_line.group import LazyGroup
from hardware_profiles.command_line.help import HELP

# name: class of its options, and the line of help
COMMANDS: Final = {
    "run": ("executor.cli.run_options:RunOptions", "Train as a plan.json says."),
    "measure": ("executor.cli.options:MeasureOptions", "Measure this machine."),
    "tokenize": (
        "executor.cli.options:TokenizeOptions",
        "Make a token file of text, JSONL or Parquet, once for many runs.",
    ),
    "export": (
        "executor.cli.options:ExportOptions",
        "Write the weights of a checkpoint as a Hugging Face folder (a plan.json for another "
        "trainer: shardplan export --to deepspeed --help).",
    ),
    "trace-module": (
        "executor.cli.options:TraceOptions",
        "Parameters, saved tensors and operations of a module (JSON).",
    ),
}
# at the end of the help of a command
EXAMPLES: Final = {
    "": (
        "python -m executor run plan.json --data corpus.txt --steps 100",
        "python -m executor measure --processes 2",
    ),
    "run": (
        "shardplan run plan.json --data corpus.txt --steps 100 -o runs/first",
        "shardplan run plan.json --dry-run",
    ),
    "tokenize": (
        "shardplan tokenize corpus.txt -o corpus.bin",
        "shardplan tokenize rows.jsonl --text-field body -o rows.bin",
    ),
    "export": (
        "shardplan export runs/first -o weights",
        "shardplan export runs/first -o half --dtype bfloat16",
    ),
    "measure": ("python -m executor measure --processes 2", "python -m executor measure --json"),
    "trace-module": (
        "python -m executor trace-module module:net:build --input x=float32[B,8]",
        "python -m executor trace-module module:net:build --device cuda",
    ),
}
OWN_COMMANDS: Final = ("measure", "trace-module")  # of the executor, not of shardplan
EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 our bug (--traceback shows it), 2 bad input, 5 the run failed or "
    "--verify found a difference, 6 stopped on request in good order, 130 interrupted."
)
STOPPED_CODE: Final = 6

Options = RunOptions | MeasureOptions | TokenizeOptions | ExportOptions | TraceOptions


def parse(words: Sequence[str]) -> Options:
    """Return the options of the command that was given; raise an InputError, or exit after help."""
    app = LazyGroup(
        COMMANDS,
        epilog_of_commands=EXIT_CODES,
        examples=EXAMPLES,
        name="shardplan",
        help="Run a plan.",
        epilog=EXIT_CODES,
        no_args_is_help=False,
        context_settings=HELP,
    )
    own = bool(words) and words[0] in OWN_COMMANDS
    options: Options = usage.parse(app, words, "python -m executor" if own else "shardplan")
    return options
