"""The errors that a user can cause; each carries the exit code of the command line.

The lowest package holds them so that every other one can raise them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class ShardplanError(Exception):
    """Base of every error with a message meant for the user."""

    exit_code = 1


class InputError(ShardplanError):
    """Invalid input: the message names it, its value and the allowed values."""

    exit_code = 2


class NeedsMeasurement(InputError):
    """The cache has no measurement of this machine with that number of processes."""

    def __init__(self, processes: int) -> None:
        super().__init__(
            f"here:{processes}: this machine has not been measured with {processes} "
            f"process{'es' if processes > 1 else ''} yet. Measure it: "
            f"shardplan calibrate --processes {processes}"
        )
        self.processes = processes


class NoLegalPlanError(ShardplanError):
    """No plan fits, or no plan is legal; ``document``: the reasons as plain JSON values."""

    exit_code = 3

    def __init__(self, message: str, document: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.document = dict(document or {})


class RunError(ShardplanError):
    """The run itself failed."""

    exit_code = 5


class Interrupted(ShardplanError):
    """The user interrupted a command."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``Did you mean A100-SXM-80GB?``, or an empty string.

    >>> did_you_mean("lama", ["llama", "gpt2"])
    'Did you mean llama?'
    """
    close = similar(name, known)
    return f"Did you mean {' or '.join(close)}?" if close else ""


def similar(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Return the known names most like a name, whatever their case.

    >>> similar("seq", ["seq_len", "sp", "cp"])
    ['seq_len']
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)
    return [by_lower[match] for match in close]
