"""How many small faults in a package the tests notice: ``python -m benchmarks.faults.mutants``.

    pip install -e ".[test]" cosmic-ray
    python -m benchmarks.faults.mutants cost_models -n 300 --seed 1

A mutant is the package with one change by cosmic-ray: another operator or comparison, a number one
larger or smaller, a negated condition, a loop that never runs, a missing decorator. Places in the
code are drawn at random, each as likely as the other, and one of the changes that are possible
there. A mutant is killed when a test fails, cannot be collected, or does not end. Annotations and
caches are not changed, since results do not depend on them.

Which tests run a line is measured first, file by file, and kept in the folder of ``-o``; a file of
tests is measured again when it changes. Of a mutant the tests of its own package that run the line
run first, fast ones before slow ones, then all others that run the line, then those that run the
file (of a line that runs at import: those of the package), up to ``--budget`` seconds of tests.
Each mutant is a process, which imports the changed source from memory. No file changes.

Printed are the survivors, and of each package the share that was killed with its 95 % interval
(Wilson), without those that are equivalent by a rule of ``benchmarks.faults.mutations.equivalent``.
The folder keeps the fate of each mutant: an interrupted command prints the share of the mutants up
to the first without a fate, which are drawn at random too, and goes on there the next time.
``--again FILE`` runs the mutants of an earlier list (``survivors.txt``) once more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from scipy.stats import binomtest

from benchmarks.faults.mutant_tests import (
    KILLED,
    SURVIVED,
    TIMEOUT,
    Tests,
    judge,
    measure,
    pytest_main,
    say,
)
from benchmarks.faults.mutations import Mutant, drawn, equivalent, mutants_of

# what tests import besides this repository, so that no mutant has to
LIBRARIES = ("numpy", "scipy.optimize", "networkx", "pandas", "hypothesis", "torch", "transformers")
EQUIVALENT = "equivalent"


def again(path: Path) -> list[Mutant]:
    """Return the mutants of a list that this command wrote, where the line is still the same."""
    found = []
    pattern = re.compile(r"(\S+?):(\d+):(\d+) (\S+) (\d+)(?: .*)?\n  - (.*)\n  \+ (.*)")
    for path_, _, _, operator, _, before, after in pattern.findall(path.read_text()):
        same = [m for m in mutants_of(path_) if m.operator == operator]
        found += [m for m in same if str(m).endswith(f"\n  - {before}\n  + {after}")][:1]
    return found


class Fates:
    """The fates of mutants in a file: each process that writes adds whole lines."""

    def __init__(self, folder: Path, mutants: list[Mutant]) -> None:
        self.file, self.survivors = folder / "fates.txt", folder / "survivors.txt"
        self.mutants = mutants

    def read(self) -> dict[Mutant, str]:
        """Return the fates of the mutants up to now."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        known = dict(line.rsplit(" ", 1) for line in lines)
        return {each: known[each.key] for each in self.mutants if each.key in known}

    def write(self, mutant: Mutant, fate: str, count: int) -> None:
        """Keep a fate and print it."""
        with self.file.open("a") as file:
            file.write(f"{mutant.key} {fate}\n")
        known = self.read()
        progress = f"[{len(known)}/{len(self.mutants)}] {fate} by {count} tests"
        if fate == SURVIVED:
            with self.survivors.open("a") as file:
                file.write(f"{mutant}\n")
            progress = f"[{len(known)}/{len(self.mutants)}] {fate} {count} tests: {mutant}"
        say(progress)


class Measured:
    """A plugin of pytest that measures the collected tests; ``records``: receives their records."""

    def __init__(self, package: str, tests: Tests, jobs: int, records: int) -> None:
        self.package, self.tests, self.jobs, self.records = package, tests, jobs, records

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Measure the tests."""
        plugins = session.config.pluginmanager
        plugins.unregister(plugins.getplugin("terminalreporter"))  # its dots
        measure(session.items, self.package, self.tests, self.jobs)
        os.write(self.records, "\n".join(sorted(map(str, self.tests.files.values()))).encode())
        return True


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
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(options.o / "hypothesis")
    mutants = (
        again(options.again) if options.again else drawn(options.package, options.n, options.seed)
    )
    folder = options.o / "again" if options.again else options.o
    folder.mkdir(exist_ok=True)
    fates = Fates(folder, mutants)
    try:
        run(options, fates)
    except KeyboardInterrupt:
        print("interrupted")
    known = fates.read()
    first = next((n for n, each in enumerate(mutants) if each not in known), len(mutants))
    show({each: known[each] for each in mutants[:first]})


def run(options: argparse.Namespace, fates: Fates) -> None:
    """Run all mutants that have no fate; tests are measured in a process that imports them."""
    for name in LIBRARIES:
        importlib.import_module(name)
    tests = Tests(options.o, options.budget)
    words = options.tests or [f"tests/{options.package}", options.package]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        pytest_main(words, Measured(options.package, tests, options.j, write))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as measured:
        records = measured.read().splitlines()
    os.waitpid(child, 0)
    if not records:
        raise SystemExit("the tests cannot be collected")
    tests.load(records)
    known = fates.read()
    left = [each for each in fates.mutants if each not in known]
    for found in judge(left, tests, options.j):
        fates.write(*found)


def show(fates: Mapping[Mutant, str]) -> None:
    """Print the share that was killed, of each package and of all."""
    rules = {each: equivalent(each) for each, fate in fates.items() if fate == SURVIVED}
    for mutant, rule in rules.items():
        if rule:
            print(f"equivalent by {rule}: {mutant}")
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, fate in fates.items():
        for package in (str(Path(mutant.path).parent), "all"):
            counts[package][EQUIVALENT if rules.get(mutant) else fate] += 1
    print(f"{len(fates)} mutants, of which {counts['all'][EQUIVALENT]} are equivalent by a rule")
    for package, found in sorted(counts.items()):
        killed, every = found[KILLED] + found[TIMEOUT], found.total() - found[EQUIVALENT]
        if not every:
            continue
        low, high = binomtest(killed, every).proportion_ci(method="wilson")
        ends = f"{100 * low:.0f} to {100 * high:.0f} %"
        print(f"{package:32} {killed:4} of {every:4} killed: {100 * killed / every:.1f} % ({ends})")


if __name__ == "__main__":
    main()
