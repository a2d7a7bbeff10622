"""Small faults in Python code, drawn at random: the changes of ``benchmarks.faults.mutants``."""

from __future__ import annotations

import ast
import importlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from msgspec import Meta

# at once an exception, or the same: bits for numbers, numbers for bits, order for identity
ODD = re.compile(
    r"Operator_(?!Bit)\w+_(Bit\w+|LShift|RShift)$|Operator_Bit\w+_(?!Bit)\w+$"
    r"|Operator_(Is|IsNot)_(?!Is)\w+$|Operator_(?!Is)\w+_(Is|IsNot)$"
)
NO_RESULT = re.compile(r"@(functools\.)?(cache|lru_cache|overload|cached_property)\b")


class Mutant(NamedTuple):
    """One change: the n-th place of an operator in a file."""

    path: str
    line: int
    column: int
    operator: str
    occurrence: int

    @property
    def key(self) -> str:
        """The change in words."""
        return f"{self.path}:{self.line}:{self.column} {self.operator} {self.occurrence}"

    def code(self) -> str:
        """Return the changed source."""
        changed = mutate_code(_source(self.path), get_operator(self.operator)(), self.occurrence)
        assert changed is not None, self
        return str(changed)

    def __str__(self) -> str:
        """Return the place, and the line before and after."""
        before, after = _source(self.path).splitlines(), self.code().splitlines()
        row = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), 0)
        return f"{self.key}\n  - {before[row].strip()}\n  + {after[row].strip()}"


def _source(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


# --- the changes ---------------------------------------------------------------------------------


def mutants_of(path: str) -> Iterator[Mutant]:
    """Return all changes of a file that may have an effect."""
    tree = get_ast(_source(path))
    nodes = list(ast_nodes(tree))
    silent = [(n.start_pos, n.end_pos) for n in nodes if _is_silent(n)]
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments() or ODD.search(name):
            continue
        places = (place for node in nodes for place in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= start and end <= last for first, last in silent):
                yield Mutant(path, *start, name, occurrence)


def _is_silent(node: Any) -> bool:
    """Whether no result depends on a node: an annotation, a cache, an overload."""
    if node.type == "decorator":
        return bool(NO_RESULT.match(node.get_code().strip()))
    parent = node.parent
    if parent is None:
        return False
    if parent.type in ("annassign", "tfpdef"):  # ": type = value" and "name: type"
        return node is parent.children[1 if parent.type == "annassign" else 2]
    return parent.type == "funcdef" and node is parent.annotation


def drawn(package: str, count: int, seed: int) -> list[Mutant]:
    """Draw places of a package, and of each one of its changes."""
    places: defaultdict[tuple[str, int, int], list[Mutant]] = defaultdict(list)
    for path in sorted(Path(package).rglob("*.py")):
        for mutant in mutants_of(str(path)):
            places[mutant[:3]].append(mutant)
    chance = random.Random(seed)
    print(f"{package}: {len(places)} places, {sum(map(len, places.values()))} mutants", flush=True)
    found: list[Mutant] = []
    for place in chance.sample(sorted(places), len(places)):
        mutant = chance.choice(places[place])
        if len(found) < count and _is_python(mutant):
            found.append(mutant)
    return found


def _is_python(mutant: Mutant) -> bool:
    """Whether a change is code: the ``*`` in front of keyword arguments is no operator."""
    try:
        ast.parse(mutant.code())
    except SyntaxError:
        return False
    return True


# --- changes without an effect -------------------------------------------------------------------


def equivalent(mutant: Mutant) -> str:
    """Return the rule by which a mutant's results are those of the code; empty: none applies.

    bounds   a comparison with a number gives the same for all values of a field of a plan, whose
             type has a lower bound: ``table.zero_stage == 0`` and ``<= 0``
    words    a comparison with a word gives the same for all words of a field whose type is a
             Literal in every record: ``weight.role == "expert"`` and ``<= "expert"``
    slots    whether the fields of a record have slots
    strict   whether ``zip`` refuses lists of different lengths, which no list is
    zeros    whether an array called zero or zeros is added or subtracted
    """
    trees = (ast.parse(_source(mutant.path)), ast.parse(mutant.code()))
    before, after = _difference(*trees)
    if isinstance(before, ast.keyword) and before.arg in ("slots", "strict"):
        return str(before.arg)
    if _adds_zeros(before) and _adds_zeros(after):
        return "zeros"
    if not (isinstance(before, ast.Compare) and isinstance(after, ast.Compare)):
        return ""
    field, value = before.left, before.comparators[0]
    if not (isinstance(field, ast.Attribute) and isinstance(value, ast.Constant)):
        return ""
    texts = [
        f"x {_SYMBOLS[type(each.ops[0])]} {ast.unparse(each.comparators[0])}"
        for each in (before, after)
    ]
    numbers = isinstance(value.value, int | float) and not isinstance(value.value, bool)
    values = _numbers_of(field.attr) if numbers else _words_of().get(field.attr, ())
    same = all(eval(texts[0], {"x": x}) == eval(texts[1], {"x": x}) for x in values)
    return ("bounds" if numbers else "words") if values and same else ""


def _adds_zeros(node: ast.AST) -> bool:
    signed = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    return signed and isinstance(node.right, ast.Name) and node.right.id in ("zero", "zeros")


_SYMBOLS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_SYMBOLS |= {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}


def _difference(one: ast.AST, other: ast.AST) -> tuple[ast.AST, ast.AST]:
    """Return the smallest comparison, sum or keyword, or else node, in which two trees differ."""
    children = list(zip(ast.iter_child_nodes(one), ast.iter_child_nodes(other), strict=False))
    apart = [pair for pair in children if ast.dump(pair[0]) != ast.dump(pair[1])]
    if len(apart) != 1 or isinstance(one, ast.Compare | ast.keyword) or _adds_zeros(one):
        return one, other
    return _difference(*apart[0])


def _numbers_of(field: str) -> Sequence[int]:
    """Return values of a field of a plan within its bounds; none: it is no such field."""
    from cost_models.plan.plan import Plan

    kind = get_type_hints(Plan, include_extras=True).get(field)
    for bounds in getattr(kind, "__metadata__", ()):
        if isinstance(bounds, Meta) and bounds.ge is not None:
            return range(int(bounds.ge), int(min(20, bounds.le or 20)) + 1)
    return ()


@cache
def _words_of() -> Mapping[str, tuple[str, ...]]:
    """Return the words that the fields of a name may have in all records of the cost models."""
    found: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for path in sorted(Path("cost_models").rglob("*.py")):
        module = importlib.import_module(".".join(path.with_suffix("").parts))
        for record in vars(module).values():
            if isinstance(record, type) and record.__module__ == module.__name__:
                for name, text in vars(record).get("__annotations__", {}).items():
                    try:
                        kind = eval(str(text), vars(module))
                    except (NameError, SyntaxError):  # imported for type checkers alone
                        kind = None
                    found[name].append(get_args(kind) if get_origin(kind) is Literal else ())
    return {
        name: tuple(dict.fromkeys(word for words in every for word in words))
        for name, every in found.items()
        if all(every) and all(isinstance(word, str) for words in every for word in words)
    }
