"""Python functions that build a configuration, read as documents without running them.

A call is a mapping of its keyword arguments, with the name of what is called below ``()`` and
positional arguments below their numbers. Assignments to attributes replace values. Functions of the
same file are followed; other names are text. The last statement that runs wins, both sides of a
condition are read in order.
"""

from __future__ import annotations

import ast
import copy
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

from hardware_profiles.errors import InputError

CALL: Final = "()"
MAX_DEPTH: Final = 30
MAX_NODES: Final = 200_000
OPERATORS: Final[Mapping[type[ast.AST], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.Is: operator.eq,
    ast.NotEq: operator.ne,
    ast.IsNot: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
}


def parse_functions(text: str, where: str) -> dict[str, dict[str, Any]]:
    r"""Return what each function of a file returns, by name; "" for the file itself.

    >>> parse_functions("def f(tp=2):\n    c = T(a=A(x=1))\n    c.a.y = tp\n    return c", "x")["f"]
    {'()': 'T', 'a': {'()': 'A', 'x': 1, 'y': 2}}
    """
    file = _File(_parsed(text, where))
    return {name: value for name, value in file.results().items() if isinstance(value, dict)}


def parse_calls(text: str, where: str) -> list[dict[str, Any]]:
    r"""Return every call of a file in the order in which it is read, of methods too.

    >>> parse_calls("def main():\n    s = DDP()\n    t = T(strategy=s)", "x")
    [{'()': 'DDP'}, {'()': 'T', 'strategy': {'()': 'DDP'}}]
    """
    file = _File(_parsed(text, where))
    file.results()
    return file.calls


def parse_python(text: str, mode: Literal["exec", "eval"] = "exec") -> Any:
    r"""Return the syntax tree of a stranger's Python, without Python's warnings about its style.

    >>> parse_python(r"path = '\d'; width = 1if x else 2").body[0].value.value
    '\\d'
    """
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(text, mode=mode)


def _parsed(text: str, where: str) -> ast.Module:
    try:
        tree: ast.Module = parse_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{where}: not Python: {str(error)[:100]}") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise InputError(f"{where}: too long for a configuration")
    return tree


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield imported names and what they stand for."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            before = "." * node.level + (f"{node.module}." if node.module else "")
            yield from ((each.asname or each.name, before + each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.asname, each.name) for each in node.names if each.asname)


class _File:
    """A module, whose functions are read when they are called."""

    def __init__(self, tree: ast.Module):
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.globals: dict[str, Any] = {}
        self.imports = dict(_imports(tree))
        self.methods = [
            node
            for outer in tree.body
            if isinstance(outer, ast.ClassDef)
            for node in outer.body
            if isinstance(node, ast.FunctionDef)
        ]
        self.calls: list[dict[str, Any]] = []
        self.depth = 0
        for statement in tree.body:
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.run([statement], self.globals)

    def results(self) -> dict[str, Any]:
        """Return what the functions return, and the last configuration of the file itself."""
        found = {name: self.call(node, [], {}) for name, node in self.functions.items()}
        for method in self.methods:
            self.call(method, [], {})
        built = {k: v for k, v in self.globals.items() if isinstance(v, dict) and CALL in v}
        return found | ({"": list(built.values())[-1]} if built else {})

    def call(self, node: ast.FunctionDef, given: list[Any], named: Mapping[str, Any]) -> Any:
        """Return what a function of the file returns."""
        if self.depth >= MAX_DEPTH:
            return None
        names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        values: dict[str, Any] = {}
        defaults = node.args.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            values[name] = self.value(default, self.globals)
        for argument, each in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if each is not None:
                values[argument.arg] = self.value(each, self.globals)
        values |= dict(zip(names, given, strict=False))
        values |= named
        self.depth += 1
        returned = self.run(node.body, values)
        self.depth -= 1
        return returned[0] if returned else None

    def run(self, body: list[ast.stmt], names: dict[str, Any]) -> list[Any]:
        """Read statements; return the value of the first ``return`` in a list, or nothing."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return [None if statement.value is None else self.value(statement.value, names)]
            if isinstance(statement, ast.Assign):
                value = self.value(statement.value, names)
                for target in statement.targets:
                    self.assign(target, value, names)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self.assign(statement.target, self.value(statement.value, names), names)
            elif isinstance(statement, ast.Expr):
                self.value(statement.value, names)
            elif isinstance(statement, (ast.If, ast.With, ast.Try, ast.For)):
                blocks = [
                    statement.body,
                    *([] if isinstance(statement, ast.With) else [statement.orelse]),
                ]
                if isinstance(statement, ast.If) and isinstance(
                    holds := self.value(statement.test, names), (bool, int, type(None))
                ):
                    blocks = [statement.body if holds else statement.orelse]
                for block in blocks:
                    if returned := self.run(block, names):
                        return returned
        return []

    def assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        """Set a name, an attribute of a configuration, or a key."""
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value if isinstance(value, list) else []
            for each, part in zip(target.elts, values, strict=False):
                self.assign(each, part, names)
        elif isinstance(target, ast.Attribute):
            owner = self.owner(target.value, names)
            if owner is not None:
                owner[target.attr] = value
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            owner = self.owner(target.value, names)
            if owner is not None:
                owner[str(target.slice.value)] = value

    def owner(self, node: ast.expr, names: dict[str, Any]) -> dict[str, Any] | None:
        """Return the mapping that an expression names; it is made where it does not exist."""
        if isinstance(node, ast.Name):
            found = names.get(node.id)
            if found is None and node.id in names:
                return None
            if not isinstance(found, dict):
                found = names[node.id] = {}
            return found
        if isinstance(node, ast.Attribute):
            outer = self.owner(node.value, names)
            if outer is None:
                return None
            if not isinstance(outer.get(node.attr), dict):
                before = outer.get(node.attr)
                outer[node.attr] = {} if before is None else {CALL: str(before)}
            inner: dict[str, Any] = outer[node.attr]
            return inner
        return None

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """Return the value of an expression; text where it is not known."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in names:
                return names[node.id]
            return self.globals.get(node.id, node.id)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(each, names) for each in node.elts]
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {
                str(self.value(key, names)): self.value(value, names)
                for key, value in pairs
                if key is not None
            }
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value, names)
            if isinstance(owner, dict):
                return owner.get(node.attr)
            return f"{owner}.{node.attr}"
        if isinstance(node, ast.Call):
            return self.called(node, names)
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp)):
            return _computed(node, lambda inner: self.value(inner, names))
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test, names) else node.orelse, names)
        return ast.unparse(node)[:200]

    def called(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        """Return the mapping of a call, or what a function of the file returns."""
        given = [self.value(argument, names) for argument in node.args]
        named = {k.arg: self.value(k.value, names) for k in node.keywords if k.arg is not None}
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            return copy.deepcopy(self.call(self.functions[node.func.id], given, named))
        found = self.built(node, given, named, names)
        self.calls.append(found)
        return found

    def built(
        self, node: ast.Call, given: list[Any], named: dict[str, Any], names: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the mapping of a call of something outside the file."""
        name = ast.unparse(node.func)
        first, dot, rest = name.partition(".")
        name = self.imports.get(first, first) + dot + rest
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        inner = self.value(owner, names) if isinstance(owner, ast.Call) else None
        if isinstance(inner, dict) and CALL in inner and isinstance(node.func, ast.Attribute):
            return {**inner, CALL: f"{inner[CALL]}.{node.func.attr}", **named}
        return {CALL: name, **{str(at): value for at, value in enumerate(given)}, **named}


def _computed(node: ast.expr, value: Any) -> Any:
    """Return the value of integer arithmetic and of comparisons; text for everything else."""
    try:
        if isinstance(node, ast.UnaryOp):
            inner = value(node.operand)
            if isinstance(node.op, ast.Not):
                return not inner
            return -inner if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BoolOp):
            parts = [value(each) for each in node.values]
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
            if isinstance(node.op, ast.Pow) and not (abs(left) <= 1000 and 0 <= right <= 20):
                numbers = False
            if numbers and type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = value(node.left), value(node.comparators[0])
            if isinstance(node.ops[0], ast.In):
                return left in right
            if type(node.ops[0]) in OPERATORS:
                return OPERATORS[type(node.ops[0])](left, right)
    except (TypeError, ZeroDivisionError, OverflowError):
        pass
    return ast.unparse(node)[:200]
