"""The words of a command line: what a command returns for them, and errors about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Final

import click

from hardware_profiles.errors import InputError, Interrupted, similar
from hardware_profiles.options import named_elsewhere

MOST_NAMED: Final = 20  # values that an error lists
# of an unknown option and its value in a command: advice beyond a similar name
Advice = Callable[[click.Context, str, str | None], str | None]


def parse(made: click.Command, words: Sequence[str], program: str) -> Any:
    """Return what a command returns for the words of a command line.

    A wrong word is an InputError; ``--help`` prints and exits.
    """
    try:
        answer = made.main(args=list(words), prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        text = usage_error(error, words, program)
        raise InputError(text.removeprefix("shardplan: ")) from None
    except click.Abort:
        raise Interrupted("interrupted") from None
    if isinstance(answer, int):
        raise SystemExit(answer)
    return answer


def usage_error(
    error: Any, words: Sequence[str], program: str, *, advice: Advice | None = None
) -> str:
    """Return an error about the words of a command line, in one line with the value in question."""
    context = getattr(error, "ctx", None)
    if context is not None and error.message == context.get_help():  # no words at all
        return str(error.message)
    names = getattr(getattr(error, "param", None), "opts", [])
    values = [value for name in names if (value := _value_of(name, words)) is not None]
    command = program if context is None else context.command_path
    message = error.format_message().rstrip(".")
    value = f" ({names[-1]} {values[-1]})" if values and values[-1] not in message else ""
    if isinstance(error, click.NoSuchOption):
        message = f"No such option: {error.option_name}{_instead(error, words, advice)}"
    elif isinstance(error, click.BadOptionUsage) and (needed := _value_needed(error)):
        message, value = needed, ""
    text = f"shardplan: {message}{value}"
    return f"{text} See {command} --help" if text[-1] == "?" else f"{text}; see {command} --help"


def _instead(error: Any, words: Sequence[str], advice: Advice | None) -> str:
    """Return a suggestion for an unknown option."""
    option = error.option_name
    if advice is not None and (text := advice(error.ctx, option, _value_of(option, words))):
        return f" ({text})"
    fields = {
        (one.option.flags if one.is_positional else one.flags)[0]: one
        for one in getattr(error.ctx.command, "fields", ())
        if one.is_positional or one.flags
    }
    if hint := named_elsewhere(option, fields):
        return f". {hint}"
    known = {
        flag.lstrip("-"): flag
        for param in error.ctx.command.params
        for flag in param.opts
        if flag.startswith("--")
    }
    close = similar(option.lstrip("-"), known)
    return f". Did you mean {' or '.join(known[name] for name in close)}?" if close else ""


def _value_needed(error: click.BadOptionUsage) -> str | None:
    """Return what an option needs that came without its value; None for another error."""
    fields = getattr(getattr(error.ctx, "command", None), "fields", ())
    one = next((one for one in fields if error.option_name in one.flags), None)
    if one is None or "requires an argument" not in error.message:
        return None
    if 0 < len(one.values) <= MOST_NAMED:
        return f"{error.option_name} needs a value: {', '.join(one.values)}"
    shown = (one.option.metavar if one.option else None) or "N"
    return f"{error.option_name} needs a value, {error.option_name} {shown}: {one.help}"


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """Return the word that was given for an option."""
    for word, following in zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return None
