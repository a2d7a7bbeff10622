"""Makes docs/reference/commands.md, the commands and their options: --write, or --check.

They follow from the click commands of the planner and of the executor, as ``--help`` does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import click  # noqa: E402
from docstrings import prose  # noqa: E402
from generated import write_or_compare  # noqa: E402
from make_defaults import default_of  # noqa: E402

from executor.cli import parser as executor  # noqa: E402
from hardware_profiles.command_line import declarations  # noqa: E402
from hardware_profiles.command_line.command import Command  # noqa: E402
from hardware_profiles.command_line.group import LazyGroup  # noqa: E402
from planner.cli.app import COMMANDS, EXECUTOR, EXIT_CODES, app  # noqa: E402
from planner.cli.planning.plan_files import export_plan  # noqa: E402
from planner.cli.training.executor_commands import EXPORT_EXAMPLES, EXPORT_HELP  # noqa: E402

PAGE: Final = DOCS / "reference" / "commands.md"
HEAD: Final = """# Commands

Made of the commands themselves (`python docs/make_commands.py --write`), as `shardplan COMMAND
--help` shows them. An option can be typed as `--tp 8` or, behind the arguments, as `tp=8`. Why a
default is what it is: [defaults](defaults.md).

"""


class Recorder(click.HelpFormatter):
    """Keeps what a command writes into its help: titles, and rows of two cells below them."""

    def __init__(self) -> None:
        super().__init__(width=1000)
        self.sections: dict[str, list[tuple[str, str]]] = {}
        self.title = ""

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Note the title of the rows that follow."""
        self.title = name
        yield

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Keep rows."""
        self.sections[self.title] = list(rows)


def commands() -> Iterator[tuple[str, Command]]:
    """Yield every command with its title; ``export`` writes plans and weights."""
    context = click.Context(app, info_name="shardplan")
    runs = LazyGroup(
        executor.COMMANDS, examples=executor.EXAMPLES, epilog_of_commands=executor.EXIT_CODES
    )
    for name in COMMANDS:
        if name == "export":
            plan = declarations.command(export_plan, name=name, help=EXPORT_HELP)
            plan.examples = EXPORT_EXAMPLES
            yield "export: a plan for another trainer", plan
            yield "export: trained weights", _command(runs, context, name)
        else:
            found = _command(runs if name in EXECUTOR else app, context, name)
            found.help = COMMANDS[name][1]
            yield name, found


def _command(group: LazyGroup, context: click.Context, name: str) -> Command:
    found = group.get_command(context, name)
    assert isinstance(found, Command)
    return found


def rows_of(command: Command, title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the table of the arguments, or of a group of options."""
    yield from (f"**{title}**", "")
    if title == "Arguments":
        yield from ("| argument | meaning |", "| --- | --- |")
        for name, text in rows:
            yield f"| {code(name)} | {cell(prose(text))} |"
    else:
        defaults = {
            flag: "required" if one.default is MISSING else default_of(one)
            for one in command.fields
            if one.option
            for flag in one.flags
        }
        yield from ("| option | meaning | default |", "| --- | --- | --- |")
        for flags, text in rows:
            first = flags.split()[0].rstrip(",")
            found = defaults.get(first) or defaults.get(flags.split()[-1], "–")
            meaning = cell(prose(text.removesuffix(" [required]")))
            yield f"| {code(flags)} | {meaning} | {cell(prose(found))} |"
    yield ""


def code(text: str) -> str:
    """Return words as code in a cell of a table; GitHub and mkdocs escape bars differently."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{text.replace('|', '&#124;').replace('<', '&lt;')}</code>"


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return text.replace("|", r"\|")


def section(title: str, command: Command) -> Iterator[str]:
    """Yield the section of a command."""
    context = command.context_class(command, info_name=f"shardplan {command.name}")
    recorder = Recorder()
    command.format_options(context, recorder)
    usage = " ".join([context.info_name or "", *command.collect_usage_pieces(context)])
    yield from (f"## {title}", "", prose(command.help or ""), "", "```text", usage, "```", "")
    for group, rows in recorder.sections.items():
        yield from rows_of(command, group, rows)
    if command.examples:
        yield from ("**Examples**", "", "```text", *command.examples, "```", "")


def page() -> str:
    """Return the page."""
    found = list(commands())
    lines = [HEAD + "| command | |", "| --- | --- |"]
    for title, command in found:
        anchor = title.replace(":", "").replace(" ", "-")
        lines.append(f"| [{title}](#{anchor}) | {cell(prose(command.help or ''))} |")
    lines += ["", prose(EXIT_CODES), ""]
    for title, command in found:
        lines += section(title, command)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page, or exit with 1 where it differs from the commands."""
    write_or_compare({PAGE: page()})


if __name__ == "__main__":
    main()
