"""Texts of documents: JSON and YAML, with a header that says what the file is.

A header lists the options that the target's keys do not carry, one a line as ``name = value``, so
that reading a written file loses none.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import MAX_DEPTH, nesting, parse_json
from planner.exchange.keys import placed
from planner.exchange.syntax.python_document import parse_python

MAX_VALUES: Final = 100_000  # of a document
OWN_KEY: Final = "shardplan"  # of a JSON file, which has no comments
_TOML: Final = re.compile(r"(?m)^\[[A-Za-z][\w.]*\][ \t]*(?:#.*)?$")
_FLAG: Final = re.compile(r"(?m)(?:^|[\s\"'(])--[a-z][a-z0-9_-]+")
STATED_IN_JSON: Final = "not_in_this_file"  # below it
_BEGIN: Final = "Written by shardplan"
STATED: Final = re.compile(r"#\s+(?P<name>[a-z_]+) = (?P<value>.*?)(?:  \(.*\))?\s*")


@dataclass(frozen=True)
class FileHeader:
    """The first lines of a written file."""

    target: str
    version: str
    question: str  # the model and the cluster of the plan
    launch: str
    # options that the file's keys do not carry: value, and where to set it
    elsewhere: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def comments(self) -> list[str]:
        """Return the lines as comments."""
        made_by = f"{_BEGIN} {importlib.metadata.version('shardplan')} for {self.target}"
        lines = [f"{made_by} {self.version}: {self.question}"]
        lines += [f"Start: {line}" for line in self.launch.splitlines()]
        if self.elsewhere:
            lines.append("Not in this file, set them where the brackets say:")
            lines += [f"  {line}" for line in self.stated()]
        return [f"# {line}" for line in lines]

    def stated(self) -> list[str]:
        """Return the options that are not in the file."""
        return [
            f"{name} = {json.dumps(value)}  ({where})"
            for name, (value, where) in self.elsewhere.items()
        ]


@dataclass(frozen=True)
class Syntax:
    """How a kind of document is read and written.

    ``render``: the text of values by path, of a comment for each path, and of a header.
    """

    name: str
    parse: Callable[[str, str], dict[str, Any]]  # text, name in errors
    render: Callable[[Mapping[str, Any], Mapping[str, str], FileHeader], str]
    stated: Callable[[str], dict[str, Any]]  # options in the header of a written file
    also: tuple[str, ...] = ()  # names of other syntaxes that ``parse`` understands


def stated_in_comments(text: str) -> dict[str, Any]:
    """Return the options in the header of a written file; {} for any other file.

    >>> lines = ["# Written by shardplan 1 for x", "#   seq_len = 4096  (the data)"]
    >>> stated_in_comments(chr(10).join(lines))
    {'seq_len': 4096}
    """
    lines = iter(text.splitlines())
    found: dict[str, Any] = {}
    if not any(line.startswith(f"# {_BEGIN}") for line in lines):
        return found
    for line in lines:
        if not line.startswith("#"):
            break
        if (match := STATED.fullmatch(line)) is not None:
            try:
                found[match["name"]] = json.loads(match["value"])
            except ValueError:
                raise InputError(f"{line.strip('# ')}: not a value of JSON") from None
    return found


def syntax_of(text: str) -> str:
    """Return json, python, shell, toml or yaml.

    >>> syntax_of('{"a": 1}'), syntax_of("import torch"), syntax_of("run --bf16 --tp 2")
    ('json', 'python', 'shell')
    >>> syntax_of("base_model: x"), syntax_of("[training]")
    ('yaml', 'toml')
    """
    if text.lstrip().startswith("{"):
        return "json"
    try:
        body = parse_python(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        body = []
    if any(isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef)) for node in body):
        return "python"
    if _TOML.search(text) is not None:
        return "toml"
    if text.startswith("#!") or len(_FLAG.findall(text)) > text.count(": "):
        return "shell"
    return "yaml"


# --- JSON ---


def _json_text(leaves: Mapping[str, Any], comments: Mapping[str, str], header: FileHeader) -> str:
    own = {
        "target": f"{header.target} {header.version}",
        "plan": header.question,
        "start": header.launch.splitlines(),
        STATED_IN_JSON: {name: value for name, (value, _) in header.elsewhere.items()},
        "set_them_in": {name: where for name, (_, where) in header.elsewhere.items()},
    }
    document = {OWN_KEY: own, **placed(leaves)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _stated_in_json(text: str) -> dict[str, Any]:
    own = parse_json(text, "file").get(OWN_KEY, {})
    stated = own.get(STATED_IN_JSON) if isinstance(own, dict) else None
    return dict(stated) if isinstance(stated, dict) else {}


def _bare_json_text(
    leaves: Mapping[str, Any], comments: Mapping[str, str], header: FileHeader
) -> str:
    return json.dumps(placed(leaves), indent=2, allow_nan=False) + "\n"


# --- YAML ---


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping of plain values."""
    found = _yaml_mapping(text)
    if isinstance(found, str):
        raise InputError(f"{where}: {found}")
    return dict(found)


@lru_cache(maxsize=1)  # each trainer that writes YAML is asked whether a text is its file
def _yaml_mapping(text: str) -> dict[str, Any] | str:
    """Return the mapping of a text, or what is wrong with it."""
    import yaml

    try:
        value = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return f"not YAML: {' '.join(str(error).split())[:200]}"
    if not isinstance(value, dict):
        return "must be a mapping of keys to values"
    if _values(value) > MAX_VALUES:  # before their depth: an alias may stand for many
        return f"more than {MAX_VALUES:,} values, or aliases without an end"
    if nesting(value) > MAX_DEPTH:
        return f"nested too deeply (at most {MAX_DEPTH} levels)"
    return {str(name): inner for name, inner in value.items()}


def _values(value: object) -> int:
    """Return how many values a document holds with its aliases written out; at most one too many.

    >>> laugh = "lol"
    >>> for _ in range(40):
    ...     laugh = [laugh] * 10
    >>> _values(laugh) > MAX_VALUES
    True
    """
    count, left = 0, [value]
    while left and count <= MAX_VALUES:
        one = left.pop()
        count += 1
        if isinstance(one, (dict, list)):
            left += one.values() if isinstance(one, dict) else one
    return count


def _yaml_text(leaves: Mapping[str, Any], comments: Mapping[str, str], header: FileHeader) -> str:
    lines = [*header.comments(), *_yaml_lines(placed(leaves), comments, "", "")]
    return "\n".join(lines) + "\n"


def _yaml_lines(
    document: Mapping[str, Any], comments: Mapping[str, str], before: str, indent: str
) -> list[str]:
    lines: list[str] = []
    for name, value in document.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:")
            lines += _yaml_lines(value, comments, f"{path}.", f"{indent}  ")
            continue
        said = comments.get(path)
        lines.append(f"{indent}{name}: {yaml_value(value)}" + (f"  # {said}" if said else ""))
    return lines


def yaml_value(value: Any) -> str:
    """Return a value in one line."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").strip()


JSON: Final = Syntax("json", parse_json, _json_text, _stated_in_json)
# of a target that refuses unknown keys: the header is in another file
BARE_JSON: Final = Syntax("json", parse_json, _bare_json_text, lambda text: {})
YAML: Final = Syntax("yaml", parse_yaml, _yaml_text, stated_in_comments)
