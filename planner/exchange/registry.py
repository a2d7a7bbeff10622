"""The targets by name, and the kind of a file by its content."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cost_models.legality.capabilities import capabilities
from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_text
from planner.exchange.names import target_names
from planner.exchange.syntax.documents import syntax_of
from planner.exchange.target import ConfigReading, Target

MAX_BYTES: Final = 300_000  # of a file: YAML is read at some 0.4 MB a second
_ARGUMENTS: Final = re.compile(r"\b(?:\w*TrainingArguments|\w+Config)\(")  # of transformers, TRL
_KIND: Final = re.compile(r"(?P<kind>[a-z][a-z-]*):(?P<path>.+)", re.S)


def target(name: str) -> Target:
    """Return a target by name.

    >>> target("deepspeed").file
    'ds_config.json'
    """
    capabilities(name)  # the name exists
    module = importlib.import_module(f"planner.exchange.targets.{name.replace('-', '_')}")
    found: Target = module.TARGET
    return found


@dataclass(frozen=True)
class ConfigFile:
    """A file of a trainer that exists."""

    target: Target
    text: str
    where: str  # as it was named: FILE or FILE::NAME
    path: Path

    def read(self) -> ConfigReading:
        """Return what the file states."""
        return self.target.read(self.text, self.where, self.path.parent)


def open_config(text: str) -> ConfigFile:
    """Return the file of ``FILE`` or ``KIND:FILE``, whose kind its content tells."""
    match = _KIND.fullmatch(text)
    named = match is not None and match["kind"] in target_names()
    where = match["path"] if match is not None and named else text
    path = Path(where.partition("::")[0]).expanduser()
    content = read_text(path, "a trainer's configuration", max_bytes=MAX_BYTES)
    one = target(match["kind"]) if match is not None and named else kind_of(content, where)
    return ConfigFile(one, content, where, path)


def read_config(text: str) -> ConfigReading:
    """Return what ``FILE`` or ``KIND:FILE`` states, another trainer's file."""
    return open_config(text).read()


def kind_of(text: str, where: str) -> Target:
    """Return the target whose file a text is."""
    wanted = syntax_of(text)
    every = [target(name) for name in target_names()]
    candidates = [one for one in every if wanted in (one.syntax.name, *one.syntax.also)]
    problems: list[InputError] = []
    parsed: dict[int, Mapping[str, Any]] = {}
    for one in candidates:
        try:
            parse = one.syntax.parse
            document = parsed.setdefault(id(parse), {}) or parse(text, where)
            parsed[id(parse)] = document
        except InputError as error:
            problems.append(error)
            continue
        if one.recognises(document):
            return one
    if problems and len(problems) == len(candidates):
        raise problems[0]
    if wanted == "python" and _ARGUMENTS.search(text):
        raise InputError(
            f"{where}: Python is not run to read its arguments. Save them with "
            "open('args.json', 'w').write(args.to_json_string()), then --from args.json"
        )
    if any("layer_ranges" in document for document in parsed.values()):
        raise InputError(
            f"{where}: a plan of shardplan, not a trainer's file; shardplan explain {where} prices "
            "it"
        )
    names = ", ".join(target_names())
    raise InputError(
        f"{where}: no keys of a known trainer (name its kind: --from KIND:FILE, one of {names})"
    )
