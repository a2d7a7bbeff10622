"""Help of every command: groups, all values, examples, and 80 columns."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cost_models.plan.plan import Plan
from executor.cli.parser import COMMANDS as EXECUTOR_COMMANDS
from executor.cli.parser import EXAMPLES as EXECUTOR_EXAMPLES
from hardware_profiles.command_line.command import Command
from hardware_profiles.command_line.group import LazyGroup
from hardware_profiles.command_line.help import COMMON, OUTPUT, HelpContext
from hardware_profiles.options import declared
from planner.cli.app import COMMANDS, ORDER, app
from planner.cli.examples import EXAMPLES
from planner.request.requests import FitRequest, PlanRequest

OWN = [name for name, (where, _) in COMMANDS.items() if "executor_commands" not in where]
EXECUTOR = LazyGroup(EXECUTOR_COMMANDS, examples=EXECUTOR_EXAMPLES, name="shardplan")


def command(name: str) -> Command:
    group = app if name in OWN else EXECUTOR
    made = group.get_command(HelpContext(group), name)
    assert isinstance(made, Command)
    return made


def help_of(name: str) -> str:
    context = HelpContext(command(name), info_name=f"shardplan {name}", terminal_width=80)
    return command(name).get_help(context)


def sections(text: str) -> dict[str, list[str]]:
    """Lines of every section by its title."""
    parts = re.split(r"^(\w[^\n]*):\n", text, flags=re.MULTILINE)
    return {title: body.splitlines() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("name", [*OWN, *EXECUTOR_COMMANDS])
def test_help_fits_80_columns_and_ends_with_two_examples(name: str) -> None:
    text = help_of(name)
    assert max(map(len, text.splitlines())) <= 80
    examples = [line for line in sections(text)["Examples"] if line.strip()][:2]
    program = "python -m executor" if name in ("measure", "trace-module") else "shardplan"
    assert all(line.startswith(f"  {program} {name}") for line in examples)
    assert len(examples) == 2


@pytest.mark.parametrize("name", ["fit", "plan", "run"])
def test_about_ten_options_come_first_and_no_group_has_one_option(name: str) -> None:
    found = sections(help_of(name))
    titles = [title for title in found if title not in ("Arguments", "Examples")]
    titles = [title for title in titles if any(line.startswith("  -") for line in found[title])]
    sizes = {title: sum(bool(re.match(r"  -", line)) for line in found[title]) for title in titles}
    assert titles[0].lower() == COMMON
    assert titles[-1].lower() == OUTPUT
    assert 7 <= sizes["Common"] <= 11
    assert min(sizes.values()) >= 2


def test_the_groups_have_an_order() -> None:
    used = {
        group
        for name in ("fit", "plan")
        for group in command(name).groups.values()
        if group not in (COMMON, OUTPUT, "")
    }
    assert used == set(ORDER)


@pytest.mark.parametrize(("name", "request_class"), [("fit", FitRequest), ("plan", PlanRequest)])
def test_every_value_is_listed(name: str, request_class: type) -> None:
    text = help_of(name)
    words = {*re.split(r"[\s,;:]+", text), *re.split(r"[\s,;]+", text)}
    for one in declared(request_class).values():
        if one.option is not None and one.name != "software":
            assert set(one.values) <= words, one.name
    assert "shardplan software lists all" in " ".join(text.split())
    assert ", …" not in help_of(name)


def test_one_option_has_one_name_in_every_command() -> None:
    """Of a flag: the same field and the same help; of a field: the same flags."""
    fields: dict[str, set[str]] = {}
    flags: dict[str, set[tuple[str, ...]]] = {}
    for name in (*OWN, *EXECUTOR_COMMANDS):
        for one in command(name).fields:
            for flag in one.flags:
                fields.setdefault(flag, set()).add(one.name)
            if one.flags and one.name != "source":
                flags.setdefault(one.name, set()).add(one.flags)
    assert {flag: names for flag, names in fields.items() if len(names) > 1} == {}
    assert {name: found for name, found in flags.items() if len(found) > 1} == {}
    pinned = {one.short.replace("_", "-") for one in declared(Plan).values() if one.option}
    known = {flag.lstrip("-") for one in declared(Plan).values() for flag in one.flags}
    assert pinned - known == {"vp", "microbatches"}  # shorter than --virtual-stages


@pytest.mark.parametrize("name", [*OWN, *EXECUTOR_COMMANDS])
def test_the_words_of_every_example_are_options(name: str) -> None:
    for example in command(name).examples:
        words = shlex.split(example.split(" >")[0])
        command(name).make_context(name, words[words.index(name) + 1 :])


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", ["", *OWN, *EXECUTOR_COMMANDS])
def test_help_is_as_wide_as_the_terminal(name: str, columns: int) -> None:
    made = app if not name else command(name)
    context = made.context_class(made, info_name=name, terminal_width=columns - 2)
    lines = made.get_help(context).splitlines()
    assert max(map(len, lines)) <= columns
    at = lines.index("Examples:")
    shown = "\n".join(lines[at + 1 : [*lines, ""].index("", at)]).replace(" \\\n", " ")
    typed = [" ".join(line.split()) for line in shown.splitlines()]
    assert typed == list(EXAMPLES[""] if not name else made.examples)
    assert len(typed) == 2


@pytest.mark.slow(seconds=60)
def test_examples_run(tmp_path: Path) -> None:
    (tmp_path / "RUNS.csv").write_text("model,gpu,num_gpus,seq_len\ngpt2,A100-SXM,8,1024\n")
    for name in ("fit", "plan", "replan", "compare", "models", "hardware", "validate"):
        for example in EXAMPLES[name]:
            if "runs/first" in example:
                continue  # needs a finished run
            done = subprocess.run(
                [sys.executable, "-m", "planner", *shlex.split(example)[1:]],
                cwd=tmp_path,
                env={"PYTHONPATH": str(Path.cwd()), "PATH": ""},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (example, done.stderr)


def test_usage_shows_which_argument_may_be_left_out() -> None:
    assert help_of("models").startswith("Usage: shardplan models [OPTIONS] [NAME]")
    assert help_of("fit").startswith("Usage: shardplan fit [OPTIONS] MODEL CLUSTER\n")


def test_words_with_hyphens_are_not_broken() -> None:
    words = help_of("fit").split()
    assert "paged_adamw_8bit," in words
    assert "hf-trainer+fsdp2" in words
    assert not [word for word in words if re.fullmatch(r"[a-z]+-", word)]


def test_a_positional_word_is_an_argument() -> None:
    assert all(isinstance(p, click.Argument) for p in command("fit").params[:2])
