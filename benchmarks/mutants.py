"""How many small faults in a package the tests notice: ``python -m benchmarks.mutants``.

    pip install -e ".[test]" cosmic-ray
    python -m benchmarks.mutants cost_models -n 300 --seed 1

A mutant is the package with one change by cosmic-ray: another operator or comparison, a number one
larger or smaller, a negated condition, a loop that never runs, a missing decorator. Places in the
code are drawn at random, each as likely as the other, and one of the changes that are possible
there. A mutant is killed when a test fails, cannot be collected, or does not end.

Which tests run a line is measured once (coverage's contexts) and kept in the folder of ``-o``.
Of a mutant the tests of its own package run first, fast ones before slow ones, then all others that
run the line, then those that run the file (of a line that runs at import: those of the package);
up to ``--budget`` seconds of tests. Each mutant is a
forked process that imports the changed source from memory: no file changes, and ``-j`` of them run
at a time. Annotations and caches are not changed, since results do not depend on them.

Printed are the survivors, and of each package the share that was killed with its 95 % interval
(Wilson), without those that are equivalent by a rule of ``equivalent``.
The folder keeps the fate of each mutant, so that an interrupted command goes on where it
stopped. ``--again FILE`` runs the mutants of an earlier list (``survivors.txt``) once more.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from msgspec import Meta
from scipy.stats import binomtest

# what tests import besides this repository, so that no mutant has to
LIBRARIES = ("numpy", "scipy.optimize", "networkx", "pandas", "hypothesis", "torch", "transformers")
# at once an exception, or the same: bits for numbers, numbers for bits, order for identity
ODD = re.compile(
    r"Operator_(?!Bit)\w+_(Bit\w+|LShift|RShift)$|Operator_Bit\w+_(?!Bit)\w+$"
    r"|Operator_(Is|IsNot)_(?!Is)\w+$|Operator_(?!Is)\w+_(Is|IsNot)$"
)
NO_RESULT = re.compile(r"@(functools\.)?(cache|lru_cache|overload|cached_property)\b")
SLOWEST = 20.0  # times slower than alone that a busy machine runs a test
KILLED, SURVIVED, TIMEOUT, EQUIVALENT = "killed", "survived", "timeout", "equivalent"


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


# --- which tests run a line ----------------------------------------------------------------------


class Durations:
    """A plugin of pytest: the seconds of each test that passed."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bad: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.bad.add(report.nodeid)


def measure(package: str, tests: list[str], folder: Path) -> None:
    """Run all tests once: durations to tests.json, lines to coverage.db."""
    durations = Durations()
    os.environ["COVERAGE_FILE"] = str(folder / "coverage.db")
    words = [f"--cov={package}", "--cov-context=test", "--cov-report=", *tests]
    _pytest(words, durations)
    passed = {name: s for name, s in durations.seconds.items() if name not in durations.bad}
    (folder / "tests.json").write_text(json.dumps(passed))


def _pytest(words: list[str], *plugins: Any) -> int:
    options = ["-q", "-n", "0", "--dist", "no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    # rewriting assertions would read the files of doctests again, without their mutants
    options += ["--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *words], plugins=list(plugins)))


class Selection:
    """Returns the tests of a line, in the order in which they should run."""

    def __init__(self, folder: Path, budget: float) -> None:
        self.budget = budget
        self.seconds: dict[str, float] = json.loads((folder / "tests.json").read_text())
        self.data = coverage.CoverageData(str(folder / "coverage.db"))
        self.data.read()
        self.lines: dict[str, dict[int, list[str]]] = {}

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant, and of them as many as the budget allows."""
        path = str(Path(mutant.path).resolve())
        if path not in self.lines:
            self.lines[path] = self.data.contexts_by_lineno(path)
        by_line = self.lines[path]
        of_line = {_test(each) for each in by_line.get(mutant.line, ())}
        of_file = {_test(each) for every in by_line.values() for each in every}
        own = f"{_tests_of(mutant.path)}/"
        if _runs_at_import(mutant):  # any test of the package may see it
            of_line = {test for test in self.seconds if test.startswith(own)}

        def order(test: str) -> tuple[bool, bool, float]:
            return test not in of_line, not test.startswith(own), self.seconds[test]

        chosen, left = [], self.budget
        for test in sorted((of_line | of_file) & set(self.seconds), key=order):
            left -= self.seconds[test]
            chosen.append(test)
            if left < 0:
                break
        return chosen


def _tests_of(path: str) -> Path:
    """Return the folder that mirrors the file's, or the nearest one above it."""
    folder = "tests" / Path(path).parent
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _runs_at_import(mutant: Mutant) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        node for node in ast.walk(ast.parse(_source(mutant.path))) if isinstance(node, functions)
    ]
    return not any(node.lineno < mutant.line <= (node.end_lineno or 0) for node in found)


def _test(context: str) -> str:
    return context.rpartition("|")[0]


# --- one mutant ----------------------------------------------------------------------------------


def _import_changed(mutant: Mutant) -> None:
    """Let imports of the mutant's file find its changed source, and no cached bytecode."""
    target, changed = str(Path(mutant.path).resolve()), mutant.code().encode()
    data, stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

    def get_data(loader: Any, path: str) -> bytes:
        return changed if path == target else data(loader, path)

    def path_stats(loader: Any, path: str) -> Any:
        if path == target:
            raise OSError("its bytecode is not that of the file")
        return stats(loader, path)

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]


def start(mutant: Mutant | None, tests: list[str], limit: int = 600) -> int:
    """Fork a process that ends with 0 if all tests pass; no mutant: the code as it is.

    ``limit``: its seconds of a processor, however busy the machine is.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        if mutant is not None:
            _import_changed(mutant)
        code = _pytest(["-x", *tests])
    finally:
        os._exit(code)


def judge(
    mutants: list[Mutant], selection: Selection, jobs: int
) -> Iterator[tuple[Mutant, str, int]]:
    """Run all mutants, some at a time; yield each with its fate and the number of its tests."""
    waiting, running = list(reversed(mutants)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            tests = selection.of(mutant)
            if not tests:
                yield mutant, SURVIVED, 0
                continue
            limit = int(20.0 + 2.0 * sum(selection.seconds[test] for test in tests))
            until = time.monotonic() + SLOWEST * limit  # of one that waits for ever
            running[start(mutant, tests, limit)] = (mutant, until, len(tests))
        for child, (mutant, until, count) in list(running.items()):
            late = time.monotonic() > until
            if late:
                os.killpg(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if ended:
                del running[child]
                yield mutant, TIMEOUT if late else KILLED if status else SURVIVED, count
        time.sleep(0.05)


# --- the command ---------------------------------------------------------------------------------


def again(path: Path) -> list[Mutant]:
    """Return the mutants of a list that this command wrote, where the line is still the same."""
    found = []
    pattern = re.compile(r"(\S+?):(\d+):(\d+) (\S+) (\d+)(?: .*)?\n  - (.*)\n  \+ (.*)")
    for path_, _, _, operator, _, before, after in pattern.findall(path.read_text()):
        same = [m for m in mutants_of(path_) if m.operator == operator]
        found += [m for m in same if str(m).endswith(f"\n  - {before}\n  + {after}")][:1]
    return found


def main() -> None:
    """Print the survivors and a line for each package."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", default="cost_models", help="a folder")
    parser.add_argument("--tests", nargs="+", help="default: the folder's mirror, and its doctests")
    parser.add_argument("-n", type=int, default=300, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests of a mutant")
    parser.add_argument("-j", type=int, default=2, help="processes")
    parser.add_argument("--again", type=Path, help="a list of survivors")
    parser.add_argument("-o", type=Path, default=Path("mutants"), help="folder")
    options = parser.parse_args()
    options.o.mkdir(exist_ok=True)
    if not (options.o / "tests.json").exists():
        tests = options.tests or [f"tests/{options.package}", options.package]
        child = os.fork()
        if child == 0:
            measure(options.package, tests, options.o)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
    mutants = (
        again(options.again) if options.again else drawn(options.package, options.n, options.seed)
    )
    selection = Selection(options.o, options.budget)
    for name in LIBRARIES:
        importlib.import_module(name)
    if os.waitpid(start(None, selection.of(mutants[0])), 0)[1]:
        raise SystemExit("the tests fail without a mutant")
    known = options.o / "fates.txt"
    fates = (
        dict(line.rsplit(" ", 1) for line in known.read_text().splitlines())
        if known.exists()
        else {}
    )
    left = [mutant for mutant in mutants if options.again or mutant.key not in fates]
    with known.open("a", buffering=1) as done, (options.o / "survivors.txt").open("a") as survivors:
        for number, (mutant, fate, count) in enumerate(judge(left, selection, options.j), 1):
            if fate == SURVIVED and (rule := equivalent(mutant)):
                fate = EQUIVALENT
                print(f"[{number}/{len(left)}] equivalent by {rule}: {mutant}", flush=True)
            fates[mutant.key] = fate
            done.write(f"{mutant.key} {fate}\n")
            if fate == SURVIVED:
                print(f"[{number}/{len(left)}] {mutant} ({count} tests)", flush=True)
                survivors.write(f"{mutant}\n")
                survivors.flush()
    show({mutant: fates[mutant.key] for mutant in mutants})


def show(fates: Mapping[Mutant, str]) -> None:
    """Print the share that was killed, of each package and of all."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, fate in fates.items():
        for package in (str(Path(mutant.path).parent), "all"):
            counts[package][fate] += fate != EQUIVALENT
    equal = sum(fate == EQUIVALENT for fate in fates.values())
    print(f"{len(fates)} mutants, of which {equal} are equivalent by a rule")
    for package, found in sorted(counts.items()):
        killed, every = found[KILLED] + found[TIMEOUT], found.total()
        if not every:
            continue
        low, high = binomtest(killed, every).proportion_ci(method="wilson")
        ends = f"{100 * low:.0f} to {100 * high:.0f} %"
        print(f"{package:32} {killed:4} of {every:4} killed: {100 * killed / every:.1f} % ({ends})")


if __name__ == "__main__":
    main()
