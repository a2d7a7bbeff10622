"""Messages and files that commands write besides their answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hardware_profiles.errors import InputError


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise, before any computation, if its result could not be written."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file to write")
    if path.exists() and not force:
        raise InputError(f"{path}: exists already; choose another name or add --force")
    if not path.parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist")


def say(text: str) -> None:
    """Print a message on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_answer(answer: Any, *, json: bool) -> None:
    """Print the text of an answer, or its JSON document."""
    from planner.text.answer import json_text

    print(json_text(answer.to_dict()) if json else answer)
