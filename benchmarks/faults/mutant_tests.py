"""Which tests run a line, and the run of a mutant: for ``python -m benchmarks.faults.mutants``.

Tests are collected once. A file of tests is measured in a process of its own: the processor seconds
of each test and, by coverage's contexts, the lines that it runs. Lines are counted from the
beginning of their function, so that changes elsewhere leave the measurement valid.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import json
import os
import resource
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import coverage
import pytest

from benchmarks.faults.mutations import Mutant

KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
SLOWEST = 20.0  # times slower than alone that a busy machine runs a test
WIDEST = 12
MEMORY = 4 * 2**30  # bytes that a mutant may take

_OUT = os.fdopen(os.dup(1), "w")  # pytest takes what is printed while it runs

Place = tuple[str, str, int]  # file, function, line counted from its beginning


def say(text: str) -> None:
    """Print a line, within pytest too."""
    print(text, file=_OUT, flush=True)


def pytest_main(words: list[str], *plugins: Any) -> int:
    """Run pytest in this process, without what other processes or runs left."""
    options = ["-q", "-n", "0", "--dist", "no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    # rewriting assertions would read the files of doctests again, without their mutants
    options += ["--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *words], plugins=list(plugins)))


class Places:
    """Finds the function of a line."""

    def __init__(self) -> None:
        self.known: dict[str, dict[int, tuple[str, int]]] = {}

    def of(self, path: str, line: int) -> Place:
        """Return the place of a line; outside functions it has the name of no function."""
        if path not in self.known:
            self.known[path] = dict(_functions(ast.parse(Path(path).read_text(encoding="utf-8"))))
        name, begin = self.known[path].get(line, ("", 0))
        return path, name, line - begin


def _functions(node: ast.AST, name: str = "") -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield each line of a function's body with the function's name and first line."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for line in range(child.lineno + 1, (child.end_lineno or 0) + 1):
                yield line, (f"{name}{child.name}", child.lineno)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{child.name}.")
        else:
            yield from _functions(child, name)


# --- which tests run a line ----------------------------------------------------------------------


class Tests:
    """What was measured of the tests: seconds of each, and the tests of each place."""

    def __init__(self, folder: Path, budget: float) -> None:
        self.folder, self.budget, self.places = folder, budget, Places()
        self.seconds: dict[str, float] = {}
        self.files: dict[str, Path] = {}
        self.by_place: defaultdict[Place, set[str]] = defaultdict(set)
        self.by_file: defaultdict[str, set[str]] = defaultdict(set)
        self.breadth: Counter[str] = Counter()  # lines that a test runs

    def file_of(self, tests: str) -> Path:
        """Return the record of a file of tests as it was when it was first asked for."""
        if tests not in self.files:
            digest = hashlib.sha256(Path(tests).read_bytes()).hexdigest()[:12]
            self.files[tests] = self.folder / f"{tests.replace('/', '.')}.{digest}.json"
        return self.files[tests]

    def load(self, records: Sequence[str]) -> None:
        """Read the records of files of tests."""
        for each in records:
            record = json.loads(Path(each).read_text())
            names = list(record["seconds"])
            self.seconds |= {n: s for n, s in record["seconds"].items() if s is not None}
            for path, function, line, mask in record["lines"]:
                found = {n for i, n in enumerate(names) if int(mask, 16) >> i & 1}
                self.by_place[path, function, line] |= found & self.seconds.keys()
                self.breadth.update(found)
                self.by_file[path] |= found & self.seconds.keys()

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant in the order in which they should run, within the budget.

        Those that run its line come first, of them those of its own package, and fast ones before
        slow ones; the n-th row of a parametrised test counts as n times as slow. The ``WIDEST``
        tests that run the line follow whatever the budget is: they compare the most numbers.
        """
        own, place = f"{_tests_of(mutant.path)}/", self.places.of(mutant.path, mutant.line)
        of_line = self.by_place[place]
        chosen = of_line | self.by_file[mutant.path]
        if not place[1]:  # it runs at import: any test of the package may see it
            above = {str(folder) for folder in Path(own).parents}
            of_line = of_line | {
                test
                for test in self.seconds
                if test.startswith(own) or str(Path(test.partition("::")[0]).parent) in above
            }
            chosen = chosen | of_line
        rows: Counter[str] = Counter()
        late = {}
        for test in sorted(chosen, key=lambda test: (self.seconds[test], test)):
            rows[test.partition("[")[0]] += 1
            weight = (0.01 + self.seconds[test]) * rows[test.partition("[")[0]]
            late[test] = (test not in of_line, not test.startswith(own), weight)
        taken, left = [], self.budget
        for test in sorted(late, key=late.__getitem__):
            left -= self.seconds[test]
            taken.append(test)
            if left < 0:
                break
        widest = sorted(of_line, key=lambda test: (-self.breadth[test], test))[:WIDEST]
        return [*taken, *(test for test in widest if test not in taken)]


def _tests_of(path: str) -> Path:
    """Return the folder that mirrors the file's, or the nearest one above it."""
    folder = "tests" / Path(path).parent
    while not folder.is_dir():
        folder = folder.parent
    return folder


def measure(items: list[pytest.Item], package: str, tests: Tests, jobs: int) -> None:
    """Run the tests of all files that no record holds, some files at a time."""
    by_file = _by_file(items)
    missing = [name for name in by_file if not tests.file_of(name).exists()]
    waiting, running, done = list(reversed(missing)), {}, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            run = functools.partial(_record, by_file[name], package, tests.file_of(name))
            running[fork(run, 600, str(tests.folder / "log.txt"))] = name
        for child, name in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[child]
                done += 1
                say(f"measured {done} of {len(missing)} files of tests: {name}")
                if status:
                    tests.file_of(name).write_text(json.dumps({"seconds": {}, "lines": []}))
                    say(f"{name} did not end and is left out: see {tests.folder}/log.txt")
        time.sleep(0.02)


def _by_file(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        found[item.nodeid.partition("::")[0]].append(item)
    return dict(found)


def _record(items: list[pytest.Item], package: str, file: Path) -> int:
    """Write the seconds of tests and the lines that they run; tests that fail have no seconds."""
    measured = coverage.Coverage(data_file=None, include=[f"{package}/*"], config_file=False)
    seconds: dict[str, float | None] = {}
    clear_caches(package)
    measured.start()
    for item, after in _pairs(items):
        measured.switch_context(item.nodeid)
        begin = time.process_time()
        passed = run_item(item, after)
        seconds[item.nodeid] = round(time.process_time() - begin, 4) if passed else None
    measured.stop()
    data, places, numbers = measured.get_data(), Places(), {n: i for i, n in enumerate(seconds)}
    lines = []
    for path in data.measured_files():
        local = str(Path(path).relative_to(Path.cwd()))
        for line, names in data.contexts_by_lineno(path).items():
            mask = sum(1 << numbers[name] for name in names if name)
            if mask:
                lines.append([*places.of(local, line), hex(mask)])
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"seconds": seconds, "lines": lines}))
    part.rename(file)
    return 0


def _pairs(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(items, [*items[1:], None], strict=True)


def run_item(item: pytest.Item, after: pytest.Item | None) -> bool:
    """Run a collected test; whether it passed."""
    failures = item.session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
    return item.session.testsfailed == failures


def clear_caches(package: str) -> None:
    """Forget what cached functions returned while tests were collected."""
    kind = type(functools.cache(len))
    for each in gc.get_objects():
        if type(each) is kind and str(each.__module__).startswith(f"{package}."):
            each.cache_clear()


# --- one mutant ----------------------------------------------------------------------------------


def fork(run: Callable[[], int], limit: int, log: str = os.devnull) -> int:
    """Run a function in a process of its own for some seconds of a processor at most."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
        quiet = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        code = run()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def run(mutant: Mutant, tests: list[str]) -> int:
    """Import the changed source from memory, collect tests and run them up to the first failure."""
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
    return pytest_main(["-x", *tests])


def judge(mutants: list[Mutant], tests: Tests, jobs: int) -> Iterator[tuple[Mutant, str, int]]:
    """Run mutants, some at a time; yield each with its fate and the number of its tests."""
    waiting, running = list(reversed(mutants)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            chosen = tests.of(mutant)
            if not chosen:
                yield mutant, SURVIVED, 0
                continue
            limit = int(20.0 + 2.0 * sum(tests.seconds[test] for test in chosen))
            child = fork(functools.partial(run, mutant, chosen), limit)
            running[child] = (mutant, time.monotonic() + SLOWEST * limit, len(chosen))
        for child, (mutant, until, count) in list(running.items()):
            late = time.monotonic() > until
            if late:
                os.killpg(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0 if late else os.WNOHANG)
            if ended:
                del running[child]
                stopped = late or os.WIFSIGNALED(status)
                yield mutant, TIMEOUT if stopped else KILLED if status else SURVIVED, count
        time.sleep(0.02)
