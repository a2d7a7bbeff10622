"""Shell scripts that pass flags to a Python program: the syntax of launch scripts.

A document holds the program's flags by name (``tensor-model-parallel-size``), those of the launcher
below ``torchrun``, and exported variables below ``env``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.syntax.documents import FileHeader, Syntax, stated_in_comments
from planner.exchange.syntax.shell_script import read_script

LAUNCHER, ENVIRONMENT, UNRESOLVED = "torchrun", "env", "unresolved"
_NUMBER: Final = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_FLAG: Final = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)
_LAUNCHERS: Final = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
_PROGRAM: Final = re.compile(r".*\.py|-m")


def parse_flags(text: str, where: str) -> dict[str, Any]:
    r"""Return the flags of the command with the most flags after a Python program.

    >>> parse_flags("TP=2\ntorchrun --nproc-per-node 8 a.py --tp $TP --bf16 --lr 1e-4", "x")
    {'torchrun': {'nproc-per-node': 8}, 'tp': 2, 'bf16': True, 'lr': 0.0001}
    """
    script = read_script(text)
    commands = [words for words in script.commands if any(word[:2] == "--" for word in words)]
    if not commands:
        raise InputError(f"{where}: no command with flags (--name VALUE) was found in the script")
    words = max(commands, key=lambda each: sum(word[:2] == "--" for word in each))
    programs = [
        at for at, word in enumerate(words) if _PROGRAM.fullmatch(word) and not _starts(words, at)
    ]
    start = programs[0] if programs else 0
    launcher = {name: value for name, value in flags_of(words[:start]).items() if name != "m"}
    document: dict[str, Any] = {LAUNCHER: launcher} if launcher else {}
    document |= flags_of(words[start + 1 :] if programs else words)
    if unset := [name for name in script.variables.unset if not name.isdigit()]:
        document[UNRESOLVED] = unset
    return document


def _starts(words: Sequence[str], at: int) -> bool:
    """Whether a word is the ``-m`` of a launcher, whose flags come before the program."""
    return words[at] == "-m" and words[at + 1 : at + 2] != [] and words[at + 1] in _LAUNCHERS


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Return flags by name: True, one value or a list; underscores are dashes.

    >>> flags_of(["--a_b", "1", "--c", "--d=x", "--e", "p", "-2"])
    {'a-b': 1, 'c': True, 'd': 'x', 'e': ['p', -2]}
    """
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        match = _FLAG.fullmatch(words[at])
        at += 1
        if match is None:
            continue
        values = [] if match["value"] is None else [match["value"]]
        while not values or match["value"] is None:
            if at >= len(words) or _FLAG.fullmatch(words[at]):
                break
            values.append(words[at])
            at += 1
        plain = [_plain(value) for value in values]
        name = match["name"].replace("_", "-")
        found[name] = True if not plain else plain[0] if len(plain) == 1 else plain
    return found


def _plain(text: str) -> Any:
    """Return a number where a word is one."""
    text = text.strip("'\"")
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else float(text)


def render_flags(leaves: Mapping[str, Any], comments: Mapping[str, str], header: FileHeader) -> str:
    """Return the script: one array of flags, and the command that passes them on."""
    variables = _below(leaves, ENVIRONMENT)
    launcher = _below(leaves, LAUNCHER)
    lines = ["#!/usr/bin/env bash", *header.comments(), "set -euo pipefail"]
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in variables.items()]
    lines += ["", "ARGS=("]
    for path, value in leaves.items():
        if "." in path or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        text = " ".join([f"--{path}", *(shlex.quote(str(each)) for each in values)])
        lines.append(f"    {text}" + (f"  # {comments[path]}" if comments.get(path) else ""))
    lines.append(")")
    options = [
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in launcher.items()
        if name != "program"
    ]
    command = " ".join(["torchrun", *options, str(launcher["program"])])
    return "\n".join([*lines, "", f'exec {command} "${{ARGS[@]}}" "$@"']) + "\n"


def _below(leaves: Mapping[str, Any], section: str) -> dict[str, Any]:
    start = f"{section}."
    return {path[len(start) :]: value for path, value in leaves.items() if path.startswith(start)}


FLAGS: Final = Syntax("shell", parse_flags, render_flags, stated_in_comments)
