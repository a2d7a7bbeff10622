"""Python functions that build a configuration: the syntax of torchtitan, Megatron Bridge and NeMo.

``FILE::NAME`` names one of several functions of a file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from hardware_profiles.errors import InputError, did_you_mean
from planner.exchange.keys import placed
from planner.exchange.syntax.documents import FileHeader, Syntax, parse_yaml, stated_in_comments
from planner.exchange.syntax.python_document import CALL, parse_functions

FUNCTION: Final = "shardplan_job"


def parse_recipe(text: str, where: str) -> dict[str, Any]:
    """Return the configuration that a Python file builds: of its function, or of ``::NAME``."""
    path, _, name = where.partition("::")
    found = parse_functions(text, path)
    if name:
        if name not in found:
            hint = did_you_mean(name, found)
            text = f"{path}: no function {name[:60]!r} that returns a configuration"
            raise InputError(f"{text}. {hint}" if hint else text)
        return found[name]
    built = {key: value for key, value in found.items() if len(value) > 1}
    if "" in built and len(built) > 1:
        return built[""]
    if not built:
        raise InputError(f"{where}: no function that returns a configuration")
    if len(built) > 1:
        names = ", ".join(list(built)[:12])
        raise InputError(f"{where}: several configurations; name one as {path}::NAME ({names})")
    return next(iter(built.values()))


def parse_recipe_or_toml(text: str, where: str) -> dict[str, Any]:
    """Return the configuration of a Python file or of a TOML file."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return parse_recipe(text, where)


def parse_recipe_or_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the configuration of a Python file or of a YAML file."""
    try:
        return parse_recipe(text, where)
    except InputError:
        if "\ndef " in text or "\nimport " in text or "::" in where:
            raise
        return parse_yaml(text, where)


# --- writing ---


def _split(called: str) -> tuple[str, str]:
    """Return the module of what is called, and its name from the first capital on.

    >>> _split("torchtitan.trainer.Trainer.Config"), _split("a.b.make")
    (('torchtitan.trainer', 'Trainer.Config'), ('a.b', 'make'))
    """
    parts = called.split(".")
    at = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:at]), ".".join(parts[at:])


def _imports(document: Any) -> set[tuple[str, str]]:
    """Return the modules and names that a document calls."""
    if isinstance(document, list):
        return set().union(*map(_imports, document))
    if isinstance(document, Code):
        return {document.needs}
    if not isinstance(document, Mapping):
        return set()
    found = set[tuple[str, str]]().union(*map(_imports, document.values()))
    if CALL in document:
        module, name = _split(document[CALL])
        found.add((module, name.split(".")[0]))
    return found


class Code(str):
    """Text that is written as it is, with the module and the name that it needs."""

    needs: tuple[str, str]

    def __new__(cls, text: str, module: str, name: str) -> Code:
        """Return the text; a string that is compared and copied as any other."""
        made = super().__new__(cls, text)
        made.needs = (module, name)
        return made

    def __deepcopy__(self, memo: Any) -> Code:
        return self


class PythonTuple(list[Any]):
    """A list that is written as a tuple, and read as a list."""


def name_of(called: str) -> str:
    """Return how a file names what it calls and imports."""
    return _split(called)[1]


def import_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the imports of what a document calls."""
    names: dict[str, list[str]] = {}
    for module, name in sorted(_imports(document)):
        names.setdefault(module, []).append(name)
    return [f"from {module} import {', '.join(each)}" for module, each in names.items() if module]


def expression(value: Any, comments: Mapping[str, str], path: str = "", indent: str = "") -> str:
    """Return a value as Python; one argument a line, with comments."""
    inner = indent + "    "
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, PythonTuple):
        return "(" + ", ".join(expression(each, {}, "", inner) for each in value) + ")"
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        items = "".join(f"{inner}{expression(each, {}, '', inner)},\n" for each in value)
        return f"[\n{items}{indent}]"
    if isinstance(value, list):
        return "[" + ", ".join(expression(each, {}, "", inner) for each in value) + "]"
    if not isinstance(value, Mapping):
        return repr(value)
    name = _split(value[CALL])[1] if CALL in value else "dict"
    lines = []
    for key, each in value.items():
        if key == CALL:
            continue
        below = f"{path}.{key}" if path else key
        text = expression(each, comments, below, inner)
        said = comments.get(below)
        argument = text if key.isdigit() else f"{key}={text}"
        lines.append(f"{inner}{argument}," + (f"  # {said}" if said else ""))
    positional = [line.strip().rstrip(",") for line in lines if "=" not in line.split("(")[0]]
    if name.count(".") > 1 and len(positional) == 1:  # Class.made_from(x).turned_into(y=z)
        named = [
            line.strip().rstrip(",") for line in lines if line.strip().rstrip(",") not in positional
        ]
        first, _, last = name.rpartition(".")
        return f"{first}({positional[0]}).{last}({', '.join(named)})"
    if len(lines) <= 1 and "\n" not in "".join(lines) and "#" not in "".join(lines):
        return f"{name}({''.join(lines).strip().rstrip(',')})"
    return f"{name}(\n" + "\n".join(lines) + f"\n{indent})"


def render_function(
    leaves: Mapping[str, Any], comments: Mapping[str, str], header: FileHeader
) -> str:
    """Return a file whose function returns the configuration in one expression."""
    document = placed(leaves)
    body = expression(document, comments, indent="    ")
    returned = _split(document[CALL])[1]
    lines = [
        *header.comments(),
        *import_lines(document),
        "",
        "",
        f"def {FUNCTION}() -> {returned}:",
        f"    return {body}",
    ]
    return "\n".join(lines) + "\n"


def _assigned(
    footer: Sequence[str],
    leaves: Mapping[str, Any],
    comments: Mapping[str, str],
    header: FileHeader,
) -> str:
    """Return a file whose function sets fields of a configuration that another one makes."""
    document = placed(leaves)
    made = [path.removesuffix(CALL).rstrip(".") for path in leaves if path.endswith(CALL)]
    lines = [*header.comments(), *import_lines(document), "", "", f"def {FUNCTION}():"]
    for path in sorted(made, key=lambda each: each.count(".") + bool(each)):
        arguments = {
            key: each
            for key, each in _at(document, path).items()
            if key == CALL or key.isdigit() or (path, key) in ARGUMENTS
        }
        target = f"config.{path}" if path else "config"
        lines.append(f"    {target} = {expression(arguments, {}, path, '    ')}")
    for path, value in leaves.items():
        owner, _, key = path.rpartition(".")
        if key == CALL or key.isdigit() or (owner, key) in ARGUMENTS:
            continue
        said = comments.get(path)
        text = expression(value, {}, path, "    ")
        lines.append(f"    config.{path} = {text}" + (f"  # {said}" if said else ""))
    return "\n".join([*lines, "    return config", "", "", *footer]) + "\n"


# fields that are arguments of a call and no attributes of what it returns
ARGUMENTS: Final = frozenset(
    (("model", "load_weights"), ("", "num_nodes"), ("", "num_gpus_per_node"))
)


def _at(document: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for name in path.split(".") if path else ():
        document = document[name]
    return document


PYTHON: Final = Syntax(
    "python", parse_recipe_or_toml, render_function, stated_in_comments, also=("toml",)
)


def assignments(footer: Sequence[str]) -> Syntax:
    """Return the syntax of files that set fields one by one, and end with some lines."""
    render = partial(_assigned, footer)
    return Syntax("python", parse_recipe_or_yaml, render, stated_in_comments, also=("yaml",))
