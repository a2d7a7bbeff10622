"""Changes of one value in the text of a Python file: arguments, attributes, keys, constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from planner.exchange.edits.changes import REMOVED
from planner.exchange.syntax.python_document import CALL, parse_python
from planner.exchange.syntax.python_recipe import expression, import_lines, name_of

MOST_CALLS: Final = 80  # that are tried for a new argument
Span = tuple[int, int]


def edit_python(text: str, path: str, value: Any) -> Iterator[str]:
    r"""Yield texts in which a value may stand at a path, or be gone.

    >>> next(edit_python("def f():\n    return T(a=A(x=1), b=2)\n", "a.x", 3))
    'def f():\n    return T(a=A(x=3), b=2)\n'
    >>> list(edit_python("c = T(\n    a=1,  # one\n    b=2,\n)\n", "a", REMOVED))[0]
    'c = T(\n    b=2,\n)\n'
    """
    file = _Text(text)
    owner, _, name = path.rpartition(".")
    if name == CALL:
        yield from file.called(value)
        return
    if value is REMOVED:
        yield from file.without(name)
        return
    yield from file.replaced(name, value)
    yield from file.added(owner, name, value)


class _Text:
    """A file with the positions of its parts."""

    def __init__(self, text: str):
        self.text = text
        self.tree = parse_python(text)
        self.starts = [0]
        for line in text.split("\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.lines = text.split("\n")
        self.nodes = list(ast.walk(self.tree))
        self.quote = '"' if text.count('"') >= text.count("'") else "'"

    def at(self, line: int, column: int) -> int:
        """Return the position of a line and a column in UTF-8."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def span(self, node: Any) -> Span:
        """Return where a node stands."""
        return (
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
        )

    def indent(self, at: int) -> str:
        """Return the white space at the start of a line."""
        line = self.text[self.text.rfind("\n", 0, at) + 1 :]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def with_imports(self, text: str, value: Any) -> str:
        """Return a text with the imports that a value needs, behind those that are there."""
        missing = [line for line in import_lines({"": value}) if line not in text]
        if not missing:
            return text
        known = [
            node
            for node in self.tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and getattr(node, "module", "") != "__future__"
        ]
        lines = text.split("\n")
        line = known[-1].end_lineno or 0 if known else 0
        return "\n".join([*lines[:line], *missing, *lines[line:]])

    def written(self, value: Any, indent: str) -> str:
        """Return a value as Python, in the quotes of the file."""
        found = expression(value, {}, "", indent)
        return found if '"' in found else found.replace("'", self.quote)

    def put(self, span: Span, value: Any) -> str:
        """Return the text with a value in the place of a node."""
        written = self.written(value, self.indent(span[0]))
        return self.with_imports(self.text[: span[0]] + written + self.text[span[1] :], value)

    def values(self, name: str) -> Iterator[ast.expr]:
        """Yield the expressions that are given a name, the last one first."""
        for node in reversed(self.nodes):
            if isinstance(node, ast.keyword) and node.arg == name:
                yield node.value
            elif isinstance(node, ast.Assign):
                if any(_last_name(target) == name for target in node.targets):
                    yield node.value
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                if _last_name(node.target) == name:
                    yield node.value
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield value
            elif isinstance(node, ast.arguments):
                yield from _default(node, name)

    def replaced(self, name: str, value: Any, depth: int = 0) -> Iterator[str]:
        """Yield texts with another value for a name, or for a variable that gives it."""
        for node in self.values(name):
            if isinstance(node, ast.Name) and node.id != name and depth < 3:
                yield from self.replaced(node.id, value, depth + 1)
            yield self.put(self.span(node), value)

    def added(self, owner: str, name: str, value: Any) -> Iterator[str]:
        """Yield texts with a further argument of a call, or a further assignment."""
        if not name.isidentifier():
            return
        for node in self.nodes:
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                chain = ast.unparse(target).rpartition(".")[0]
                if chain and (chain.endswith(f".{owner}") if owner else "." not in chain):
                    yield self.statement(node, f"{chain}.{name}", value)
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: -len(call.keywords))
        for call in calls[:MOST_CALLS]:
            yield self.argument(call, name, value)
        for node in reversed(self.nodes):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                path = ".".join(filter(None, (node.value.id, owner, name)))
                yield self.statement(node, path, value, before=True)

    def statement(self, node: ast.stmt, target: str, value: Any, *, before: bool = False) -> str:
        """Return the text with an assignment after a statement, or before it."""
        indent = " " * node.col_offset
        line = (node.lineno if before else (node.end_lineno or node.lineno) + 1) - 1
        added = f"{indent}{target} = {self.written(value, indent)}"
        return self.with_imports("\n".join([*self.lines[:line], added, *self.lines[line:]]), value)

    def argument(self, call: ast.Call, name: str, value: Any) -> str:
        """Return the text with a further argument of a call."""
        given = [*call.args, *(one.value for one in call.keywords)]
        if not given:
            start, end = self.span(call)
            written = f"{name}={self.written(value, self.indent(start))}"
            text = self.text[: end - 1] + written + self.text[end - 1 :]
            return self.with_imports(text, value)
        last = max((*call.args, *call.keywords), key=lambda one: self.span(one))
        start, end = self.span(last)
        line_start = self.text.rfind("\n", 0, start) + 1
        own_line = not self.text[line_start:start].strip()
        indent = self.text[line_start:start]
        written = f"{name}={self.written(value, indent if own_line else self.indent(start))}"
        if not own_line:
            return self.with_imports(f"{self.text[:end]}, {written}{self.text[end:]}", value)
        comma = self.text[end : end + 1] == ","
        after = self.text.find("\n", end)
        rest = self.text[end + comma : after] if after >= 0 else ""
        if after < 0 or (rest.strip() and not rest.strip().startswith("#")):
            return self.with_imports(f"{self.text[:end]}, {written}{self.text[end:]}", value)
        text = f"{self.text[:end]},{rest}\n{indent}{written},{self.text[after:]}"
        return self.with_imports(text, value)

    def without(self, name: str) -> Iterator[str]:
        """Yield texts without an argument, a key or an assignment of a name."""
        for node in reversed(self.nodes):
            if isinstance(node, ast.keyword) and node.arg == name:
                yield self.cut(self.span(node))
            elif isinstance(node, ast.Assign) and _last_name(node.targets[0]) == name:
                first, last = node.lineno - 1, node.end_lineno or node.lineno
                yield "\n".join([*self.lines[:first], *self.lines[last:]])
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield self.cut((self.span(key)[0], self.span(value)[1]))

    def cut(self, span: Span) -> str:
        """Return the text without a part of a list, its comma, and its line if it is alone."""
        start, end = span
        rest = self.text[end:]
        comma = len(rest) - len(rest.lstrip())
        if rest[comma : comma + 1] == ",":
            end += comma + 1
        else:  # the last one of its list
            before = self.text[:start].rstrip()
            if before.endswith(","):
                start = len(before) - 1
        first = self.text.rfind("\n", 0, start) + 1
        newline = self.text.find("\n", end)
        behind = self.text[end:newline].strip() if newline >= 0 else "x"
        if not self.text[first:start].strip() and (not behind or behind.startswith("#")):
            return self.text[:first] + self.text[newline + 1 :]
        return self.text[:start] + self.text[end:].removeprefix(" ")

    def called(self, value: Any) -> Iterator[str]:
        """Yield texts in which something else is called."""
        if value is REMOVED:
            return
        for node in reversed(self.nodes):
            if isinstance(node, ast.Call):
                start, end = self.span(node.func)
                text = self.text[:start] + name_of(value) + self.text[end:]
                yield self.with_imports(text, {CALL: value})


def _last_name(target: ast.expr) -> str:
    if isinstance(target, ast.Attribute):
        return target.attr
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return target.id if isinstance(target, ast.Name) else ""


def _default(node: ast.arguments, name: str) -> Iterator[ast.expr]:
    """Yield the default value of an argument."""
    names = [argument.arg for argument in (*node.posonlyargs, *node.args)]
    pairs = zip(reversed(names), reversed(node.defaults), strict=False)
    yield from (default for argument, default in pairs if argument == name)
    for argument, value in zip(node.kwonlyargs, node.kw_defaults, strict=True):
        if argument.arg == name and value is not None:
            yield value
