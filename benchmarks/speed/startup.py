"""Start-up time of the command line, as a multiple of ``python -c "import numpy"``.

    python -m benchmarks.speed.startup [ROUNDS]

Each round starts every command once, in turn, so that other load on the machine meets all of them;
the median of the rounds' ratios is printed. Processor seconds of the child processes, so waiting
for a busy processor does not count. Aims: ``--help`` at most 2 times, ``fit`` at most 4 times.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

COMMANDS = {
    "import numpy": ["-c", "import numpy"],
    "shardplan --help": ["-m", "planner", "--help"],
    "shardplan fit": ["-m", "planner", "fit", "llama-3-8b", "8xA100-80GB"],
}


def seconds(words: list[str]) -> float:
    """Return the processor seconds of one process; bytecode is cached, as when installed."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(rounds: int = 10) -> None:
    """Measure and print."""
    for words in COMMANDS.values():
        seconds(words)  # writes bytecode
    found = [{name: seconds(words) for name, words in COMMANDS.items()} for _ in range(rounds)]
    for name in COMMANDS:
        ratio = statistics.median(one[name] / one["import numpy"] for one in found)
        middle = statistics.median(one[name] for one in found)
        print(f"{name:<18} {1e3 * middle:6.0f} ms {ratio:5.1f} times")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
