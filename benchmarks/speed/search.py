"""How long questions take: ``python -m benchmarks.speed.search [--write]``.

Every question is a command in a process of its own, cold from the shell, modules compiled as they
are where a package is installed: seconds of one core (that the process computed, its start
included), and its largest memory. The best of some runs, since other work on the machine only makes
a run longer.

    candidates  plans that were enumerated
    legal       plans that the trainer can run: each is priced with the formulas that ``fit`` uses,
                or ruled out by a bound of its memory or its time; further numbers of virtual stages
                and of recomputed layers are priced where their bounds allow that they win

``--write`` puts the table into docs/explanation/search.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "search.md"
BEGIN, END = "<!-- benchmarks.speed.search: begin -->\n", "<!-- benchmarks.speed.search: end -->"
RUNS: Final = 2
HEAD: Final = (
    "| question | candidates | legal | seconds of one core | memory |\n"
    "| --- | ---: | ---: | ---: | ---: |\n"
)
QUESTIONS: Final = (
    "fit llama-3-8b 8xA100-80GB",
    "plan llama-3-8b 8xA100-80GB",
    "plan mixtral-8x7b 4x8xH100-SXM",
    "plan llama-3-70b 8x8xH100-SXM",
    "plan llama-3.1-405b 2048x8xH100-SXM",
    "plan llama-3.1-405b 2048x8xH100-SXM --seq-len 131072",
    "plan llama-3.1-405b 16384x8xH100-SXM",
    "plan deepseek-v3 256x8xH800-SXM",
)


def measure(question: str, compiled: str) -> tuple[float, float, dict[str, int]]:
    """Return seconds of one core, bytes, and the counts of a question's search."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "planner", *question.split(), "--json"]
    with tempfile.TemporaryFile() as output:
        environment = {**kept, "PYTHONPYCACHEPREFIX": compiled}
        process = subprocess.Popen(command, stdout=output, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{question}: exit code {process.returncode}")
        output.seek(0)
        counts = json.loads(output.read()).get("search", {})
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024.0, counts


def row(question: str, compiled: str) -> str:
    """Return the row of a question; the first run of all compiles modules, too."""
    runs = [measure(question, compiled) for _ in range(RUNS)]
    seconds, memory, counts = min(runs, key=lambda one: one[0])
    numbers = [f"{counts[name]:,}" if counts else "" for name in ("enumerated", "priced")]
    cells = [f"`{question}`", *numbers, f"{seconds:.2f}", f"{memory / 2**20:,.0f} MiB"]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Print the table, or write it into the page."""
    table = HEAD
    print(table, end="")
    with tempfile.TemporaryDirectory() as compiled:
        for question in QUESTIONS:
            table += row(question, compiled)
            print(table.splitlines()[-1], flush=True)
    if "--write" in sys.argv[1:]:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
