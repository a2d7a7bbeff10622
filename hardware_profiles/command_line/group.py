"""A group of commands that are imported when they are called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from hardware_profiles.command_line.declarations import command
from hardware_profiles.command_line.help import HelpContext, help_option, write_examples
from hardware_profiles.command_line.shells import use_shells
from hardware_profiles.errors import Interrupted, did_you_mean

use_shells()


class LazyGroup(click.Group):
    """Commands that are imported when they are called: a name, its function, a line of help."""

    context_class = HelpContext

    def __init__(
        self,
        table: Mapping[str, tuple[str, str]],
        *,
        epilog_of_commands: str | None = None,
        order: Sequence[str] = (),
        examples: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.table = table
        self.epilog_of_commands = epilog_of_commands
        self.order = order  # of the titles of options
        self.examples = examples or {}  # of every command; "": of the group

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option ``--help`` in our words."""
        return help_option(super().get_help_option(ctx))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and build one command."""
        if cmd_name not in self.commands and cmd_name in self.table:
            where, text = self.table[cmd_name]
            module, function = where.split(":")
            made = getattr(importlib.import_module(module), function)
            if not isinstance(made, click.Command):
                made = command(made, name=cmd_name, help=text, epilog=self.epilog_of_commands)
                made.order, made.examples = self.order, self.examples.get(cmd_name, ())
            self.commands[cmd_name] = made
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; suggest a similar one."""
        name = str(args[0])
        if ctx.resilient_parsing and name not in self.table:
            return name, None, args[1:]
        if name not in self.table and not name.startswith("-"):
            ctx.fail(f"No such command '{name}'. {did_you_mean(name, self.table)}".strip())
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin so, without importing a command."""
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in self.table.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command: its result is the exit code; an interruption is one line of output."""
        try:
            ctx.exit(super().invoke(ctx) or 0)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are typed, then the text at the end."""
        if self.examples.get(""):
            with formatter.section("Examples"):
                write_examples(formatter, self.examples[""])
        super().format_epilog(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lines of help without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])
