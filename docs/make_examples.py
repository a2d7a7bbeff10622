"""Runs the examples of docs/techniques/: ``python docs/make_examples.py --write``, or --check.

Results of ``>>>`` statements are those of the code, as are the lines behind a ``$ shardplan …``.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from generated import write_or_compare

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
FOLDER: Final = ROOT / "docs" / "techniques"
CONSOLE: Final = re.compile(r"(```console\n\$ shardplan ([^\n]*)\n)(.*?)(```)", re.DOTALL)


class Recorder(doctest.DocTestRunner):
    """Runs the statements of a page and keeps what they print."""

    def __init__(self) -> None:
        super().__init__(verbose=False)
        self.printed: dict[int, str] = {}

    def report_success(self, out: Any, test: Any, example: doctest.Example, got: str) -> None:
        """Keep the result."""
        self.printed[example.lineno] = got

    report_failure = report_success

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        """Raise the error of a statement."""
        raise exc_info[1]


def with_results(text: str, name: str) -> str:
    """Return a page whose statements are followed by what they print."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    recorder = Recorder()
    recorder.run(test, clear_globs=False)
    lines, after = text.split("\n"), []
    at = 0
    for example in test.examples:
        end = example.lineno + example.source.count("\n")
        after += [*lines[at:end], *recorder.printed[example.lineno].split("\n")[:-1]]
        at = end + example.want.count("\n")
    return "\n".join([*after, *lines[at:]])


def with_output(text: str) -> str:
    """Return a page whose commands are followed by what they print."""

    def ran(found: re.Match[str]) -> str:
        command = [sys.executable, "-m", "planner", *shlex.split(found[2])]
        environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
        )
        return f"{found[1]}{done.stdout}{found[4]}"

    return CONSOLE.sub(ran, text)


def main() -> None:
    """Write the pages, or exit with 1 where one is not as the code says."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
    write_or_compare({p: with_output(with_results(text, p.name)) for p, text in texts.items()})


if __name__ == "__main__":
    main()
