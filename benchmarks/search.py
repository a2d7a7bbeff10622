"""How fast plans are searched, and how that grows: ``python -m benchmarks.search``.

Llama-3-405B on 16,384 H100, and on 8 to 131,072 of them. Seconds are those of one core (the time
that the process computed; the clock on the wall stands beside it). Every question runs in a process
of its own, so that its peak memory is its own.

    candidates  all that were enumerated
    priced      legal plans: memory and time of every one of them, with the formulas that ``fit``
                uses, a second of the time that this takes
    search      the whole answer: enumerate, judge, price (time: of plans that can fit), rank,
                simulate the finalists
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Final

from cost_models.pricing.table import price_table
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from planner.request.model import resolve_model
from planner.request.scenario import build_scenario
from planner.search.candidates import Candidates
from planner.search.search import search
from planner.search.space import allowed_offloads

MODEL: Final = "llama-3-405b"
SHELL: Final = ("plan", "llama-3-8b", "8xH100-SXM", "--json")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question: accelerators in nodes of 8, and the batch."""

    num_gpus: int
    global_batch_size: int
    seq_len: int
    offloads: tuple[str, ...] = ()

    @property
    def scenario(self) -> Scenario:
        """Everything but the plan."""
        nodes = self.num_gpus // 8
        cluster = parse_cluster(f"{nodes}x8xH100-SXM" if nodes > 1 else "8xH100-SXM")
        question = build_scenario(
            resolve_model(MODEL),
            cluster,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
        )
        return question.scenario


LARGEST: Final = Problem(16_384, 16_384, 131_072)
BY_GPUS: Final = tuple(Problem(n, 4 * n, 8192) for n in (8, 64, 512, 4096, 16_384, 131_072))
BY_CANDIDATES: Final = (
    Problem(64, 256, 8192),
    Problem(2048, 2048, 8192),
    Problem(16_384, 16_384, 32_768),
    LARGEST,
    Problem(16_384, 16_384, 131_072, ("optimizer",)),
)


def measure(problem: Problem) -> dict[str, Any]:
    """Return what one question took."""
    scenario = problem.scenario
    begin, clock = time.process_time(), time.perf_counter()
    counts = search(scenario, offloads=allowed_offloads(problem.offloads)).counts
    core, wall = time.process_time() - begin, time.perf_counter() - clock
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {
        "gpus": problem.num_gpus,
        "candidates": counts.enumerated,
        "priced": counts.priced,
        "simulated": counts.simulated,
        "core_seconds": core,
        "wall_seconds": wall,
        "peak_bytes": memory,
    }


def pricing(problem: Problem) -> dict[str, Any]:
    """Return what it takes to price every legal plan, those that cannot fit too."""
    scenario = problem.scenario
    legal = Candidates.of(scenario, {}, offloads=allowed_offloads(problem.offloads)).legal
    begin = time.process_time()
    price_table(scenario, legal)
    return {"plans": len(legal), "price_seconds": time.process_time() - begin}


def apart(problem: Problem) -> dict[str, Any]:
    """Measure in processes of their own."""
    arguments = [
        problem.num_gpus,
        problem.global_batch_size,
        problem.seq_len,
        "+".join(problem.offloads),
    ]
    found: dict[str, Any] = {}
    for what in WHAT:
        command = [sys.executable, "-m", "benchmarks.search", what, *map(str, arguments)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found |= json.loads(output)
    return found


WHAT: Final = {"search": measure, "pricing": pricing}


def from_shell() -> float:
    """Return the seconds of ``shardplan plan`` of an 8-GPU question, Python's start included.

    Modules are compiled before, as they are where a package is installed.
    """
    with tempfile.TemporaryDirectory() as compiled:
        there = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        there["PYTHONPYCACHEPREFIX"] = compiled
        seconds = []
        for _ in range(2):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = [sys.executable, "-m", "planner", *SHELL]
            subprocess.run(command, capture_output=True, check=True, env=there)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return seconds[-1]


def line(found: dict[str, Any]) -> str:
    """Return one row of the table."""
    rate = f"{found['plans'] / found['price_seconds']:,.0f}"
    return (
        f"{found['gpus']:>9,} {found['candidates']:>12,} {found['priced']:>11,} {rate:>15} "
        f"{found['core_seconds']:>11.2f} {found['wall_seconds']:>8.2f} "
        f"{found['peak_bytes'] / 2**20:>10,.0f} {found['simulated']:>10}"
    )


HEAD: Final = (
    f"{'GPUs':>9} {'candidates':>12} {'priced':>11} {'priced/core s':>15} "
    f"{'search core':>11} {'wall s':>8} {'peak MiB':>10} {'simulated':>10}"
)


def main() -> None:
    """Measure one question, or print the tables."""
    if len(sys.argv) > 1:
        what, gpus, batch, length, offloads = sys.argv[1:]
        parts = tuple(filter(None, offloads.split("+")))
        print(json.dumps(WHAT[what](Problem(int(gpus), int(batch), int(length), parts))))
        return
    for title, problems in (
        (f"{MODEL} on 16,384 H100, 131,072 tokens", (LARGEST,)),
        ("by accelerators", BY_GPUS),
        ("by candidates", BY_CANDIDATES),
    ):
        print(f"\n{title}\n{HEAD}", flush=True)
        for problem in problems:
            print(line(apart(problem)), flush=True)
    print(f"\nshardplan {' '.join(SHELL)}: {from_shell():.2f} s of one core, cold from the shell")


if __name__ == "__main__":
    main()
