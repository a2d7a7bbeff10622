"""Completion in bash, zsh and fish of values such as ``tp=2,zero=1``.

click's classes and scripts, with three differences: bash takes ``=`` as a word of its own, so words
are joined again and only the part behind the last ``=`` is proposed; no space follows a proposal
that ends with ``=``; fish keeps the commas of a value.
"""

from __future__ import annotations

import os
from typing import Any, Final

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

EQUALS: Final = "="


class Bash(BashComplete):
    """Completion in bash."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", 'COMPREPLY+=("$value"); [[ $value == *= ]] && compopt -o nospace'
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor and the beginning of the word at the cursor."""
        words, at = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        *before, last = joined([*words[1:at], words[at] if at < len(words) else ""])
        return before, last

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        """Return the proposals without the words that bash has behind it already."""
        found = super().get_completions(args, incomplete)
        ready = incomplete[: incomplete.rfind(EQUALS) + 1]
        if ready.startswith("-"):  # the option, which no proposal repeats
            ready = ready.partition(EQUALS)[2]
        return [
            CompletionItem(item.value.removeprefix(ready), item.type, item.help) for item in found
        ]


def joined(words: list[str]) -> list[str]:
    """Return words with those around an equals sign as one.

    >>> joined(["plan", "--fix", "tp", "=", "2,zero", "="]), joined(["fit", ""])
    (['plan', '--fix', 'tp=2,zero='], ['fit', ''])
    """
    found: list[str] = []
    for word in words:
        if found and (word == EQUALS or (found[-1].endswith(EQUALS) and found[-1] != EQUALS)):
            found[-1] += word
        else:
            found.append(word)
    return found


class Zsh(ZshComplete):
    """Completion in zsh."""

    source_template = ZshComplete.source_template.replace(
        "        compadd -U -V unsorted -a completions\n",
        "        local -a open=(${(M)completions:#*=})\n"
        "        local -a whole=(${completions:#*=})\n"
        "        (( $#open )) && compadd -U -S '' -V unsorted -a open\n"
        "        (( $#whole )) && compadd -U -V unsorted -a whole\n",
    )


class Fish(FishComplete):
    """Completion in fish."""

    source_template = FishComplete.source_template.replace(
        'string split ","', 'string split --max 1 ","'
    )


def use_shells() -> None:
    """Complete with these classes in every command."""
    for shell in (Bash, Zsh, Fish):
        add_completion_class(shell)
