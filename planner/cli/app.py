"""The command line: ``shardplan fit``, ``plan``, ``run``, ``validate``, ``models`` and others.

Exit codes: 0 yes or done, 1 our bug, 2 bad input, 3 does not fit or no legal plan, 4 ``fit`` only:
TIGHT, 5 the run failed, 6 it was stopped on request, 7 ``fit`` only: another plan fits, 130
interrupted.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from hardware_profiles.command_line.group import LazyGroup
from hardware_profiles.command_line.help import HELP
from hardware_profiles.command_line.usage import usage_error
from hardware_profiles.errors import Interrupted, ShardplanError
from hardware_profiles.message import error_text
from hardware_profiles.progress import line_of_command
from hardware_profiles.terminal import discard_output, prepare_streams, say, show, show_rest
from planner.cli.completion import complete_in_executor
from planner.cli.examples import EXAMPLES

# name: module and function, and the line of help; a module is imported when its command is called
COMMANDS: Final = {
    "fit": (
        "planner.cli.planning.fit:fit",
        "Will it fit? A verdict with a margin, the parts, and what to change.",
    ),
    "plan": (
        "planner.cli.planning.plan:plan",
        "What is the best plan? A search over all parallelism, recompute and micro-batch size.",
    ),
    "run": (
        "planner.cli.training.executor_commands:run",
        "Train with a plan.json, then compare the prediction with the measurement.",
    ),
    "export": (
        "planner.cli.training.executor_commands:export",
        "Write the trained weights of a run, or a plan.json for another trainer (--to deepspeed).",
    ),
    "tokenize": (
        "planner.cli.training.executor_commands:tokenize",
        "Make a token file of text, JSONL or Parquet, once for many runs.",
    ),
    "explain": (
        "planner.cli.planning.plan_files:explain",
        "Explain a plan: its limits, sensitivity of the choice, and comparisons with other plans.",
    ),
    "validate": (
        "planner.cli.training.tables:validate",
        "How far is it off? Predictions compared with published runs, by row and by group.",
    ),
    "models": (
        "planner.cli.listings.commands:models",
        "List the presets, or show the parts of one model.",
    ),
    "hardware": (
        "planner.cli.listings.commands:hardware",
        "List the accelerators, or show the figures of one, each with its source.",
    ),
    "software": (
        "planner.cli.listings.commands:software",
        "List the trainers, and the parts of trainers, that --software takes.",
    ),
    "replan": (
        "planner.cli.training.runs:replan",
        "Plan again for fewer accelerators: the same model, precision, optimizer and batch.",
    ),
    "launch": (
        "planner.cli.training.launch:launch",
        "Start a plan on Slurm, Kubernetes, SkyPilot, Ray or machines reached by ssh.",
    ),
    "compare": (
        "planner.cli.training.runs:compare",
        "The differences, term by term, of two plans, or of a plan and a run of it.",
    ),
    "compare-techniques": (
        "planner.cli.planning.techniques:compare_techniques",
        "One line for every technique of the literature: memory, traffic, step, what runs it.",
    ),
    "report": (
        "planner.cli.planning.plan_files:report",
        "Write a plan, or a run of it, as one page to read, print and send.",
    ),
    "trace": (
        "planner.cli.planning.plan_files:trace",
        "Write the simulated step, and the measured one of a run, as a trace for Perfetto.",
    ),
    "learn": (
        "planner.cli.training.tables:learn",
        "Learn what your trainer does from one to five short runs; --software takes the result.",
    ),
    "observe": (
        "planner.cli.training.logs:observe",
        "Read a log of another trainer: measured and predicted, a row for learn and validate.",
    ),
    "oom": (
        "planner.cli.training.logs:oom",
        "Explain an out-of-memory error of torch: which tensor, where, what would help.",
    ),
    "calibrate": (
        "planner.cli.training.runs:calibrate",
        "Improve predictions for a cluster: from runs, or by a new measurement of this machine.",
    ),
    "doctor": (
        "planner.cli.listings.doctor:doctor",
        "Show versions, GPUs, the cache, and what to install for which command.",
    ),
    "serve": (
        "planner.page.serve:serve",
        "Open a page on this machine: estimates follow each change of model, cluster, plan.",
    ),
    "completion": (
        "planner.cli.completion:completion",
        "Print the script by which bash, zsh or fish completes options, models and clusters.",
    ),
}
EXECUTOR: Final = tuple(name for name, (where, _) in COMMANDS.items() if "executor" in where)
EXIT_CODES: Final = (
    "Exit codes: 0 yes, 1 our bug, 2 bad input, 3 does not fit or no legal plan, 4 tight (fit), "
    "5 the run failed, 6 stopped on request, 7 another plan fits (fit), 130 interrupted."
)
# titles of the options in the help; common ones come first, those of the output last
ORDER: Final = (
    "search",
    "training",
    "parallelism",
    "memory",
    "adapters and frozen parts",
    "serving",
    "whole run",
)


def _version(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Print the version and stop."""
    if value:
        import importlib.metadata

        show(f"shardplan {importlib.metadata.version('shardplan')}")
        context.exit()


app = LazyGroup(
    COMMANDS,
    order=ORDER,
    examples=EXAMPLES,
    name="shardplan",
    help="Will it fit, what is the best plan, run it.",
    epilog=EXIT_CODES,
    epilog_of_commands=EXIT_CODES,
    no_args_is_help=True,
    context_settings=HELP,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_version,
            help="print the version",
        ),
        # ``main`` reads it anywhere among the words
        click.Option(
            ["--traceback"], is_flag=True, expose_value=False, help="show where errors arise"
        ),
    ],
)


def _elsewhere(context: click.Context, option: str, value: str | None) -> str | None:
    """Return how ``plan`` fixes an option that only ``fit`` has, or which command has it."""
    if context.command_path == "shardplan plan":
        from planner.request.pins import pinned

        pins = pinned(option, value)
        if pins is not None:
            return f"pin it with --fix {pins}"
    for name in ("fit", "plan"):
        command = app.get_command(context, name)
        if command is not None and any(option in one.opts for one in command.params):
            return f"shardplan {name} has it"
    return None


def _as_typed(text: str, words: list[str]) -> str:
    """Return an error of ``fit`` or ``plan`` with options for the names of fields."""
    if words[:1] not in (["fit"], ["plan"]):
        return text
    made = app.get_command(click.Context(app), words[0])
    from cost_models.plan.plan import Plan
    from hardware_profiles.options import declared
    from planner.cli.option_names import in_options

    return in_options(text, getattr(made, "fields", ()), declared(Plan))


def _call(words: list[str]) -> Any:
    """Call a command and return its exit code."""
    try:
        return app.main(args=words, prog_name="shardplan", standalone_mode=False)
    except SystemExit as stop:
        if stop.code != 1:
            raise
        discard_output()  # click leaves with 1 where it prints into a closed pipe
        return 0


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; every error is one message on stderr and an exit code."""
    complete_in_executor(EXECUTOR)
    words = sys.argv[1:] if arguments is None else list(arguments)
    traceback = "--traceback" in words and words[:1] not in (["run"], ["export"], ["tokenize"])
    if traceback:
        words.remove("--traceback")
    prepare_streams()
    try:
        with line_of_command(words):
            code = _call(words)
        show_rest()
        sys.exit(code)
    except click.ClickException as error:
        say(error_text(usage_error(error, words, "shardplan", advice=_elsewhere)))
        sys.exit(2)
    except ShardplanError as error:
        say(error_text(f"shardplan: {_as_typed(str(error), words)}"))
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        say("shardplan: interrupted")
        sys.exit(Interrupted.exit_code)
    except Exception as error:
        if traceback:
            raise
        if type(error).__name__ == "PackageNotFoundError" and error.args == ("shardplan",):
            say("shardplan: the package is not installed, only its folder found: pip install -e .")
            sys.exit(2)
        say(
            error_text(
                f"shardplan: a bug of ours: {type(error).__name__}: {error} "
                "(run again with --traceback and report it)"
            )
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
