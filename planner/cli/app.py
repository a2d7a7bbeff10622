"""The command line: ``shardplan fit``, ``plan``, ``run``, ``validate``, ``models`` and others.

Exit codes: 0 yes or done, 1 our bug, 2 bad input, 3 does not fit or no legal plan, 4 ``fit`` only:
TIGHT, 5 the run failed, 6 it was stopped on request, 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hardware_profiles.errors import ShardplanError
from planner.cli.executor_commands import add_executor_commands
from planner.cli.explain import explain
from planner.cli.fit import fit
from planner.cli.listing_commands import hardware, models
from planner.cli.options import Force, Json
from planner.cli.outputs import say
from planner.cli.plan import plan
from planner.cli.validate import validate

app = typer.Typer(
    name="shardplan",
    help="Will it fit, what is the best plan, run it.",
    epilog="Exit codes: 0 yes, 1 our bug, 2 bad input, 3 does not fit or no legal plan, "
    "4 tight (fit), 5 the run failed, 6 stopped on request, 130 interrupted.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ClickError: Any = typer.BadParameter.__mro__[2]  # click's, or the copy of it inside newer typer
INTERRUPTED = 130
# options of fit that plan searches, as --fix pins them
PINNED_BY_FIX = {
    "--dp": "dp=8",
    "--tp": "tp=2",
    "--pp": "pp=2",
    "--cp": "cp=2",
    "--ep": "ep=2",
    "--zero": "zero=1",
    "--sp": "sp=on",
    "--no-sp": "sp=off",
    "--etp": "etp=on",
    "--no-etp": "etp=off",
    "--schedule": "schedule=1f1b",
    "--virtual-stages": "vp=2",
    "--recompute": "recompute=full",
    "--recompute-layers": "recompute=full,recompute_layers=2",
    "--micro-batch-size": "mbs=1",
    "--mbs": "mbs=1",
    "--num-microbatches": "microbatches=8",
    "--dp-replicate": "dp_replicate=2",
    "--cp-method": "cp_method=ring",
    "--offload": "offload=optimizer",
    "--offload-device": "offload=optimizer,offload_device=nvme",
    "--secondary-ranks": "secondary_ranks=8",
    "--quantised-weights": "quantised_weights=on",
    "--quantised-gradients": "quantised_gradients=on",
}


app.command()(fit)
app.command()(plan)
add_executor_commands(app)
for command in (explain, validate, models, hardware):
    app.command()(command)


@app.command()
def replan(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan.json")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="accelerators that are left")],
    output: Annotated[Path, typer.Option("--output", "-o", help="write the new plan here")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Plan again for what is left: the same model, precision, optimizer and batch, if it can be."""
    from cost_models.plan_file import write_plan_file
    from planner.answer.answers import to_json
    from planner.cli.outputs import refuse_existing
    from planner.runs.replan import replan as ask

    refuse_existing(output, force=force)
    answer = ask(plan, gpus)
    write_plan_file(output, answer.file, force=force)
    for note in answer.notes:
        say(f"note: {note}")
    print(to_json(answer.to_dict()) if json else f"wrote {output}")


@app.command()
def compare(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan.json")],
    other: Annotated[
        Path, typer.Argument(metavar="OTHER", help="another plan.json, or the folder of a run")
    ],
    json: Json = False,
) -> None:
    """What differs, term by term: two plans, or a plan and a run of it."""
    from planner.answer.answers import to_json
    from planner.runs.compare import compare as ask
    from planner.runs.comparison_text import comparison_text

    answer = ask(plan, other)
    print(to_json(answer.to_dict()) if json else comparison_text(answer))


@app.command()
def calibrate(
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN_DIR", help="learn from this run (may be repeated)"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, max=128, help="measure anew with so many CPU processes")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="write the cluster to this file (TOML, a CLUSTER)"),
    ] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Make predictions for a cluster better: from runs, or by measuring this machine anew."""
    from planner.answer.answers import to_json
    from planner.cli.outputs import refuse_existing
    from planner.runs.calibrate import calibrate as ask

    if output is not None:
        refuse_existing(output, force=force)
    answer = ask(source or [], processes=processes, output=output, force=force, say=say)
    print(to_json(answer.to_dict()) if json else answer)


def version(value: bool) -> None:
    """Print the version and stop."""
    if value:
        import importlib.metadata

        print(f"shardplan {importlib.metadata.version('shardplan')}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Will it fit, what is the best plan, run it."""


def _usage(error: Any, words: list[str]) -> str:
    """Return what is wrong with the words of a command, in one line with the value in question."""
    context = getattr(error, "ctx", None)
    if context is not None and error.message == context.get_help():  # no words at all
        return str(error.message)
    names = getattr(getattr(error, "param", None), "opts", [])
    values = [value for name in names if (value := _value_of(name, words)) is not None]
    value = f" ({names[-1]} {values[-1]})" if values else ""
    command = "shardplan" if context is None else context.command_path
    message = error.format_message().rstrip(".")
    pinned = PINNED_BY_FIX.get(getattr(error, "option_name", ""))
    if pinned is not None and command == "shardplan plan":
        message = f"No such option: {error.option_name} (pin it with --fix {pinned})"
    return f"shardplan: {message}{value}; see {command} --help"


def _value_of(option: str, words: list[str]) -> str | None:
    """Return the word that was given for an option."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return None


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; every error is one line on stderr and an exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    traceback = "--traceback" in words and words[:1] not in (["run"], ["export"], ["tokenize"])
    if traceback:
        words.remove("--traceback")
    try:
        code = app(args=words, prog_name="shardplan", standalone_mode=False)
        if code == INTERRUPTED:  # what newer typer makes of it
            raise KeyboardInterrupt
        sys.exit(code)
    except ClickError as error:
        say(_usage(error, words))
        sys.exit(2)
    except ShardplanError as error:
        say(f"shardplan: {error}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        say("shardplan: interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away
        sys.exit(0)
    except Exception as error:
        if traceback:
            raise
        say(
            f"shardplan: a bug of ours: {type(error).__name__}: {error} "
            "(run again with --traceback and report it)"
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
