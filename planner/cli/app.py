"""The command line: ``shardplan fit``, ``plan``, ``run``, ``validate``, ``models`` and others.

Exit codes: 0 fits or done, 1 internal error, 2 bad input, 3 does not fit or no legal plan, 4 tight
(``fit`` only), 5 the run failed, 6 stopped on request, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from hardware_profiles.command_line import HELP, Interrupted, LazyGroup
from hardware_profiles.errors import ShardplanError, did_you_mean
from planner.cli.outputs import say

# name: (module:function, line of help); the module is imported when its command is called
COMMANDS: Final = {
    "fit": (
        "planner.cli.fit:fit",
        "Will it fit? A verdict with its margin, the parts of the memory, and what to change.",
    ),
    "plan": (
        "planner.cli.plan:plan",
        "What is the best plan? A search over all parallelism, recompute and micro-batch size.",
    ),
    "run": (
        "planner.cli.executor_commands:run",
        "Train with a plan.json, then compare the prediction with the measurement.",
    ),
    "export": (
        "planner.cli.executor_commands:export",
        "Write the trained weights of a run as a Hugging Face folder.",
    ),
    "tokenize": (
        "planner.cli.executor_commands:tokenize",
        "Make a token file of text, JSONL or Parquet, once for many runs.",
    ),
    "explain": (
        "planner.cli.explain:explain",
        "Why this plan? Its bottleneck, what would change the choice, and why not another plan.",
    ),
    "validate": (
        "planner.cli.validate:validate",
        "How accurate is it? Predictions compared with published runs, by row and by group.",
    ),
    "models": (
        "planner.cli.listing_commands:models",
        "List the presets, or show the shape and parameters of one model.",
    ),
    "hardware": (
        "planner.cli.listing_commands:hardware",
        "List the accelerators, or show the figures of one, each with its source.",
    ),
    "replan": (
        "planner.cli.runs:replan",
        "Plan again for fewer accelerators, with the same model, precision, optimizer and batch.",
    ),
    "compare": (
        "planner.cli.runs:compare",
        "Compare two plans, or a plan and its run, term by term.",
    ),
    "calibrate": (
        "planner.cli.runs:calibrate",
        "Improve predictions for a cluster from runs, or measure this machine again.",
    ),
}


def _version(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Print the version and exit."""
    if value:
        import importlib.metadata

        print(f"shardplan {importlib.metadata.version('shardplan')}")
        context.exit()


def _completion(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    """Print the completion script of a shell and exit."""
    if shell is not None:
        from click.shell_completion import get_completion_class

        found = get_completion_class(shell)
        assert found is not None
        print(found(app, {}, "shardplan", "_SHARDPLAN_COMPLETE").source())
        context.exit()


app = LazyGroup(
    COMMANDS,
    name="shardplan",
    help="Will it fit, what is the best plan, run it.",
    epilog="Exit codes: 0 fits or done, 1 internal error, 2 bad input, 3 does not fit or no legal "
    "plan, 4 tight (fit), 5 the run failed, 6 stopped on request, 130 interrupted.",
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
        click.Option(
            ["--show-completion"],
            type=click.Choice(["bash", "zsh", "fish"]),
            expose_value=False,
            is_eager=True,
            callback=_completion,
            help="print the completion script of a shell",
        ),
    ],
)


def _usage(error: Any, words: list[str]) -> str:
    """Return a usage error as one line that contains the offending value."""
    context = getattr(error, "ctx", None)
    if context is not None and error.message == context.get_help():  # no arguments at all
        return str(error.message)
    names = getattr(getattr(error, "param", None), "opts", [])
    values = [value for name in names if (value := _value_of(name, words)) is not None]
    value = f" ({names[-1]} {values[-1]})" if values else ""
    command = "shardplan" if context is None else context.command_path
    message = error.format_message().rstrip(".")
    unknown = getattr(error, "option_name", None) if values == [] else None
    if unknown is not None:
        message = f"No such option: {unknown}{_instead(error, command, words)}"
    return f"shardplan: {message}{value}; see {command} --help"


def _instead(error: Any, command: str, words: list[str]) -> str:
    """Return a suggestion for an unknown option."""
    if command == "shardplan plan":
        from planner.request.pins import pinned

        pins = pinned(error.option_name, _value_of(error.option_name, words))
        if pins is not None:
            return f" (pin it with --fix {pins})"
    known = [flag for param in error.ctx.command.params for flag in param.opts]
    hint = did_you_mean(error.option_name, known)
    return f". {hint}".rstrip("?") + "?" if hint else ""


def _value_of(option: str, words: list[str]) -> str | None:
    """Return the value given for an option."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return None


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; an error prints one line on stderr and sets the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    traceback = "--traceback" in words and words[:1] not in (["run"], ["export"], ["tokenize"])
    if traceback:
        words.remove("--traceback")
    try:
        sys.exit(app.main(args=words, prog_name="shardplan", standalone_mode=False))
    except click.ClickException as error:
        say(_usage(error, words))
        sys.exit(2)
    except ShardplanError as error:
        say(f"shardplan: {error}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        say("shardplan: interrupted")
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away
        sys.exit(0)
    except Exception as error:
        if traceback:
            raise
        say(
            f"shardplan: internal error: {type(error).__name__}: {error} "
            "(run again with --traceback and report it)"
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
