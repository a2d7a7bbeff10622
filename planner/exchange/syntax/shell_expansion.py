"""Expansion of shell words: quotes, variables, defaults, arrays, arithmetic, word splitting.

Left out: command substitution (empty; its text is noted), globs, braces.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from planner.exchange.syntax.python_document import parse_python
from planner.exchange.syntax.shell_words import end_of_expansion, end_of_quotes

MAX_WORDS: Final = 100_000
MAX_VALUE: Final = 100_000  # characters
MAX_NESTED: Final = 16  # expansions in each other: each reads the text of those inside it again
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED: Final = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?])(?:\[(?P<index>[^\]]*)\])?"
)
_OPERATION: Final = re.compile(r"(:[-=+?]|[-=+?]|%%?|##?|//?|\^\^?|,,?|:)(.*)", re.DOTALL)
_ARITHMETIC: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: lambda left, right: left << min(right, 64),
    ast.RShift: operator.rshift,
}


@dataclass
class Variables:
    """Values of a script's variables, and what could not be resolved."""

    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    unset: dict[str, None] = field(default_factory=dict)  # names that were read without a value
    commands: dict[str, None] = field(default_factory=dict)  # substitutions that were not run
    nested: int = 0  # expansions around the one that is resolved

    def get(self, name: str) -> str | None:
        """Return a value; of an array its first element."""
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else None
        return self.values.get(name)

    def assign(self, name: str, value: str, *, appends: bool = False) -> None:
        """Set a variable."""
        before = (self.get(name) or "") if appends else ""
        self.arrays.pop(name, None)
        self.values[name] = (before + value)[:MAX_VALUE]


def expand(word: str, variables: Variables) -> list[str]:
    """Return the words that a raw word stands for; an unquoted empty value is none.

    >>> v = Variables({"TP": "2", "ALL": "--a 1 --b"}, {"X": ["p q", "r"]})
    >>> expand("$ALL", v), expand('"$ALL"', v), expand('"${X[@]}"', v), expand("${Y:-$TP}0", v)
    (['--a', '1', '--b'], ['--a 1 --b'], ['p q', 'r'], ['20'])
    """
    fields, current, is_word, at = list[str](), "", False, 0
    while at < len(word):
        char = word[at]
        if char == "\\":
            skipped = word[at + 1 : at + 2]
            current += "" if skipped == "\n" else skipped
            is_word, at = True, at + 2
        elif char == "'":
            end = end_of_quotes(word, at)
            current += word[at + 1 : end - 1]
            is_word, at = True, end
        elif char == '"':
            end = end_of_quotes(word, at)
            first, *more = _in_double_quotes(word[at + 1 : end - 1], variables)
            is_word = is_word or first != _NOTHING
            current += "" if first == _NOTHING else first
            for each in more:
                fields.append(current)
                current = each
            at = end
        elif char in "$`":
            values, at, _ = _expansion(word, at, variables)
            text = " ".join(values)
            pieces = text.split()
            if not pieces:
                continue
            if text[0].isspace() and (current or is_word):
                fields.append(current)
                current = ""
            current += pieces[0]
            is_word = True
            for piece in pieces[1:]:
                fields.append(current)
                current = piece
        else:
            current += char
            is_word, at = True, at + 1
        if len(fields) > MAX_WORDS or len(current) > MAX_VALUE:
            return fields[:MAX_WORDS]
    return [*fields, current] if is_word else fields


def expand_to_text(word: str, variables: Variables) -> str:
    """Return the value of a raw word in an assignment or a test: not split."""
    is_plain = not any(quote in word for quote in "'\"\\")
    return " ".join(expand(f'"{word}"' if is_plain else word, variables))


_NOTHING: Final = "\0"  # "${EMPTY[@]}" is no word, not an empty one


def _in_double_quotes(text: str, variables: Variables) -> list[str]:
    """Return one word, or those of a quoted array."""
    words, at, quoted_array = [""], 0, False
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
            words[-1] += "" if text[at + 1] == "\n" else text[at + 1]
            at += 2
        elif char in "$`":
            values, at, is_array = _expansion(text, at, variables)
            if is_array and values:
                words[-1] += values[0]
                words += values[1:]
            elif is_array:
                quoted_array = True
            else:
                words[-1] += " ".join(values)
        else:
            words[-1] += char
            at += 1
    return [_NOTHING] if quoted_array and words == [""] else words


def _expansion(text: str, at: int, variables: Variables) -> tuple[list[str], int, bool]:
    """Return the values of an expansion, the position after it, and whether it is ``[@]``."""
    if variables.nested == MAX_NESTED:
        return [""], len(text), False
    variables.nested += 1
    try:
        return _resolved(text, at, variables)
    finally:
        variables.nested -= 1


def _resolved(text: str, at: int, variables: Variables) -> tuple[list[str], int, bool]:
    if text[at] == "`":
        end = end_of_quotes(text, at)
        variables.commands[text[at + 1 : end - 1]] = None
        return [""], end, False
    if text.startswith("$((", at):
        end = end_of_expansion(text, at)
        return [str(arithmetic(text[at + 3 : end - 2], variables))], end, False
    if text.startswith("$(", at):
        end = end_of_expansion(text, at)
        variables.commands[text[at + 2 : end - 1]] = None
        return [""], end, False
    if text.startswith("${", at):
        end = end_of_expansion(text, at)
        values, is_array = _braced(text[at + 2 : end - 1], variables)
        return values, end, is_array
    if text[at + 1 : at + 2] in ("'", '"'):
        return [""], at + 1, False
    match = _NAME.match(text, at + 1)
    if match is None:
        return ["$"], at + 1, False
    if match[0] in "@*#":
        return ["0"] if match[0] == "#" else [], match.end(), match[0] == "@"
    return [_value(match[0], variables)], match.end(), False


def _value(name: str, variables: Variables) -> str:
    value = variables.get(name)
    if value is None:
        variables.unset[name] = None
        return ""
    return value


def _braced(inside: str, variables: Variables) -> tuple[list[str], bool]:
    """Return the values of what stands between braces, and whether it is an array as words."""
    if inside.startswith("!"):
        return [_value(variables.get(inside[1:]) or "", variables)], False
    match = _BRACED.match(inside)
    if match is None:
        return [""], False
    name, index, rest = match["name"], match["index"], inside[match.end() :]
    if index in ("@", "*"):
        elements = variables.arrays.get(name)
        if elements is None:
            value = variables.get(name)
            elements = [] if value is None else [value]
        return ([str(len(elements))], False) if match["length"] else (elements, index == "@")
    value = variables.get(name)
    if index is not None and name in variables.arrays:
        position = arithmetic(index, variables)
        elements = variables.arrays[name]
        value = elements[position] if -len(elements) <= position < len(elements) else None
    if match["length"]:
        return [str(len(value or ""))], False
    operation = _OPERATION.fullmatch(rest)
    if operation is None:
        return ([_value(name, variables)] if index is None else [value or ""]), False
    return [_operated(name, value, operation[1], operation[2], variables)], False


def _operated(name: str, value: str | None, sign: str, word: str, variables: Variables) -> str:
    """Return a value after ``:-``, ``:+``, ``%``, ``/`` and the like."""
    if sign in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
        is_set = value is not None and (value != "" or sign[0] != ":")
        if sign[-1] == "+":
            return expand_to_text(word, variables) if is_set else ""
        if is_set:
            return value or ""
        if sign[-1] == "?":
            return _value(name, variables)
        default = expand_to_text(word, variables)
        if sign[-1] == "=":
            variables.assign(name, default)
        return default
    text = _value(name, variables)
    if sign in ("^^", ",,", "^", ","):
        return text.upper() if sign[0] == "^" else text.lower()
    if sign in ("/", "//"):
        old, _, new = word.partition("/")
        old, new = expand_to_text(old, variables), expand_to_text(new, variables)
        return text.replace(old, new, -1 if sign == "//" else 1) if old else text
    if sign == ":":
        return text
    return _trimmed(text, expand_to_text(word, variables), sign)


def _trimmed(text: str, pattern: str, sign: str) -> str:
    """Return text without the shortest or longest end (``%``, ``%%``) or start (``#``, ``##``).

    >>> _trimmed("a/b.c.d", "*/", "#"), _trimmed("a/b.c.d", ".*", "%%")
    ('b.c.d', 'a/b')
    """
    sizes = range(min(len(text), 4096) + 1)
    for size in reversed(sizes) if len(sign) == 2 else sizes:
        part = text[:size] if sign[0] == "#" else text[len(text) - size :]
        if fnmatch.fnmatchcase(part, pattern):
            return text[size:] if sign[0] == "#" else text[: len(text) - size]
    return text


def arithmetic(text: str, variables: Variables) -> int:
    """Return the value of ``$(( ))``; 0 where it cannot be computed.

    >>> arithmetic("$A * B / 4", Variables({"A": "8", "B": "3"}))
    6
    """
    plain = " ".join(expand(text, variables)).replace("&&", " and ").replace("||", " or ")
    try:
        tree = parse_python(plain.replace("/", "//").strip(), mode="eval")
        return _integer(tree.body, variables)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return 0


def _integer(node: ast.AST, variables: Variables, depth: int = 0) -> int:
    if depth > 50:
        raise ValueError("nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.Name):
        return int(_value(node.id, variables) or 0)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand, variables, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = (_integer(side, variables, depth + 1) for side in (node.left, node.right))
        found: Any = _ARITHMETIC[type(node.op)](*sides)
        return max(min(int(found), 2**62), -(2**62))
    raise ValueError("not integer arithmetic")
